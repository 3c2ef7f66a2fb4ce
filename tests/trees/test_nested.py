"""Nested objects taken apart and put together: every rule, every refusal, with paths."""

import dataclasses
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from mgpu_core.trees.nested import Replicate, flatten, unwrapped

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    x: Any
    mask: Any = None


class Made(namedtuple("Made", "a b")):
    """A named tuple whose constructor takes something else."""

    def __new__(cls, a):
        return super().__new__(cls, a, a)


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "n"
    computed: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.computed = [self.x]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


@dataclasses.dataclass(init=False)
class Output(OrderedDict):
    """As transformers' ModelOutput: a dataclass and an ordered dict, whose constructor takes pairs, too."""

    loss: Any = None
    logits: Any = None

    def __init__(self, loss=None, logits=None):
        super().__init__()
        pairs = [("loss", loss), ("logits", logits)]
        if loss is not None and not isinstance(loss, torch.Tensor) and logits is None:
            pairs = list(loss)
        for name, value in pairs:
            if value is not None:
                self[name] = value

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Rows(list):
    pass


class Columns(tuple):
    __slots__ = ()


def apart(obj, root="r", **options):
    leaves = []
    tree = flatten(obj, leaves, root, **options)
    return tree, leaves, tree.paths(root)


def again(obj):
    tree, leaves, _ = apart(obj)
    return tree.unflatten(iter(leaves))


@pytest.mark.parametrize("leaf", [None, 3, 2.5, "text", b"bytes", True, object(), {1, 2}, range(3), torch.float32, int])
def test_leaves_stay_themselves(leaf):
    tree, leaves, paths = apart(leaf)
    assert leaves[0] is leaf
    assert len(leaves) == 1
    assert paths == ["r"]
    assert tree.unflatten(iter(["other"])) == "other"


NESTS = {
    "list": [1, [2], []],
    "tuple": (1, (2,), ()),
    "dict": {"a": 1, 3: {"b": 2}, "empty": {}},
    "ordered": OrderedDict(b=1, a=2),
    "namedtuple": Pair(1, Pair(2, 3)),
    "typed": Typed(1),
    "list subclass": Rows([1, Rows()]),
    "tuple subclass": Columns([1, 2]),
    "frozen": Frozen((1, 2)),
    "struct_time": time.gmtime(0),
    "return type": torch.ones(2, 2).max(0),
}


@pytest.mark.parametrize("kind", NESTS)
def test_there_and_back(kind):
    obj = NESTS[kind]
    made = again(obj)
    assert type(made) is type(obj)
    assert made is not obj
    if kind == "return type":
        assert torch.equal(made.values, obj.values)
        assert torch.equal(made.indices, obj.indices)
    else:
        assert made == obj


def test_order_of_a_mapping_stays():
    assert list(again(OrderedDict(b=1, a=2))) == ["b", "a"]


def test_defaultdict_keeps_its_factory():
    made = again(defaultdict(list, a=1))
    assert type(made) is defaultdict
    assert made == {"a": 1}
    assert made["new"] == []


def test_model_output_keeps_its_class_and_attributes():
    made = again(Output(loss=torch.ones(1), logits=torch.zeros(2)))
    assert type(made) is Output
    assert list(made) == ["loss", "logits"]
    assert made.loss.tolist() == made["loss"].tolist() == [1]


def test_dataclass_is_copied_by_field_and_never_constructed_again():
    batch = Batch(1, "other")
    batch.computed = "mine"
    tree, leaves, paths = apart(batch)
    assert leaves == [1, "other", "mine"]
    assert paths == ["r.x", "r.name", "r.computed"]
    made = tree.unflatten(iter([5, "b", "c"]))
    assert (made.x, made.name, made.computed) == (5, "b", "c")
    assert (batch.x, batch.name, batch.computed) == (1, "other", "mine")


def test_dataclass_type_is_a_leaf():
    assert apart(Batch)[1] == [Batch]


def test_frozen_dataclass_with_slots():
    tree, _, paths = apart(Frozen(1))
    assert tree.unflatten(iter([2])) == Frozen(2)
    assert paths == ["r.x"]


def test_named_tuple_with_a_constructor_of_its_own_as_in_torchs_gather():
    assert again(Made(1)) == (1, 1)


def test_counter_is_not_counted_again():
    assert again(Counter(a=2, b=1)) == Counter(a=2, b=1)


class Node:
    def __repr__(self):
        return "Node"


def test_keys_that_look_alike_are_different_keys():
    # Modules and tensors are used as keys, too, and two of them may well have one text.
    one, two = Node(), Node()
    assert again({one: 1, two: 2}) == {one: 1, two: 2}


def test_mapping_that_is_no_dict_and_has_no_constructor_of_pairs():
    assert again(MappingProxyType({"a": 1})) == {"a": 1}


class Named(dict):
    """Its constructor takes something else than entries."""

    def __init__(self, name="train", **fields):
        super().__init__(**fields)
        self.name = name


class Sized(list):
    def __init__(self, size=None):
        super().__init__()
        self.size = size

    @classmethod
    def of(cls, values):
        made = cls()
        made.extend(values)
        return made


class Attributes(dict):
    """Its entries are its attributes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.__dict__ = self


class Refusing(dict):
    def __init__(self):
        super().__init__()

    def __setitem__(self, key, value):
        raise TypeError("read only")


def test_containers_with_constructors_of_their_own_keep_entries_and_attributes():
    made = again(Named("train", a=1, b=2))
    assert (type(made), dict(made), made.name) == (Named, {"a": 1, "b": 2}, "train")
    boxes = Sized(7)
    boxes.append(3)
    made = again(boxes)
    assert (type(made), list(made), made.size) == (Sized, [3], 7)
    tree, leaves, _ = apart(Attributes({"a": 1}))
    assert leaves == [1]
    assert tree.unflatten(iter([5])).a == 5
    one = Refusing()
    dict.__setitem__(one, "a", 1)
    assert again(one) == {"a": 1}


@dataclasses.dataclass
class FieldOutput(OrderedDict):
    """As diffusers' outputs: a dict of its fields, whose constructor takes all pairs for the first one."""

    sample: object = None
    other: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))


class Telling(FieldOutput):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


@pytest.mark.parametrize("kind", [FieldOutput, dataclasses.dataclass(Telling)])
@pytest.mark.parametrize("entries", [{"sample": 1}, {"other": 2}, {"sample": 1, "other": 2}])
def test_dicts_that_are_dataclasses(kind, entries):
    tree, leaves, _ = apart(kind(**{name: torch.full((2,), value + 10) for name, value in entries.items()}))
    made = tree.unflatten(iter([leaf - 10 for leaf in leaves]))
    assert type(made) is kind
    assert list(made) == list(entries)
    for name, value in entries.items():
        assert made[name] is getattr(made, name)
        assert made[name].tolist() == [value, value]


class Dotted(dict):
    """As configuration dicts: whatever dict is put in, is one of its own kind then, a new one each time."""

    def __init__(self, entries=()):
        super().__init__()
        for key, value in dict(entries).items():
            self[key] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, Dotted(value) if isinstance(value, dict) else value)

    def __copy__(self):
        raise TypeError("made by its constructor alone")


def test_dicts_that_make_dicts_their_own():
    tree, leaves, _ = apart(Dotted({"a": {"b": 1, "c": [2]}, "d": 3}))
    made = tree.unflatten(iter([10 * leaf for leaf in leaves]))
    assert (type(made), type(made["a"]), made) == (Dotted, Dotted, {"a": {"b": 10, "c": [20]}, "d": 30})


class ByRows(MutableMapping):
    """As a TensorDict: made of a dict alone, and its iterator goes over rows."""

    def __init__(self, entries):
        self.entries = dict(entries.items())

    def keys(self):
        return self.entries.keys()

    def values(self):
        return self.entries.values()

    def __iter__(self):
        raise TypeError("iteration over rows")

    def __len__(self):
        return 7

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]


def test_mappings_that_iterate_over_rows():
    given = ByRows({"a": 1, "b": 2})
    tree, leaves, _ = apart(given)
    made = tree.unflatten(iter([5, 6]))
    assert (type(made), made.entries, given.entries, leaves) == (ByRows, {"a": 5, "b": 6}, {"a": 1, "b": 2}, [1, 2])


class Batched(UserDict):
    """What transformers' tokenizers return: a mapping with a dict inside."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Stored(MutableMapping):
    """A constructor of its own, and a store that a shallow copy would share."""

    def __init__(self, *, name):
        self.name, self.store = name, {}

    def __getitem__(self, key):
        return self.store[key]

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        return iter(self.store)

    def __len__(self):
        return len(self.store)


def test_mappings_with_a_store_inside_get_their_own_entries():
    given = Batched({"a": 1}, encodings="words")
    tree, _, _ = apart(given)
    made = tree.unflatten(iter([5]))
    assert (type(made), made["a"], given["a"]) == (Batched, 5, 1)
    stored = Stored(name="x")
    stored["a"] = 1
    tree, _, _ = apart(stored)
    assert tree.unflatten(iter([5])) == {"a": 5}
    assert stored["a"] == 1


@pytest.mark.parametrize("make", [Rows, lambda values: Sized.of(values)])
def test_tensors_in_attributes_are_of_all_rows_and_stay_away(make):
    rows = make([1, 2])
    rows.mask, rows.source = torch.ones(2), "here"
    made = again(rows)
    assert made.source == "here"
    assert not hasattr(made, "mask")


def test_attributes_of_containers_come_along():
    rows = Rows([1, 2])
    rows.source = "here"
    made = again(rows)
    assert (type(made), made, made.source) == (Rows, [1, 2], "here")
    tree, _, _ = apart(Output(loss=1, logits=2))
    made = tree.unflatten(iter([3, 4]))
    assert (made["loss"], made.loss, made.logits) == (3, 3, 4)


def test_paths_name_every_leaf():
    obj = [1, {"x": (2, Pair(3, Batch(4))), 7: None}]
    _, leaves, paths = apart(obj, "inputs")
    assert paths == [
        "inputs[0]",
        "inputs[1]['x'][0]",
        "inputs[1]['x'][1].left",
        "inputs[1]['x'][1].right.x",
        "inputs[1]['x'][1].right.name",
        "inputs[1]['x'][1].right.computed[0]",
        "inputs[1][7]",
    ]
    assert leaves == [1, 2, 3, 4, "n", 4, None]


REFUSED = {
    "PackedSequence": lambda: pack_sequence([torch.ones(2), torch.ones(1)]),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "sparse tensor (torch.sparse_csr)": lambda: torch.eye(3).to_sparse_csr(),
    "quantized tensor (torch.quint8)": lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_path(kind):
    obj = REFUSED[kind]()
    with pytest.raises(TypeError) as caught:
        apart({"a": [0, obj]}, "inputs")
    assert str(caught.value).startswith("inputs['a'][1] is a ")
    assert kind in str(caught.value)
    assert apart([obj], whole=True)[1][0] is obj


def test_difference_says_where():
    def told(one, other):
        return apart(one)[0].difference(apart(other)[0], "r")

    assert told([1, {"a": 2}], [3, {"a": "x"}]) is None
    assert told([1, {"a": 2}], [1, {"b": 2}]) == (
        "r[1] has 1 entries (['a']) on one rank and 1 entries (['b']) on another"
    )
    assert told([{"a": 1}], [{"a": 1, "b": 2}]) == (  # torch's words, at any depth, and only where they are true
        "All dicts must have the same number of keys: "
        "r[0] has 1 entries (['a']) on one rank and 2 entries (['a'], ['b']) on another"
    )
    assert told({"a": 1}, {"a": [1]}) == "r['a'] is a leaf on one rank and a list on another"
    assert told([[1]], [(1,)]) == "r[0] is a list on one rank and a tuple on another"
    assert told([1], [[]]) == "r[0] is a leaf on one rank and a list on another"
    assert told({"x": [1]}, {"x": []}) == "r['x'] has 1 entries ([0]) on one rank and no entries on another"
    assert told(Pair(1, 2), (1, 2)) == "r is a Pair on one rank and a tuple on another"


def test_replicate_is_a_leaf_and_shows_its_value():
    marked = Replicate([1, 2])
    assert apart([marked])[1] == [marked]
    assert repr(marked) == "Replicate([1, 2])"


def test_unwrapped_takes_away_every_replicate():
    plain = [1, {"a": 2}]
    assert unwrapped(plain) is plain
    assert unwrapped([Replicate({"a": [Replicate(1)]}), Replicate(Replicate(2))]) == [{"a": [1]}, 2]


nests = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.float32)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        inner.map(Frozen),
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, database=None)
@given(nests)
def test_any_nest_there_and_back(obj):
    tree, leaves, paths = apart(obj)
    assert len(leaves) == len(paths) == len(set(paths))
    assert tree.unflatten(iter(leaves)) == obj
    assert tree.difference(apart(obj)[0], "r") is None
    for path, leaf in zip(paths, leaves, strict=True):
        found = eval(path, {"r": obj})  # a path is Python
        assert found is leaf

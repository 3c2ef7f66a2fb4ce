"""Random nests whose structure is known: a plan is drawn first, and the object is built from it.

A test that asks the object what it is would have to repeat the rules of the package.  A plan knows: it says which path
every leaf has, which tensors have rows, what is forbidden.
"""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from mgpu_core import Replicate

FUZZ = {
    "deadline": None,
    "derandomize": True,  # the same examples in every run
    "database": None,
    "suppress_health_check": list(HealthCheck),
}

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Pair = namedtuple("Pair", "left right")


class Rows(list):
    pass


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = "y"
    made: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


@dataclasses.dataclass(init=False)
class Output(OrderedDict):
    """As transformers' ModelOutput: entries are attributes, too."""

    loss: Any = None
    logits: Any = None

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def _batch(pairs):
    made = Batch(pairs[0][1], pairs[1][1])
    made.made = pairs[2][1]
    return made


# kind: type, names of the entries (None: numbers; (): keys), how it is built from (name, value) pairs
KINDS = {
    "list": (list, None, lambda pairs: [value for _, value in pairs]),
    "tuple": (tuple, None, lambda pairs: tuple(value for _, value in pairs)),
    "list subclass": (Rows, None, lambda pairs: Rows(value for _, value in pairs)),
    "return type": (
        torch.return_types.max,
        (0, 1),
        lambda pairs: torch.return_types.max([value for _, value in pairs]),
    ),
    "dict": (dict, (), dict),
    "ordered": (OrderedDict, (), OrderedDict),
    "defaultdict": (defaultdict, (), lambda pairs: defaultdict(list, pairs)),
    "model output": (Output, ("loss", "logits"), Output),
    "namedtuple": (Pair, ("left", "right"), lambda pairs: Pair(*(value for _, value in pairs))),
    "dataclass": (Batch, ("x", "y", "made"), _batch),
    "frozen": (Frozen, ("x",), lambda pairs: Frozen(pairs[0][1])),
}
FIELDS = ("namedtuple", "dataclass", "frozen")
MAPPINGS = ("dict", "ordered", "defaultdict", "model output")
KEYS = ("b", "a", 3, (1, "x"), None, 2.5, "it's")


class Node:
    """A planned object: a leaf with its value, or a container with named children.

    Attributes:
        kind: one of KINDS, or ``tensor``, ``thing``, ``refused``, ``replicate``.
        value: of a leaf.
        text: of what is refused: how messages call it.
        children: (name, node).
    """

    def __init__(self, kind, value=None, children=(), text=""):
        self.kind, self.value, self.children, self.text = kind, value, list(children), text

    def __repr__(self):
        return f"<plan of {self.build()!r}>"

    def build(self):
        if self.kind == "replicate":
            return Replicate(self.children[0][1].build())
        if self.kind in KINDS:
            return KINDS[self.kind][2]([(name, child.build()) for name, child in self.children])
        return self.value

    def leaves(self, path, opened=False):
        """(path, node) of each leaf, in order; ``opened``: also of those inside Replicate, which is then not there."""
        if self.kind == "replicate" and opened:
            yield from self.children[0][1].leaves(path, opened)
        elif self.kind in KINDS:
            for name, child in self.children:
                step = f".{name}" if self.kind in FIELDS else f"[{name!r}]"
                yield from child.leaves(path + step, opened)
        else:
            yield path, self

    def entries(self, obj):
        """The children of an object that should be built like this, each with its node; asserts that it is."""
        assert type(obj) is KINDS[self.kind][0]
        names = [name for name, _ in self.children]
        if self.kind in FIELDS:
            return [(getattr(obj, name), child) for name, child in self.children]
        assert (list(obj) if self.kind in MAPPINGS else list(range(len(obj)))) == names
        if self.kind == "defaultdict":
            assert obj.default_factory is list
        if self.kind == "model output":
            assert all(getattr(obj, name) is obj[name] for name in names)
        return [(obj[name], child) for name, child in self.children]


RANGES = [st.integers(0, top) for top in range(64)]  # made once: making one costs more than a draw


class Picker:
    """Small numbers from hypothesis."""

    def __init__(self, draw):
        self._draw = draw

    def below(self, count):
        return self._draw(RANGES[count - 1])

    def one_of(self, choices):
        return choices[self.below(len(choices))]

    def once_in(self, count):
        return self.below(count) == count - 1


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
GRADIENTS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
THINGS = (
    None,
    0,
    7,
    True,
    2.5,
    -0.0,
    float("nan"),
    "text",
    b"bytes",
    1j,
    torch.float32,
    torch.device("cpu"),
    range(3),
    frozenset({1}),
    object(),
    int,
    Batch,
)


def _dense(dtype, shape):
    numbers = torch.arange(torch.Size(shape).numel()) % 5
    if dtype.is_floating_point or dtype.is_complex:
        odd = torch.tensor([1.0, -0.0, float("nan"), -2.5, 3.0])
        return odd[numbers].to(dtype).reshape(shape)
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype).reshape(shape)


def _transposed(dense):
    order = list(range(dense.dim()))[::-1]
    return dense.permute(order).contiguous().permute(order)


def _channels_last(dense):
    order = CHANNELS_LAST.get(dense.dim())
    return dense if order is None else dense.contiguous(memory_format=order)


def _expanded(dense):
    return dense[:1].expand(dense.shape) if dense.dim() and dense.size(0) else dense


def _lazy(dense):
    if dense.is_complex():
        return dense.conj()
    return torch._neg_view(dense) if dense.dtype in (torch.float32, torch.float64) else dense


LAYOUTS = (
    lambda dense: dense,
    _transposed,
    _channels_last,
    _channels_last,
    lambda dense: torch.stack([dense, dense], -1)[..., 0],  # every other element
    _expanded,
    lambda dense: torch.cat([dense.reshape(-1)[:1], dense.reshape(-1)])[-dense.numel() or 1 :].reshape(dense.shape),
    _lazy,
)


def _tensor(picker, dims, dim, rows):
    shape = [picker.one_of((2, 1, 3, 2, 0)) for _ in range(dims)]
    if -dims <= dim < dims:
        shape[dim] = rows
    dtype = picker.one_of(DTYPES)
    tensor = picker.one_of(LAYOUTS)(_dense(dtype, shape))
    if dtype in GRADIENTS and picker.once_in(2):
        tensor.requires_grad_()
    return Node("tensor", tensor)


REFUSED = (
    ("PackedSequence", lambda: pack_sequence([torch.ones(2), torch.ones(1)])),
    ("nested tensor", lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)),
    ("nested tensor", lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
    ("sparse tensor (torch.sparse_coo)", lambda: torch.eye(3).to_sparse()),
    ("sparse tensor (torch.sparse_csr)", lambda: torch.eye(3).to_sparse_csr()),
    ("sparse tensor (torch.sparse_bsc)", lambda: torch.eye(4).to_sparse_bsc((2, 2))),
    ("quantized tensor", lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)),
)


def _fault(picker, dim, rows, faulty):
    """What a nest may not have: a tensor with other rows, without the dimension or memory, or of a forbidden kind."""
    needed = dim + 1 if dim >= 0 else -dim
    kind = picker.below(6)
    if kind < 2:
        return _tensor(picker, needed + picker.below(2), dim, rows + 1 + picker.below(2))
    if kind < 4 and needed > 1:
        return _tensor(picker, 1 + picker.below(needed - 1), dim, rows)
    if kind == 4 and faulty == "any":
        return Node("tensor", torch.empty([rows] * needed, device="meta"))
    text, make = picker.one_of(REFUSED)
    return Node("refused", make(), text=text)


def _leaf(picker, dim, rows, faulty, depth):
    if faulty and picker.once_in(4):
        return _fault(picker, dim, rows, faulty)
    kind = picker.below(16)
    if kind < 9:
        return _tensor(picker, min(5, (dim + 1 if dim >= 0 else -dim) + picker.one_of((0, 3, 1, 2))), dim, rows)
    if kind < 13:
        return Node("thing", picker.one_of(THINGS))
    if kind < 14:
        return _tensor(picker, 0, dim, rows)
    inside = nest(picker, dim, rows + picker.below(2), faulty, depth - 1)
    return Node("replicate", children=[(None, inside)])


def nest(picker, dim, rows, faulty, depth=3):
    """The plan of a nest whose tensors have ``rows`` rows along ``dim``.

    ``faulty`` says which forbidden things it may have: ``""`` (none), ``"any"``, ``"with memory"`` (no meta tensors).
    """
    if depth <= 0 or picker.once_in(depth + 3):
        return _leaf(picker, dim, rows, faulty, depth)
    kind = picker.one_of(tuple(KINDS))
    names = KINDS[kind][1]
    if names is None:
        names = range(picker.one_of((2, 1, 3, 0)))
    elif names == ():
        first = picker.below(len(KEYS))
        names = (KEYS[first:] + KEYS[:first])[: picker.one_of((2, 1, 3, 0))]
    return Node(kind, children=[(name, nest(picker, dim, rows, faulty, depth - 1)) for name in names])


def has_dimension(tensor, dim):
    return -tensor.dim() <= dim < tensor.dim()


def raised(call, wanted):
    """Asserts that exactly the wanted exception comes, with all the texts."""
    kind, texts = wanted
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for text in texts:
        assert text in message


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(one, other):
    assert one.dtype is other.dtype
    assert one.shape == other.shape
    one, other = (bits(each) for each in (one, other))
    assert torch.equal(one, other)


def order_of(tensor):
    """The layout that is promised to stay: channels_last, where a tensor is that and not contiguous as well."""
    last = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    only_last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    return last if only_last else torch.contiguous_format

"""Random outputs of several ranks, equal but for one leaf: gather joins them, or names the leaf.

As in test_fuzz.py, the oracle says beforehand what must happen: the outputs are built from a plan, and so is the leaf.
"""

from collections import Counter
from itertools import accumulate

import pytest
import torch
from fakes.nests import FUZZ, KINDS, MAPPINGS, Node, Picker, has_dimension, nest, raised, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core import gather

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # prototypes in torch, scalars that become vectors
]

OTHER = {True: 1, 0: False, 7: 7.0, 2.5: "2.5", "text": "other", None: 0}  # unequal, or equal and of another type


def plan_of_part(node, dim, begin, count):
    """The plan of one rank's output: its rows of every tensor; things as they are, or equal copies of them."""
    if node.kind == "replicate":
        return plan_of_part(node.children[0][1], dim, begin, count)
    if node.kind == "tensor":
        return Node("tensor", node.value.narrow(dim, begin, count) if node.value.dim() else node.value)
    if node.kind == "thing":
        value = node.value
        return Node("thing", float("nan") if value != value else value)  # no two of them are one
    children = [(name, plan_of_part(child, dim, begin, count)) for name, child in node.children]
    return Node(node.kind, children=children)


def indices(node, path):
    """(path, node) of everything in the plan, containers too."""
    yield path, node
    for name, child in node.children:
        step = f".{name}" if node.kind in ("namedtuple", "dataclass", "frozen") else f"[{name!r}]"
        yield from indices(child, path + step)


def become(node, other):
    node.kind, node.value, node.children = other.kind, other.value, other.children


def change_thing(picker, node, dim):
    what = picker.below(3)
    if what == 0:
        become(node, Node("list"))
        return ValueError, "differ in structure"
    if what == 1:
        node.kind, node.value = "tensor", torch.ones([2] * 3)
    elif node.value in OTHER:
        node.value = OTHER[node.value]
    else:
        node.value = object()
    return TypeError, "cannot be gathered"


def change_tensor(picker, node, dim):
    what = picker.below(4)
    if what == 0:
        become(node, Node("dict"))
        return ValueError, "differ in structure"
    if what == 1 or not node.value.dim():
        become(node, Node("thing", 0))
        return TypeError, "cannot be gathered"
    if what == 2:
        node.value = node.value.to(torch.float32 if node.value.dtype is torch.bool else torch.bool)
        return ValueError, "while gathering"
    node.value = node.value.unsqueeze(0) if dim >= 0 else node.value.unsqueeze(-1)  # one dimension too many
    return ValueError, "while gathering"


def change_container(picker, node, dim):
    what = picker.below(3)
    if what == 0:
        become(node, Node("thing"))
        return ValueError, "differ in structure"
    sized = [kind for kind, (_, names, _) in KINDS.items() if not names]
    if what == 1 or node.kind not in sized:
        become(node, Node("list" if node.kind != "list" else "tuple"))
        return ValueError, "differ in structure"
    name = len(node.children) if KINDS[node.kind][1] is None else "one more"
    node.children.append((name, Node("thing", 0)))
    return ValueError, "All dicts must have the same number of keys" if node.kind in MAPPINGS else "differ in structure"


class Case:
    """Outputs of some ranks, and what must come of gathering them: a refusal, or the plan of the whole."""

    def __init__(self, picker):
        self.dim = picker.one_of((0, -1, 1))
        self.counts = [picker.below(3) for _ in range(picker.one_of((2, 3, 8)))]
        whole = nest(picker, self.dim, sum(self.counts), "")
        begins = accumulate([0, *self.counts])
        self.parts = [
            plan_of_part(whole, self.dim, begin, count) for begin, count in zip(begins, self.counts, strict=False)
        ]
        self.whole = plan_of_part(whole, self.dim, 0, sum(self.counts))
        self.index, self.refusal = None, None
        if picker.below(2):
            self._change_one(picker)

    def _change_one(self, picker):
        rank = picker.below(len(self.parts))
        self.index, node = picker.one_of(list(indices(self.parts[rank], "outputs")))
        change = {"thing": change_thing, "tensor": change_tensor}.get(node.kind, change_container)
        self.refusal = change(picker, node, self.dim)

    def __repr__(self):
        return f"dim={self.dim} changed={self.index} outputs={[part.build() for part in self.parts]!r}"

    def wanted(self):
        """The refusal that must come: of the structure first, then of the leaves in their order."""
        if self.refusal and self.refusal[1] not in ("while gathering", "cannot be gathered"):
            return self.refusal[0], [self.index, self.refusal[1]]
        for path, leaf in self.whole.leaves("outputs"):
            if path == self.index:
                return self.refusal[0], [path, self.refusal[1]]
            if leaf.kind == "tensor" and not has_dimension(leaf.value, self.dim) and self.dim != 0:
                return IndexError, [f"while gathering {path} along dimension {self.dim}"]
        return None


@st.composite
def cases(draw):
    return Case(Picker(draw))


def check(node, found, ranks):
    if node.kind == "thing":
        assert type(found) is type(node.value)
        assert found is node.value or found == node.value or (found != found and node.value != node.value)
    elif node.kind == "tensor":
        same_bits(found, node.value if node.value.dim() else node.value.reshape(1).repeat(ranks))
    else:
        for value, child in node.entries(found):
            check(child, value, ranks)


def gathered(case):
    """Returns what happened."""
    outputs = [part.build() for part in case.parts]
    if wanted := case.wanted():
        raised(lambda: gather(outputs, "cpu", case.dim), wanted)
        return wanted[0].__name__
    check(case.whole, gather(outputs, "cpu", case.dim), len(outputs))
    return "joined"


def test_3000_random_outputs_are_joined_or_the_index_that_differs_is_named():
    happened = Counter()

    @settings(max_examples=3_000, **FUZZ)
    @given(cases())
    def fuzz(case):
        happened[gathered(case)] += 1

    fuzz()
    assert happened.total() >= 3_000
    for what, least in (("joined", 1_000), ("ValueError", 300), ("TypeError", 150), ("IndexError", 30)):
        assert happened[what] >= least, happened

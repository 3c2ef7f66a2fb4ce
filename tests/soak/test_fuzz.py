"""Random nests go through scatter and gather, and come back as they were or raise what is documented.

The oracle is in this file.  It knows the plan that a nest was built from (tests/fakes/nests.py), and says beforehand
which of both must happen, with which type and which path.  Where several things are wrong, what is forbidden at all
comes first, then the tensors in their order.
"""

from collections import Counter
from itertools import accumulate

import pytest
import torch
from fakes.nests import FUZZ, Node, Picker, has_dimension, nest, order_of, raised, same_bits
from fakes.nets import chunks, cpu
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core import _core, gather, scatter, scatter_kwargs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),  # 10,000 examples take a minute; a slow machine may take longer
    pytest.mark.filterwarnings("ignore::UserWarning"),  # prototypes in torch, scalars that become vectors
]


class Case:
    """What one example is about.

    Attributes:
        plan: of the nest; for ``scatter_kwargs`` a tuple of the positional and the keyword arguments.
        roots: what errors of scatter call the parts of the plan.
        dealt: keywords with one number per rank, where other tensors have other rows: each rank gets its own.
    """

    def __init__(self, picker):
        self.ranks = picker.one_of((2, 3, 8, 1))
        self.dim = picker.one_of((0, -1, 1, -2, 2))
        self.rows = picker.one_of((5, 1, 2, 9, 3, 0))
        self.shares = [1 + picker.below(4) for _ in range(self.ranks)] if picker.once_in(3) else None
        faulty = picker.one_of(("", "", "any" if self.ranks > 1 else "with memory"))
        self.arguments = picker.once_in(4)
        if self.arguments:
            given = [(i, nest(picker, self.dim, self.rows, faulty, 2)) for i in range(1 + picker.below(2))]
            named = [(name, nest(picker, self.dim, self.rows, faulty, 2)) for name in ("x", "mask")[picker.below(3) :]]
            if picker.once_in(5):
                shape = [1] * (abs(self.dim) + 1)
                shape[self.dim] = self.ranks
                named.append(("numbers", Node("tensor", torch.arange(float(self.ranks)).reshape(shape))))
            self.plan = Node("tuple", children=[(0, Node("tuple", children=given)), (1, Node("dict", children=named))])
            self.roots = [("inputs", self.plan.children[0][1]), ("kwargs", self.plan.children[1][1])]
        else:
            self.plan = nest(picker, self.dim, self.rows, faulty)
            self.roots = [("inputs", self.plan)]
        self.dealt = self._dealt() if self.arguments and self.ranks > 1 else []

    def _dealt(self):
        sized = [leaf for _, leaf in self.leaves() if leaf.kind == "tensor" and has_dimension(leaf.value, self.dim)]
        if all(leaf.value.size(self.dim) == self.ranks for leaf in sized):
            return []
        named = [leaf for _, leaf in self.roots[1][1].leaves("kwargs")]
        fitting = [leaf for leaf in sized if leaf.value.numel() == leaf.value.size(self.dim) == self.ranks]
        return [leaf for leaf in fitting if any(leaf is each for each in named)]

    def is_dealt(self, node):
        return any(node is each for each in self.dealt)

    def __repr__(self):
        return (
            f"ranks={self.ranks} dim={self.dim} rows={self.rows} shares={self.shares} "
            f"arguments={self.arguments} {self.plan!r}"
        )

    def scatter(self):
        obj = self.plan.build()
        if self.arguments:
            parts = scatter_kwargs(*obj, cpu(self.ranks), self.dim, shares=self.shares)
            assert [type(each) for each in parts] == [tuple, tuple]
            return list(zip(*parts, strict=True))
        parts = scatter(obj, cpu(self.ranks), self.dim, shares=self.shares)
        assert type(parts) is (tuple if isinstance(obj, torch.Tensor) else list)
        return parts

    def leaves(self):
        return [leaf for root, plan in self.roots for leaf in plan.leaves(root)]


@st.composite
def cases(draw):
    return Case(Picker(draw))


def refused_by_scatter(case):
    """(exception, texts) that must come, before anything is copied; or None."""
    if case.ranks == 1:
        return None  # one rank cuts nothing
    leaves = case.leaves()
    for path, leaf in leaves:
        if leaf.kind == "refused":
            return TypeError, [f"{path} is a {leaf.text}"]
    first = None
    for path, leaf in leaves:
        if leaf.kind == "tensor" and leaf.value.dim():
            shape = tuple(leaf.value.shape)
            text = f"{path} has shape {shape}"
            if not has_dimension(leaf.value, case.dim):
                return IndexError, [text, f"dimension {case.dim}"]
            if case.is_dealt(leaf):
                continue
            first = first or (text, shape[case.dim])
            if shape[case.dim] != first[1]:
                return ValueError, [text, first[0], f"dimension {case.dim}"]
    return None


def refused_while_copying(case):
    """(exception, texts) of what is found when its turn comes: memory that is not there, or not one block."""
    if case.ranks == 1:
        return None
    for path, leaf in case.leaves():
        inside = [each for _, each in leaf.leaves("", opened=True)]
        if any(each.text == "nested tensor" for each in inside):
            return TypeError, ["Replicate(...) holds a nested tensor", f"while scattering {path}"]
        if any(each.kind == "tensor" and each.value.is_meta for each in inside):
            return TypeError, ["meta device", f"while scattering {path}"]
    return None


def refused_by_gather(case):
    leaves = list(case.plan.leaves("outputs", opened=True))
    for path, leaf in leaves:
        if leaf.kind == "refused":
            return TypeError, [f"{path} is a {leaf.text}"]
    for path, leaf in leaves:
        if leaf.kind == "tensor":
            if not has_dimension(leaf.value, case.dim) and (leaf.value.dim() or case.dim != 0):
                return IndexError, [f"while gathering {path} along dimension {case.dim}"]
            if leaf.value.is_meta:
                return TypeError, ["meta device", f"while gathering {path} along dimension {case.dim}"]
    return None


def rows_of(case):
    """Rows that are cut, or None: those of the tensors outside Replicate.  One rank cuts nothing."""
    if case.ranks == 1:
        return None
    with_rows = [leaf.value for _, leaf in case.leaves() if has_rows(leaf, case)]
    return with_rows[0].size(case.dim) if with_rows else None


def has_rows(leaf, case):
    return leaf.kind == "tensor" and leaf.value.dim() and not case.is_dealt(leaf)


def check_counts(counts, case, rows):
    """Rows per rank, as documented; None for a rank that gets everything."""
    if rows is None:
        assert len(counts) == case.ranks
    elif case.shares is None or rows <= case.ranks:
        assert counts == (chunks(rows, case.ranks) or [0])
    else:
        assert sum(counts) == rows
        assert len(counts) == case.ranks
        assert min(counts) >= 1
        for share, count in zip(case.shares, counts, strict=True):
            for other_share, other in zip(case.shares, counts, strict=True):
                assert share < other_share or count >= other - (share == other_share)


def check_part(node, part, case, rank, begin, count, whole=False):
    """One rank's part: containers as planned, tensors cut (inside Replicate whole), other leaves the very object."""
    if node.kind == "replicate":
        check_part(node.children[0][1], part, case, rank, begin, count, whole=True)
    elif node.kind not in ("tensor", "thing", "refused"):
        for value, child in node.entries(part):
            check_part(child, value, case, rank, begin, count, whole)
    elif node.kind == "thing" or case.ranks == 1:
        assert part is node.value
    elif node.kind == "tensor":
        cut = node.value.dim() and not whole
        if case.is_dealt(node):
            begin, count = rank, 1
        same_bits(part, node.value.narrow(case.dim, begin, count) if cut else node.value)
        assert part.requires_grad == node.value.requires_grad
        if cut:
            assert part.is_contiguous(memory_format=order_of(node.value))
        if part.numel():
            assert part.untyped_storage().data_ptr() != node.value.untyped_storage().data_ptr(), "not fresh memory"


def check_whole(node, found, first, case, parts, joined, whole=False):
    """What gather made of ``parts`` equal structures; ``first`` is rank 0's.  Tensors are noted in ``joined``."""
    if node.kind == "replicate":
        check_whole(node.children[0][1], found, first, case, parts, joined, whole=True)
    elif node.kind == "thing":
        assert found is node.value
    elif node.kind == "tensor":
        wanted = node.value.detach()
        if not wanted.dim():
            wanted = wanted.reshape(1).repeat(parts)
        elif case.is_dealt(node):
            wanted = wanted.narrow(case.dim, 0, parts).resolve_conj().resolve_neg()
        elif whole:
            wanted = torch.cat([wanted.resolve_conj().resolve_neg()] * parts, case.dim)
        same_bits(found, wanted)
        assert found.requires_grad == node.value.requires_grad
        assert found.is_contiguous(memory_format=order_of(first))
        assert found is not first
        if not case.is_dealt(node):
            joined.append((found, node.value, parts if whole or not node.value.dim() else 1))
    else:
        for (value, child), (one, _) in zip(node.entries(found), node.entries(first), strict=True):
            check_whole(child, value, one, case, parts, joined, whole)


def there_and_back(case):
    """Returns what happened."""
    _core.reset_counters()
    if wanted := refused_by_scatter(case):
        raised(case.scatter, wanted)
        assert _core.counters() == {}, "something was copied before the refusal"
        return f"scatter {wanted[0].__name__}"
    if wanted := refused_while_copying(case):
        raised(case.scatter, wanted)
        return "no memory"
    parts = case.scatter()
    rows = rows_of(case)
    counts = counts_of(case, parts, rows)
    check_counts(counts, case, rows)
    for rank, (part, begin, count) in enumerate(zip(parts, accumulate([0, *counts]), counts, strict=False)):
        check_part(case.plan, part, case, rank, begin, count)
    if wanted := refused_by_gather(case):
        raised(lambda: gather(parts, "cpu", case.dim), wanted)
        return f"gather {wanted[0].__name__}"
    joined = []
    check_whole(case.plan, gather(parts, "cpu", case.dim), parts[0], case, len(parts), joined)
    check_gradients(joined)
    return "there and back"


def check_gradients(joined):
    """Of (result, what it was made of, how many times): each element's gradient says how often it is there."""
    joined = [each for each in joined if each[0].requires_grad]
    if joined:
        wholes, sources, times = zip(*joined, strict=True)
        grads = torch.autograd.grad(wholes, sources, [torch.ones_like(whole) for whole in wholes])
        for grad, source, count in zip(grads, sources, times, strict=True):
            same_bits(grad, torch.full_like(source, count))


def counts_of(case, parts, rows):
    """Rows of each part, read from its first tensor with rows (the others are compared with it, bit by bit)."""
    if rows is None:
        return [0] * len(parts)
    index = next(i for i, (_, leaf) in enumerate(case.leaves()) if has_rows(leaf, case))
    return [leaves_like(case.plan, part)[index].size(case.dim) for part in parts]


def leaves_like(node, part):
    if node.kind in ("tensor", "thing", "refused", "replicate"):
        return [part]
    return [leaf for value, child in node.entries(part) for leaf in leaves_like(child, value)]


def test_10000_random_nests_come_back_or_raise_what_is_documented():
    happened, dealt = Counter(), Counter()

    @settings(max_examples=10_000, **FUZZ)
    @given(cases())
    def fuzz(case):
        happened[there_and_back(case)] += 1
        dealt[bool(case.dealt)] += 1

    fuzz()
    assert happened.total() >= 10_000
    assert happened["there and back"] >= 5_000
    for refusal in ("scatter TypeError", "scatter ValueError", "scatter IndexError", "gather TypeError"):
        assert happened[refusal] >= 100, refusal
    assert dealt[True] >= 50
    for rare in ("no memory", "gather IndexError"):
        assert happened[rare] >= 50, rare

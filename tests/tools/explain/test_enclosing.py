"""Which span a moment lies in."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import mgpu_core
from mgpu_core.tools.explain.enclosing import Enclosing
from mgpu_core.tools.explain.scenes import scenes_of
from mgpu_core.trace.events import Span


def span(step, begin, end, thread=1):
    return Span(step, -1, -1, "", begin, end, begin, end, thread)


def test_the_outermost_of_its_name_and_thread():
    outer, inner, later = span("scatter", 10, 50), span("scatter", 20, 30), span("scatter", 60, 70)
    other, thread = span("gather", 15, 40), span("scatter", 0, 100, thread=2)
    found = Enclosing([inner, later, other, thread, outer])
    assert [found.span(1, "scatter", at) for at in (9, 10, 25, 50, 51, 60, 71)] == [
        None, outer, outer, outer, None, later, None,
    ]  # fmt: skip
    assert found.span(1, "gather", 25) is other
    assert found.span(2, "scatter", 55) is thread
    assert found.span(3, "scatter", 25) is None


NESTED = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(NESTED, st.integers(-1, 61))
def test_as_if_all_were_looked_at(ends, at):
    """Spans of a thread are nested or apart: of a pair that is neither, the later one is left out."""
    spans = []
    for begin, end in sorted((min(pair), max(pair)) for pair in ends):
        if all(end <= each.host_end_ns or begin > each.host_end_ns for each in spans):
            spans.append(span("a", begin, end))
    around = [each for each in spans if each.host_begin_ns <= at <= each.host_end_ns]
    widest = max(around, key=lambda each: each.host_end_ns - each.host_begin_ns, default=None)
    found = Enclosing(spans).span(1, "a", at)
    assert (found is None) == (widest is None)
    if found is not None:
        assert (found.host_begin_ns, found.host_end_ns) == (widest.host_begin_ns, widest.host_end_ns)


def test_thousands_of_calls_are_one_look_each(monkeypatch):
    """Not one for each pair: counted, not timed."""
    with mgpu_core.explain() as trace:
        for _ in range(300):
            mgpu_core.gather(mgpu_core.scatter(torch.ones(8, 2), ["cpu"] * 2), "cpu")
    asked = []
    ask = Enclosing.span
    monkeypatch.setattr(Enclosing, "span", lambda self, *about: asked.append(about) or ask(self, *about))
    assert len(scenes_of(trace.step())) == 600
    assert len(asked) <= 600 + 2 * 600

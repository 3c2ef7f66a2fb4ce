"""What a recording holds: every step of the road, with its ranks and bytes; nothing when it is off."""

import pytest
import torch

import mgpu_core
from mgpu_core import comm, record


def test_off_is_one_shared_object():
    assert not record.is_on()
    assert record.span("a") is record.span("b", 3, 4, "c")
    record.event("nothing")


def test_every_step_of_the_road():
    net = torch.nn.Linear(3, 2)
    model = mgpu_core.DataParallel(net, ["cpu"] * 2)
    x = torch.randn(5, 3)
    with record.recording() as story:
        assert record.is_on()
        loss = (model(x) * torch.arange(10.0).reshape(5, 2)).sum()
        loss.backward()
    assert not record.is_on()
    steps = set(story.steps())
    assert {"scatter", "replicate", "broadcast", "apply", "forward", "gather", "reduce"} <= steps
    by_rank = {(entry.step, entry.rank): entry.nbytes for entry in story.entries if entry.nbytes}
    assert by_rank["scatter", 0] in (36, 24)  # 3 rows of 3 floats forward, 3 of 2 on the way back
    assert by_rank["broadcast", 1] == 4 * (3 * 2 + 2)
    assert by_rank["reduce", 0] == by_rank["reduce", 1] == 4 * (3 * 2 + 2)
    assert by_rank["gather", 1] == 2 * 2 * 4
    forwards = [entry for entry in story.entries if entry.step == "forward"]
    assert sorted(entry.rank for entry in forwards) == [0, 1]
    assert len({entry.thread for entry in forwards}) == 2
    assert all(entry.end_ns > entry.begin_ns for entry in forwards)


def test_collectives_tell_their_algorithm():
    with record.recording() as story:
        comm.all_reduce([torch.zeros(4), torch.zeros(4)], algorithm="ring")
    assert [(e.step, e.rank, e.nbytes, e.detail) for e in story.entries if e.rank >= 0] == [
        ("all_reduce", 0, 16, "ring"),
        ("all_reduce", 1, 16, "ring"),
    ]


def test_one_recording_at_a_time():
    with record.recording(), pytest.raises(RuntimeError, match="already on"), record.recording():
        pass
    assert not record.is_on()


def test_a_recording_ends_with_an_error():
    with pytest.raises(KeyError), record.recording() as story, record.span("step"):
        raise KeyError
    assert story.steps() == ["step"]
    assert not record.is_on()

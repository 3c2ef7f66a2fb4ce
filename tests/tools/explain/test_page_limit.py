"""A step that is too large for a page: less of it is shown, from both ends, and the page says so."""

import json
import re

import pytest
import torch
from torch.nn import functional

import mgpu_core
from mgpu_core import comm
from mgpu_core.tools.explain import page
from mgpu_core.tools.explain.downsample import thinned


def ring(number, rounds, bucket=-1):
    return [
        {"kind": "round", "title": f"ring, round {each + 1} of {rounds}", "text": "moved", "begin": 10 * number + each,
         "end": 10 * number + each + 1, "order": each, "bucket": bucket, "rounds": rounds, "round": each,
         "arrows": [{"from": [0]}], "more": 0}
        for each in range(rounds)
    ]  # fmt: skip


def bars(*buckets):
    return [{"name": "reduce", "bucket": bucket, "begin": bucket, "end": bucket} for bucket in buckets]


def step(buckets, scenes, lanes):
    return {
        "buckets": [{"bucket": bucket, "names": [], "nbytes": []} for bucket in buckets],
        "scenes": scenes,
        "lanes": [{"name": "host", "bars": each} for each in lanes],
        "parts": [],
        "left_out": "",
    }


def test_buckets_in_the_middle_go_with_all_that_is_of_them():
    ready = {"ready": [{"rank": 0, "bucket": bucket, "at": 1} for bucket in range(6)]}
    backward = {"kind": "backward", "begin": 0, "order": 0, **ready}
    sums = [each for bucket in range(6) for each in ring(bucket, 1, bucket)]
    found = thinned(step(range(6), [backward, *sums], [bars(-1, *range(6))]), 4)
    assert [each["bucket"] for each in found["buckets"]] == [0, 1, 4, 5]
    assert [mark["bucket"] for mark in found["scenes"][0]["ready"]] == [0, 1, 4, 5]
    assert [each["bucket"] for each in found["scenes"][1:]] == [0, 1, 4, 5]
    assert [each["bucket"] for each in found["lanes"][0]["bars"]] == [-1, 0, 4, 5]
    assert found["left_out"] == "Too much for this page: 2 buckets, 2 scenes, 3 bars."


def test_rounds_go_together():
    scenes = [*ring(0, 2), *ring(1, 5), *ring(2, 2)]
    found = thinned(step([], scenes, [bars(7)]), 4)
    assert found["scenes"] == [
        *scenes[:2],
        scenes[2]
        | {"title": "ring", "text": "Its 5 rounds are too much for this page.", "end": 15, "rounds": 1, "arrows": []},
        *scenes[7:],
    ]
    assert found["left_out"] == "Too much for this page: 4 scenes."
    many = [each for number in range(9) for each in ring(number, 2)]
    assert thinned(step([], many, []), 4)["scenes"] == [*many[:4], *many[-4:]]


def data_of(trace):
    (text,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page.page_of(trace), re.DOTALL)
    return json.loads(text)


def test_a_page_has_as_much_of_a_step_as_there_is_room_for(monkeypatch):
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))
    training = mgpu_core.TrainStep(
        net, functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), ["cpu"] * 2, bucket_nbytes=4
    )
    with mgpu_core.explain() as trace:
        for _ in range(2):
            training(torch.ones(4, 4), torch.ones(4, 4))
    training.close()
    whole = data_of(trace)
    assert [each["left_out"] for each in whole["steps"]] == ["", ""]
    assert len(whole["steps"][1]["buckets"]) == 40
    empty = len(page._filled({**whole, "left_out": 2, "steps": []}).encode())
    monkeypatch.setattr(page, "_DETAILS", (256, 16))
    monkeypatch.setattr(page, "MOST_NBYTES", empty + len(json.dumps(whole["steps"][1], separators=(",", ":"))))
    assert len(page.page_of(trace).encode()) <= page.MOST_NBYTES
    found = data_of(trace)
    assert found["left_out"] == 1
    (less,) = found["steps"]
    assert [each["bucket"] for each in less["buckets"]] == [*range(8), *range(32, 40)]
    assert less["left_out"].startswith("Too much for this page: 24 buckets, 24 scenes, ")
    assert less["table"] == whole["steps"][1]["table"]


def test_what_helps_is_said_where_no_page_is_small_enough(monkeypatch):
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    monkeypatch.setattr(page, "MOST_NBYTES", 1000)
    with pytest.raises(
        ValueError, match=r"a trace \(save_trace, --trace\) has no limit; a larger bucket_nbytes or fewer"
    ):
        page.page_of(trace)

"""Batches of predictors in a trace: who ran what when, how long requests waited, and idle shares."""

import json
import re
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from mgpu_core import Pipeline, Predictor, TrainStep, explain, optim
from mgpu_core.tools.explain import batches
from mgpu_core.tools.explain.batches import BatchRun, batches_of, inference_data, servers_of
from mgpu_core.tools.explain.page import page_data
from mgpu_core.tools.explain.perfetto import trace_of
from mgpu_core.tools.explain.steps import Recorded, Step
from mgpu_core.trace.events import INFERENCE, Served, Span

LATE = 10_000  # milliseconds: a batch starts when it is full


def asked(predict, *rows):
    futures = [predict.submit(torch.ones(count, 4)) for count in rows]
    return [future.result(20) for future in futures]


def test_each_batch_with_its_rows_and_requests():
    with Predictor(nn.Linear(4, 2), ["cpu"], max_batch=6, max_wait_ms=LATE) as predict, explain() as trace:
        asked(predict, 1, 2, 3)  # the workers are older than the recording
        asked(predict, 6)
    assert [(each.rows, each.requests) for each in trace.batches] == [(6, 3), (6, 1)]
    assert [(each.predictor, each.rank, each.devices) for each in trace.batches] == [(0, 0, ("cpu",))] * 2
    for each in trace.batches:
        assert each.waited_ns > 0
        assert each.launched_ns <= each.begin_ns < each.end_ns
    assert [step.name for step in trace.steps] == ["inference"]


def test_all_ranks_and_predictors_are_seen():
    first, second = (Predictor(nn.Linear(4, 2), ["cpu"] * ranks, max_batch=2) for ranks in (3, 1))
    with explain() as trace, first, second:
        first(torch.ones(6, 4))  # cut into three batches of two rows
        second(torch.ones(2, 4))
    assert [(each.predictor, each.rows) for each in trace.batches] == [(0, 2)] * 3 + [(1, 2)]
    names = [server.name for server in servers_of(trace.batches)]
    assert names == [f"predictor 0, rank {rank} (cpu)" for rank in range(3)] + ["predictor 1, rank 0 (cpu)"]
    assert all(name in trace.table() for name in names)


def test_without_a_recording_nothing_is_kept():
    with Predictor(nn.Linear(4, 2), ["cpu"]) as predict:
        predict(torch.ones(2, 4))
        with explain() as trace:
            pass
        predict(torch.ones(2, 4))
    assert (trace.batches, trace.steps) == ([], [])


def test_skipped_steps_take_no_batches_with_them():
    with Predictor(nn.Linear(4, 2), ["cpu"]) as predict, explain(skip=3, steps=1) as trace:
        predict(torch.ones(2, 4))
    assert [(each.rows, each.requests) for each in trace.batches] == [(2, 1)]


class Picky(nn.Module):
    def forward(self, x):
        if (x < 0).any():
            raise ValueError("below zero")
        return x


def test_a_batch_that_failed_is_seen_as_those_that_replaced_it():
    with Predictor(Picky(), ["cpu"], max_batch=3, max_wait_ms=LATE) as predict, explain() as trace:
        futures = [predict.submit(torch.full((1, 4), value)) for value in (1.0, -1.0, 2.0)]
        with pytest.raises(ValueError, match="below zero"):
            futures[1].result(20)
        assert torch.equal(futures[2].result(20), torch.full((1, 4), 2.0))
    assert [(each.rows, each.requests) for each in trace.batches] == [(1, 1)] * 2


def test_batches_are_a_step_of_their_own_behind_those_of_training():
    net = nn.Linear(4, 2)
    step = TrainStep(net, nn.functional.mse_loss, optim.SGD(net.parameters(), lr=0.1), ["cpu"] * 2)
    with Predictor(net, ["cpu"]) as predict, explain() as trace:
        predict(torch.ones(2, 4))
        for _ in range(2):
            step(torch.ones(4, 4), torch.ones(4, 2))
        predict(torch.ones(2, 4))
    assert [each.name for each in trace.steps] == ["train_step", "train_step", "inference"]
    assert len(trace.batches) == 2
    assert trace.step().number == 1
    text = trace.table()
    assert text.startswith("recorded step 1: train_step")
    assert re.search(r"^rank 0 \(cpu\) +2 +2 +4 +2\.0 ", text, re.MULTILINE)
    assert trace.table(2).startswith("recorded step 2: inference, 1 rank (cpu)")


def test_a_pipeline_in_a_predictor_keeps_its_own_steps():
    net = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["cpu"] * 2, chunks=2)
    with Predictor(net) as predict, explain() as trace:
        for _ in range(2):
            predict(torch.ones(4, 4))
    assert [each.name for each in trace.steps] == ["pipeline", "pipeline", "inference"]
    assert [each.rows for each in trace.batches] == [4, 4]
    assert len(page_data(trace)["steps"][0]["pipelines"]) == 1


def span(rank, begin, end):
    return Span("batch", rank, -1, "cpu", begin, end, begin, end, rank, INFERENCE)


def served(rank, at, waited, rows=4, requests=2, predictor=7):
    return Served(predictor, rank, ("cpu", "cpu"), rows, requests, waited, at, rank, INFERENCE)


def by_hand():
    """Rank 0 runs 20 of 100 us, in two batches; rank 1 runs 50 in one."""
    ranks = [span(0, 1_000, 11_000), span(0, 91_000, 101_000), span(1, 41_000, 91_000)]
    told = [served(0, 2_000, 500), served(0, 100_000, 40_000, 1, 1), served(1, 90_000, 3_000)]
    return Step(0, "inference", [*ranks, *told])


def test_times_are_those_of_the_span_around():
    assert batches_of(by_hand()) == [
        BatchRun(0, 0, ("cpu", "cpu"), 4, 2, 500, 1_000, 1_000, 11_000),
        BatchRun(0, 1, ("cpu", "cpu"), 4, 2, 3_000, 41_000, 41_000, 91_000),
        BatchRun(0, 0, ("cpu", "cpu"), 1, 1, 40_000, 91_000, 91_000, 101_000),
    ]
    cut_off = Step(0, "inference", [served(0, 5, 1)])  # the recording began inside of it
    assert batches_of(cut_off) == []
    assert inference_data(cut_off) is None


def test_idle_is_the_time_in_which_a_rank_runs_no_batch():
    assert [(each.name, each.idle) for each in servers_of(batches_of(by_hand()))] == [
        ("rank 0 (cpu)", 0.8),
        ("rank 1 (cpu)", 0.5),
    ]


def test_a_rank_without_batches_is_idle_all_the_time():
    step = Step(0, "inference", [span(0, 1_000, 11_000), served(0, 2_000, 500)])
    assert [(each.name, each.idle) for each in servers_of(batches_of(step))] == [
        ("rank 0 (cpu)", 0.0),
        ("rank 1 (cpu)", 1.0),
    ]
    line = trace_with(step).table().splitlines()[-2]
    assert line.split() == ["rank", "1", "(cpu)", "0", "0", "0", "-", "-", "-", "-", "100.0%"]


def test_the_table_by_hand():
    text = trace_with(by_hand()).table()
    lines = [re.split(r"  +", line) for line in text.splitlines()[-4:-1]]
    head = ["inference", "batches", "requests", "rows", "rows a batch", "time", "oldest waited", "at most", "idle"]
    assert lines == [
        head,
        ["rank 0 (cpu)", "2", "3", "5", "2.5", "10 us", "20.2 us", "40 us", "80.0%"],
        ["rank 1 (cpu)", "1", "2", "4", "4.0", "50 us", "3 us", "3 us", "50.0%"],
    ]


def trace_with(step):
    with explain() as trace:
        pass
    trace.steps = [step]
    return trace


def test_the_page_draws_the_last_batches(monkeypatch):
    (data,) = page_data(Recorded([by_hand()]))["steps"]
    assert data["inference"]["ranks"] == ["rank 0 (cpu)", "rank 1 (cpu)"]
    assert data["inference"]["batches"][0] == {
        "row": 0, "rows": 4, "requests": 2, "asked": 0, "launched": 0.5, "begin": 0.5, "end": 10.5,
    }  # fmt: skip
    assert (data["lanes"], len(data["scenes"]), data["inference"]["left_out"]) == ([], 1, 0)
    monkeypatch.setattr(batches, "MOST_DRAWN", 1)
    short = inference_data(by_hand())
    assert (short["left_out"], [each["rows"] for each in short["batches"]]) == (2, [1])
    assert short["batches"][0]["asked"] == 50.5  # on the axis of the whole recording, since its first request


def test_a_step_of_batches_has_one_span_and_the_table_of_its_ranks():
    """The title, the axis and the table: from the first request to the end of the last batch."""
    (data,) = page_data(Recorded([by_hand()]))["steps"]
    assert data["us"] == max(each["end"] for each in data["inference"]["batches"]) == 100.5
    assert [row[:5] for row in data["table"]] == [
        ["inference", "batches", "requests", "rows", "rows a batch"],
        ["rank 0 (cpu)", "2", "3", "5", "2.5"],
        ["rank 1 (cpu)", "1", "2", "4", "4.0"],
    ]
    text = trace_with(by_hand()).table()
    assert text.startswith("recorded step 0: inference, 2 ranks (cpu, cpu), 100 us\n")
    assert "inference 100 us" in repr(trace_with(by_hand()))
    shown = trace_with(by_hand())._repr_html_()
    assert "rows a batch</th>" in shown
    assert "your script</td>" not in shown
    assert not any(line.startswith(("phase", "batch ", "your script", "bus GB/s")) for line in text.splitlines())


def test_a_long_recording_makes_a_small_page(tmp_path):
    events = [each for at in range(0, 10_000_000, 1_000) for each in (span(0, at, at + 900), served(0, at + 5, 1))]
    trace = trace_with(Step(0, "inference", events))
    trace.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 100_000
    assert len(trace.batches) == 10_000


def test_the_trace_for_perfetto_has_rows_requests_and_waits():
    events = trace_of(Recorded([by_hand()]))["traceEvents"]
    joined = [each for each in events if each["name"] == "joined"]
    assert [each["args"] for each in joined] == [
        {"rows": 4, "requests": 2, "waited_us": 0.5},
        {"rows": 1, "requests": 1, "waited_us": 40.0},
        {"rows": 4, "requests": 2, "waited_us": 3.0},
    ]
    blocks = [each for each in events if each["name"] == "batch"]
    assert {each["tid"] for each in joined} == {each["tid"] for each in blocks}
    assert sorted(each["dur"] for each in blocks) == [10.0, 10.0, 50.0]


SCRIPT = """
import torch, mgpu_core
with mgpu_core.Predictor(torch.nn.Linear(4, 2), ["cpu"] * 2, max_batch=3) as predict:
    predict(torch.ones(6, 4))
    print("answered")
"""


def test_the_command_shows_a_script_with_a_predictor(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--html", "a.html", "--trace", "b.json", "script.py"]
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "answered" in done.stdout
    assert "recorded step 0: inference" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["written: a.html", "written: b.json"]
    names = [each["name"] for each in json.loads((tmp_path / "b.json").read_text())["traceEvents"]]
    assert (names.count("batch"), names.count("joined")) == (2, 2)
    assert '"inference":{"ranks"' in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_callers_of_many_threads_while_it_is_recorded():
    with Predictor(nn.Linear(4, 2), ["cpu"] * 2, max_batch=8, max_wait_ms=1) as predict, explain() as trace:
        threads = [threading.Thread(target=lambda: [predict(torch.ones(1, 4)) for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = predict.stats()
    assert sum(each.requests for each in trace.batches) == 400
    by_rank = [[each for each in trace.batches if each.rank == rank] for rank in range(2)]
    assert [len(own) for own in by_rank] == [each.batches for each in stats]
    for own in by_rank:
        assert all(before.end_ns <= after.begin_ns for before, after in pairwise(own))

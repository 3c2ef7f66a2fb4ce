"""A step at other sizes, by hand; and the command: its table, its exits."""

import dataclasses

import pytest

from mgpu_core.tools.cli import main
from mgpu_core.tools.explain.predict import exposed_seconds, predict_step
from mgpu_core.tools.explain.step_profile import BucketProfile, StepProfile
from mgpu_core.tools.explain.topology import Link, Topology

UNIT = Link(1.0, 1.0)
NODE = Topology("unit", UNIT)
FREE = Link(0.0, 1e30)  # a byte costs nothing beside a second
# Recorded on 2 ranks: 10 s forward, 20 s backward; 8 bytes are ready in the middle of it, 4 at its end.
STEP = StepProfile("net", 2, 64, 10.0, 20.0, 3.0, 80, 8, (BucketProfile(8, 0.5), BucketProfile(4, 1.0)), 2.0)


def test_buckets_travel_one_after_another_as_they_become_ready():
    # backward     |--------------------|              0 to 20
    # bucket 0               |----|                    ready at 10, 5 s
    # bucket 1                          |------|       ready at 20, 7 s
    assert exposed_seconds([10, 20], [5, 7], 20) == 7
    # bucket 0               |----------------|        ready at 10, 17 s: bucket 1 waits until 27
    assert exposed_seconds([10, 20], [17, 7], 20) == 14
    # all done before backward ends
    assert exposed_seconds([10, 12], [5, 3], 20) == 0
    assert exposed_seconds([], [], 20) == 0


def test_a_step_by_hand():
    """4 GPUs, weak: 128 rows; a ring, 6 alpha + 1.5 S: 18 s and 12 s; scatter 3 + 3/4 x 160, gather 3 + 3/4 x 16."""
    found = predict_step(STEP, 4, NODE)
    assert (found.rows, found.compute_s, found.update_s, found.host_s) == (128, 30, 3, 2)
    assert found.input_s == 3 + 120 + 3 + 12
    assert found.exposed_s == pytest.approx(20)  # bucket 0: 10 to 28, bucket 1: 28 to 40
    assert found.latency_s == pytest.approx(20 * 12 / 30)
    assert found.transfer_s == pytest.approx(20 * 18 / 30)
    assert found.step_s == pytest.approx(30 + 20 + 3 + 138 + 2)
    assert found.rows_per_second == pytest.approx(128 / 193)
    assert found.efficiency == pytest.approx(128 / 193 / 4 / (32 / 35))
    assert found.bottleneck == "input"


def test_strong_scaling_shares_the_rows():
    found = predict_step(STEP, 4, NODE, "strong")
    assert (found.rows, found.compute_s) == (64, 15)
    assert found.input_s == 3 + 60 + 3 + 6
    assert found.exposed_s == pytest.approx(25)  # backward 0 to 10; bucket 0: 5 to 23, bucket 1: 23 to 35
    alone = predict_step(STEP, 1, NODE, "strong")
    assert (alone.compute_s, alone.exposed_s, alone.input_s, alone.efficiency) == (60, 0, 0, 1)


@pytest.mark.parametrize(
    ("gpus", "per_node", "scaling", "waits"),
    [
        (1, 8, "weak", 0),  # 3 + 5 of the host, beside 30 of the GPU
        (8, 8, "weak", 0),  # 8 x 3 + 5 = 29
        (9, 16, "weak", 2),  # 32
        (16, 16, "weak", 23),
        (16, 8, "weak", 0),  # two processes with 8 each
        (4, 8, "strong", 2),  # 17, beside 15
    ],
)
def test_the_gpus_of_a_process_wait_for_its_host(gpus, per_node, scaling, waits):
    step = dataclasses.replace(STEP, host_forward_seconds=3.0, host_backward_seconds=5.0)
    topology = dataclasses.replace(NODE, gpus_per_node=per_node, network=FREE)
    found = predict_step(step, gpus, topology, scaling)
    assert found.host_s == pytest.approx(2 + waits)


def test_a_host_that_is_late_is_the_bottleneck():
    step = dataclasses.replace(STEP, host_forward_seconds=30.0, buckets=(), scatter_nbytes=0, gather_nbytes=0)
    assert predict_step(step, 1, NODE).bottleneck == "compute"
    assert predict_step(step, 4, NODE).bottleneck == "host"


@pytest.mark.parametrize(
    ("link", "bottleneck"),
    [
        (Link(1e-9, 1e9), "compute"),
        (Link(100.0, 1e9), "communication latency"),
        (Link(1e-9, 0.01), "communication bandwidth"),
    ],
)
def test_the_bottleneck_is_the_largest_part(link, bottleneck):
    step = StepProfile("net", 1, 64, 10.0, 20.0, 3.0, 0, 0, (BucketProfile(8, 1.0),))
    assert predict_step(step, 8, Topology("any", link)).bottleneck == bottleneck


def test_every_gpu_has_a_row():
    with pytest.raises(ValueError, match="128 GPUs share 64 rows: some have none"):
        predict_step(STEP, 128, Topology("x", UNIT, network=UNIT), "strong")
    with pytest.raises(ValueError, match="unknown scaling 'medium': wanted one of weak, strong"):
        predict_step(STEP, 4, NODE, "medium")


def test_the_modules_broadcast_by_hand():
    """To the ranks of a node, 2 rounds of alpha + 6 bytes; a node more has a rank 0 of its own."""
    step = dataclasses.replace(STEP, broadcast_nbytes=6)
    nodes = Topology("unit", UNIT, 4, UNIT)
    found = [predict_step(step, gpus, nodes) for gpus in (1, 2, 4, 8)]
    assert [each.broadcast_s for each in found] == [0, 7, 14, 14]
    without = predict_step(STEP, 8, nodes)
    assert without.broadcast_s == 0
    assert found[3].step_s == pytest.approx(without.step_s + 14)
    large = dataclasses.replace(STEP, broadcast_nbytes=600)
    assert predict_step(large, 2, nodes).bottleneck == "broadcast of the module"


@pytest.fixture
def step_file(tmp_path):
    path = tmp_path / "step.json"
    step = StepProfile("net", 1, 64, 1e-3, 2e-3, 1e-4, 1000, 0, (BucketProfile(1 << 20, 1.0),), broadcast_nbytes=37_000)
    path.write_text(step.to_json())
    return path


def test_the_command_prints_a_table(step_file, capsys):
    assert main(["simulate", str(step_file), "--gpus", "64, 8,8"]) == 0
    out = capsys.readouterr().out
    title, _, header, eight, many, *_ = out.splitlines()
    assert title == "net, 64 rows on 1 rank; nvlink4+ib-ndr400, 8 GPUs a node; weak scaling"  # the defaults
    assert header.split()[:3] == ["GPUs", "step", "ms"]
    assert (eight.split()[0], many.split()[0]) == ("8", "64")
    assert eight.split()[2] == "3.000"
    assert eight.split()[header.split().index("broadcast") - 1] == "0.013"  # 6.6 + 3 x (1.9 + 0.1) us
    assert "No machine has confirmed" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: wanted whole numbers above 0"),
        (["--gpus", "8,x"], "--gpus 8,x: wanted whole numbers above 0"),
        (["--gpus", "123456789"], "--gpus 123456789: wanted whole numbers"),
        (["--gpus", "12"], "12 GPUs are not a multiple of the 8 GPUs of a node"),
        (["--topology", "warp"], "unknown topology 'warp': wanted LINK or LINK+NETWORK"),
        (["--topology", "nvlink4"], "and nvlink4 names no network between them"),
        (["--gpus-per-node", "0"], "gpus_per_node must be at least 1, not 0"),
        (["--gpus-per-node", "-3"], "gpus_per_node must be at least 1, not -3"),
        (["--scaling", "strong"], "1024 GPUs share 64 rows"),
    ],
)
def test_mistakes_are_one_line_and_status_2(step_file, capsys, words, message):
    assert main(["simulate", str(step_file), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mgpu simulate: error: ")
    assert message in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("{}", "not a recorded step"), (STEP.to_json().replace("10.0", "-10.0"), "forward_seconds")],
)
def test_a_damaged_step_is_one_line_and_status_2(tmp_path, capsys, text, message):
    path = tmp_path / "step.json"
    path.write_text(text)
    assert main(["simulate", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mgpu simulate: error: {path}: ")
    assert message in err


def test_a_file_that_cannot_be_read_is_one_sentence_and_status_2(tmp_path, capsys):
    path = tmp_path / "no-such-step.json"
    assert main(["simulate", str(path)]) == 2
    told = f"{path}: there is no such file; mgpu explain --profile {path} writes one"
    assert capsys.readouterr() == ("", f"mgpu simulate: error: {told}\n")
    assert main(["simulate", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"mgpu simulate: error: {tmp_path}: cannot be read (Is a directory)\n")


@pytest.mark.parametrize(("rows", "ranks"), [(10, 7), (64, 3), (64, 5)])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 16])
def test_rows_that_do_not_divide_are_neither_gained_nor_lost(rows, ranks, gpus):
    """Compute alone: with weak scaling each GPU does what it did, so N do N times as much."""
    step = StepProfile("net", ranks, rows, 1.0, 2.0, 0.0, 0, 0, (), 0.0)
    found = predict_step(step, gpus, Topology("unit", UNIT, network=UNIT))
    assert found.efficiency == pytest.approx(1)
    assert found.rows == pytest.approx(rows * gpus / ranks)


def test_strong_scaling_waits_for_the_gpu_with_most_rows():
    step = StepProfile("net", 1, 64, 32.0, 32.0, 0.0, 0, 0, (), 0.0)
    large = Topology("large", UNIT, 64)
    compute = [predict_step(step, gpus, large, "strong").compute_s for gpus in (1, 32, 33, 48, 63, 64)]
    assert compute == [64, 2, 2, 2, 2, 1]
    uneven = StepProfile("net", 3, 64, 22.0, 22.0, 0.0, 0, 0, (), 0.0)
    assert predict_step(uneven, 3, NODE, "strong").compute_s == 44


def test_a_step_nested_beyond_reason_is_one_line(tmp_path, capsys):
    (tmp_path / "step.json").write_text("[" * 100_000)
    assert main(["simulate", str(tmp_path / "step.json")]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_step_of_cpu_ranks_is_no_forecast_of_gpus(tmp_path, capsys):
    path = tmp_path / "step.json"
    path.write_text(dataclasses.replace(STEP, device="cpu").to_json())
    assert main(["simulate", str(path), "--gpus", "8"]) == 0
    assert "note: this step was recorded on CPU ranks" in capsys.readouterr().out
    path.write_text(dataclasses.replace(STEP, device="cuda").to_json())
    assert main(["simulate", str(path), "--gpus", "8"]) == 0
    assert "note:" not in capsys.readouterr().out

"""A step at other sizes, by hand; and the command: its table, its files, its exits."""

import dataclasses
import json
import subprocess
import sys

import pytest

from mgpu_core.tools.cli import main
from mgpu_core.tools.explain.cost import Bucket, StepProfile
from mgpu_core.tools.explain.predict import Plan, exposed_seconds, predict_step
from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology

UNIT = Link(1.0, (Tier(None, 1.0),))
NODE = Topology("unit", UNIT)
FREE = (Tier(None, 1e-30),)  # a byte costs nothing beside a second
HOST = HostMemory(1e-5, 1e-6, (Tier(None, 1e-11),), (Tier(None, 1e-11),))
# Recorded on 2 ranks: 10 s forward, 20 s backward; 8 bytes are ready in the middle of it, 4 at its end.
STEP = StepProfile("net", 2, 64, 10.0, 20.0, 3.0, 80, 8, (Bucket(8, 0.5), Bucket(4, 1.0)), 2.0)


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
    """4 GPUs, weak: 128 rows; direct, 2 alpha + 1.5 S: 14 s and 8 s; scatter 3 + 3/4 x 160, gather 3 + 3/4 x 16."""
    found = predict_step(STEP, 4, Plan(NODE))
    assert (found.rows, found.compute_s, found.update_s, found.host_s) == (128, 30, 3, 2)
    assert found.input_s == 3 + 120 + 3 + 12
    assert found.exposed_s == pytest.approx(12)  # bucket 0: 10 to 24, bucket 1: 24 to 32
    assert found.latency_s == pytest.approx(12 * 4 / 22)
    assert found.transfer_s == pytest.approx(12 * 18 / 22)
    assert found.step_s == pytest.approx(30 + 12 + 3 + 138 + 2)
    assert found.rows_per_second == pytest.approx(128 / 185)
    assert found.efficiency == pytest.approx(128 / 185 / 4 / (32 / 35))
    assert found.bottleneck == "input"


def test_without_overlap_everything_is_exposed():
    assert predict_step(STEP, 4, Plan(NODE, overlap=False)).exposed_s == pytest.approx(14 + 8)


def test_strong_scaling_shares_the_rows():
    found = predict_step(STEP, 4, Plan(NODE, scaling="strong"))
    assert (found.rows, found.compute_s) == (64, 15)
    assert found.input_s == 3 + 60 + 3 + 6
    assert found.exposed_s == pytest.approx(17)  # backward 0 to 10; bucket 0: 5 to 19, bucket 1: 19 to 27
    alone = predict_step(STEP, 1, Plan(NODE, scaling="strong"))
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
    machine = dataclasses.replace(NODE, gpus_per_node=per_node, between=Link(0.0, FREE))
    found = predict_step(step, gpus, Plan(machine, scaling=scaling))
    assert found.host_s == pytest.approx(2 + waits)


def test_a_host_that_is_late_is_the_bottleneck():
    step = dataclasses.replace(STEP, host_forward_seconds=30.0, buckets=(), scatter_nbytes=0, gather_nbytes=0)
    assert predict_step(step, 1, Plan(NODE)).bottleneck == "compute"
    assert predict_step(step, 4, Plan(NODE)).bottleneck == "host"
    assert predict_step(step, 4, Plan(HOST)).host_s == 2  # ranks of a CPU compute in the threads that ask


def test_cpu_ranks_share_the_cores_and_hide_nothing():
    host = HostMemory(1.0, 0.0, (Tier(None, 1.0),), (Tier(None, 1.0),))
    found = predict_step(STEP, 4, Plan(host))
    assert found.compute_s == 60
    assert found.exposed_s == pytest.approx(2 * 1 + 2 * 4 * 8 + 2 * 4 * 4)


@pytest.mark.parametrize(
    ("link", "bottleneck"),
    [
        (Link(1e-9, (Tier(None, 1e-9),)), "compute"),
        (Link(100.0, (Tier(None, 1e-9),)), "communication latency"),
        (Link(1e-9, (Tier(None, 100.0),)), "communication bandwidth"),
    ],
)
def test_the_bottleneck_is_the_largest_part(link, bottleneck):
    step = StepProfile("net", 1, 64, 10.0, 20.0, 3.0, 0, 0, (Bucket(8, 1.0),))
    assert predict_step(step, 8, Plan(Topology("any", link))).bottleneck == bottleneck


def test_every_gpu_has_a_row():
    with pytest.raises(ValueError, match="128 GPUs share 64 rows: some have none"):
        predict_step(STEP, 128, Plan(Topology("x", UNIT, between=UNIT), scaling="strong"))
    with pytest.raises(ValueError, match="unknown scaling 'medium': wanted one of weak, strong"):
        Plan(NODE, scaling="medium")


@pytest.fixture
def step_file(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(StepProfile("net", 1, 64, 1e-3, 2e-3, 1e-4, 1000, 0, (Bucket(1 << 20, 1.0),)).to_json())
    return path


def test_the_command_prints_a_table(step_file, capsys):
    assert main(["simulate", str(step_file), "--gpus", "64, 8,8"]) == 0
    out = capsys.readouterr().out
    title, _, header, eight, many, *_ = out.splitlines()
    assert title == (
        "net, 64 rows on 1 rank; nvlink4+ib-ndr400, 8 GPUs a node; weak scaling, all-reduce auto"  # the defaults
    )
    assert header.split()[:3] == ["GPUs", "step", "ms"]
    assert (eight.split()[0], many.split()[0]) == ("8", "64")
    assert eight.split()[2] == "3.000"
    assert "illustration" not in out


def test_without_a_file_the_example_says_that_its_times_are_assumed(capsys):
    assert main(["simulate", "--example", "simplenet"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SimpleNet (example), ")
    assert out.endswith("The times of this example are assumptions for illustration, not measurements.\n")


def test_files(step_file, tmp_path):
    pytest.importorskip("matplotlib")
    picture, predictions = tmp_path / "out.png", tmp_path / "out.json"
    words = ["--plot", str(picture), "--json", str(predictions), "--gpus", "1,8", "--topology", "pcie4"]
    assert main(["simulate", str(step_file), *words]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(predictions.read_text())
    assert [each["gpus"] for each in content["predictions"]] == [1, 8]
    assert content["predictions"][0]["efficiency"] == 1
    assert StepProfile.from_json(json.dumps(content["step"])).name == "net"


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
        (["--topology", "host", "--gpus-per-node", "-3"], "--gpus-per-node: host is this machine's memory, and has no"),
        (["--topology", "host", "--gpus-per-node", "8"], "--gpus-per-node: host is this machine's memory"),
        (["--topology", "host", "--gpus", "1", "--algorithm", "halving"], "the host has no halving: wanted one of"),
        (["--example", "resnet50"], "step.json and --example resnet50 are two steps: name one of them"),
        (["--plot", "a.out", "--json", "a.out"], "two of these are the same file: "),
        (["--algorithm", "direct"], "which 8 nodes do not share: name ring"),
        (["--scaling", "strong"], "1024 GPUs share 64 rows"),
        (["--plot", "no/such/folder/x.png"], "no/such/folder/x.png: cannot write into its folder"),
    ],
)
def test_mistakes_are_one_line_and_status_2(step_file, capsys, monkeypatch, words, message):
    monkeypatch.setattr("mgpu_core.tools.explain.simulate.this_host", lambda: HOST)
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


def test_the_step_is_not_written_over(step_file, capsys):
    before = step_file.read_text()
    assert main(["simulate", str(step_file), "--json", str(step_file)]) == 2
    assert "two of these are the same file" in capsys.readouterr().err
    assert step_file.read_text() == before


def test_a_plot_without_matplotlib_is_refused_before_anything_is_printed(step_file, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", str(step_file), "--plot", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mgpu simulate: error: a picture needs matplotlib: pip install 'mgpu-core[mnist]' (")
    assert len(err.splitlines()) == 1


def test_host_is_this_machine(step_file, capsys, monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.explain.simulate.this_host", lambda: HOST)
    assert main(["simulate", str(step_file), "--topology", "host", "--gpus", "2"]) == 0
    assert "; host; weak scaling" in capsys.readouterr().out


@pytest.mark.slow
def test_matplotlib_is_not_imported_without_a_plot():
    code = "import sys; from mgpu_core.tools.cli import main; main(['simulate']); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


@pytest.mark.parametrize(("rows", "ranks"), [(10, 7), (64, 3), (64, 5)])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 16])
def test_rows_that_do_not_divide_are_neither_gained_nor_lost(rows, ranks, gpus):
    """Compute alone: with weak scaling each GPU does what it did, so N do N times as much."""
    step = StepProfile("net", ranks, rows, 1.0, 2.0, 0.0, 0, 0, (), 0.0)
    found = predict_step(step, gpus, Plan(NODE))
    assert found.efficiency == pytest.approx(1)
    assert found.rows == pytest.approx(rows * gpus / ranks)


def test_strong_scaling_waits_for_the_gpu_with_most_rows():
    step = StepProfile("net", 1, 64, 32.0, 32.0, 0.0, 0, 0, (), 0.0)
    compute = [predict_step(step, gpus, Plan(NODE, scaling="strong")).compute_s for gpus in (1, 32, 33, 48, 63, 64)]
    assert compute == [64, 2, 2, 2, 2, 1]
    uneven = StepProfile("net", 3, 64, 22.0, 22.0, 0.0, 0, 0, (), 0.0)
    assert predict_step(uneven, 3, Plan(NODE, scaling="strong")).compute_s == 44


def test_no_overlap_is_in_the_title(step_file, capsys):
    assert main(["simulate", str(step_file), "--no-overlap"]) == 0
    assert "all-reduce auto after backward\n" in capsys.readouterr().out


def test_a_picture_is_a_png(step_file, capsys, tmp_path):
    assert main(["simulate", str(step_file), "--plot", str(tmp_path / "a.jpg")]) == 2
    assert "a.jpg: wanted a name that ends in .png" in capsys.readouterr().err
    assert not (tmp_path / "a.jpg").exists()


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

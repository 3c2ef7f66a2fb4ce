"""What public scripts do beside `DataParallel(net)`: time-first data, forward(), torch's functions, devices by name."""

import io
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import advise, replacing_torch
from mgpu_core.devices import devices
from mgpu_core.tools.advise.watching import watching
from mgpu_core.tools.run.advice import advise_training

pytestmark = pytest.mark.skipif(devices.has_accelerator(), reason="asks for CPU ranks")


def time_first():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 1, enable_nested_tensor=False)


def trained(net, x, y, steps=2):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def told(**options):
    torch.manual_seed(1)
    x, y = torch.randn(2, 6, 4, 8)
    with warnings.catch_warnings(record=True) as found, replacing_torch(ranks=2, wrap="auto", **options):
        warnings.simplefilter("always")
        losses = trained(time_first(), x, y)
    texts = [str(each.message) for each in found if "other outputs than the plain net" in str(each.message)]
    return losses, trained(time_first(), x, y), texts


def test_rows_along_another_dimension_are_told_of_and_cut_by_dim():
    losses, plain, (text,) = told()
    assert losses != pytest.approx(plain, rel=1e-3)
    assert text.startswith("TransformerEncoder over ranks gives other outputs than the plain net: outputs differs by")
    assert "`mgpu run --dim N`" in text
    losses, plain, texts = told(dim=1)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert texts == []


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).mean()


def test_a_net_that_returns_one_number_is_told_of():
    with warnings.catch_warnings(record=True) as found, replacing_torch(ranks=2, wrap="auto"):
        warnings.simplefilter("always")
        net = Scalar()
        torch.optim.SGD(net.parameters(), 0.1)
        net(torch.randn(4, 4))
    assert any("has shape (2,), not ()" in str(each.message) for each in found)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.layers(x)


@pytest.mark.parametrize("call", [lambda net, x: net(x), lambda net, x: net.forward(x)])
def test_the_comparison_leaves_the_net_alone_and_forward_is_seen(call):
    with warnings.catch_warnings(record=True) as found, replacing_torch(ranks=2, wrap="auto") as replaced:
        warnings.simplefilter("always")
        net, x = Counting(), torch.randn(6, 4)
        torch.optim.SGD(net.parameters(), 0.1)
        state = torch.get_rng_state()
        call(net, x)
        assert not torch.equal(state, torch.get_rng_state())  # dropout of the ranks, and nothing else
        assert net.layers[1].num_batches_tracked == 1
        assert net.training
        assert sorted(net.seen) == [3, 3]
        call(net, x).sum().backward()
    (told,) = [str(each.message) for each in found]
    assert told.startswith("the forward of Counting changes seen: all ranks share it")
    assert not any("never called" in each for each in replaced.left)
    assert any(text.startswith("Counting over 2 ranks") for text in replaced.wrapped)


def test_autograd_functions_of_torch_are_ours():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with replacing_torch(ranks=3):
        from torch.nn.parallel._functions import Broadcast, Gather, ReduceAddCoalesced, Scatter

        parts = Scatter.apply([0, 1], [1, 4], 0, x)
        assert [len(each) for each in parts] == [1, 4]
        assert [len(each) for each in Scatter.apply([0, 1, 2], None, 0, x)] == [2, 2, 1]
        assert torch.equal(Gather.apply(0, 0, *parts), x)
        assert Gather.apply("cpu", 0, torch.ones(()), torch.zeros(())).tolist() == [1, 0]
        copies = Broadcast.apply([0, 1], x, x * 2)
        assert torch.equal(copies[1], 2 * copies[2])
        sums = ReduceAddCoalesced.apply(0, 2, *copies)
        assert torch.equal(sums[0], 2 * x)
        assert torch.equal(sums[1], 4 * x)

        def both(x):
            return Gather.apply(0, 0, *Scatter.apply([0, 1], [1, 4], 0, x)) * Broadcast.apply([0, 1], x)[1]

        assert torch.autograd.gradcheck(both, x)


def test_a_wrapper_of_somebody_elses_that_calls_them():
    with replacing_torch(ranks=2):
        from torch.nn.parallel._functions import Scatter

        class Balanced(torch.nn.DataParallel):
            def scatter(self, inputs, kwargs, ids):
                return [(x,) for x in Scatter.apply(ids, [1, 3], self.dim, inputs[0])], [{}, {}]

        net = nn.Linear(2, 2)
        x = torch.randn(4, 2)
        torch.testing.assert_close(Balanced(net)(x), net(x))


class Moving(nn.Module):
    def forward(self, x):
        return x + torch.ones(1, device="cuda") + torch.ones(1).cuda()


class Adding(nn.Module):
    def forward(self, x):
        return x + torch.arange(2, device=torch.device("cpu"))


def on_its_device(x):
    return x + torch.zeros(2, device=x.device) + torch.zeros(2, device=torch.device("cpu"))


def saved(**values):
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file


DEVICES = {
    "to by a text": lambda x: x.to("cuda"),
    "to by an index": lambda x: x.to(0),
    "to by an index in a text": lambda x: x.to("cuda:1"),
    "to by a device": lambda x: x.to(torch.device("cuda")),
    "to by an indexed device": lambda x: x.to(torch.device("cuda", 1)),
    "to by a keyword": lambda x: x.to(device="cuda", dtype=torch.float64),
    "to with a dtype": lambda x: x.to("cuda", torch.float64),
    "a dtype alone": lambda x: x.to(torch.float64),
    "another tensor": lambda x: x.to(torch.ones(1)),
    "a new tensor": lambda x: x.new_tensor([1.0], device=torch.device("cuda")),
    "a factory": lambda x: torch.zeros(2, device=torch.device("cuda:0")),
    "a factory by a text": lambda x: torch.zeros(2, device="cuda"),
    "a factory by an index": lambda x: torch.tensor([1.0], device=0),
    "like another": lambda x: torch.ones_like(x, device="cuda:1"),
    "in the ranks": lambda x: nn.DataParallel(Moving())(x),
    "in a script": lambda x: torch.jit.script(on_its_device)(x),
    "compiled": lambda x: torch.compile(on_its_device, backend="eager", fullgraph=True)(x),
    "compiled, to a GPU": lambda x: torch.compile(lambda y: y.to("cuda") + 1, backend="eager", fullgraph=True)(x),
    "exported": lambda x: torch.export.export(Adding(), (x,)).module()(x),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_devices_by_name_mean_the_cpu(kind):
    with replacing_torch(ranks=2):
        made = DEVICES[kind](torch.ones(2))
        assert made.device.type == "cpu"
        assert torch.equal(torch.load(saved(x=torch.ones(2)), map_location="cuda:1")["x"], torch.ones(2))
        assert nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        assert nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64
        assert torch.device("meta").type == "meta"
        with torch.device("cuda"):
            assert torch.empty(1).device.type == "cpu"
    assert torch.zeros(1).to("meta").is_meta


@pytest.mark.parametrize("call", [torch.cuda.synchronize, lambda: torch.cuda.set_device(0)])
def test_a_function_that_needs_a_gpu_says_what_devices_mean(call):
    with replacing_torch(ranks=2), pytest.raises(RuntimeError, match="on CPU ranks there is no GPU"):
        call()


def test_operators_know_the_class_of_devices():
    with replacing_torch(ranks=2):

        @torch.library.custom_op("mgpu_core_test::moved", mutates_args=())
        def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
            return x.to(device).clone()

        assert torch.equal(moved(torch.ones(2), torch.device("cpu")), torch.ones(2))


def test_functions_are_counted_and_their_own_calls_are_not():
    with replacing_torch(ranks=2) as replaced:
        net, x = nn.Linear(2, 2), torch.ones(4, 2)
        for _ in range(3):
            replicas = torch.nn.parallel.replicate(net, [0, 1])
            parts = torch.nn.parallel.scatter(x, [0, 1])
            torch.nn.parallel.gather(torch.nn.parallel.parallel_apply(replicas, parts), 0)
        torch.nn.parallel.data_parallel(net, x, [0, 1])
    assert dict(replaced.called) == {
        "replicate": 3, "scatter": 3, "parallel_apply": 3, "gather": 3, "data_parallel": 1,
    }  # fmt: skip
    assert not replaced.wrapped
    assert "called: replicate (3 times), scatter (3 times)" in str(replaced)
    assert "wrapped: nothing" not in str(replaced)


class Viewing(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, 6)).view(*x.shape[:2], 3)


@pytest.mark.parametrize("kind", [nn.Linear, Viewing])
def test_advice_takes_the_dimension_of_the_wrapper(kind):
    net = kind(6, 3)
    model = mgpu_core.DataParallel(net, ["cpu"] * 2, dim=1)
    with watching(training=True) as watch:
        for _ in range(3):
            model(torch.ones(4, 8, 6)).sum().backward()
    advice = advise_training(watch.best())
    assert advice.rows == 8
    assert all(each.median_s for each in advice.measurements)


def test_advice_names_the_argument_that_is_no_tensor():
    class Summed(nn.Linear):
        def forward(self, x, others, scale=1.0):
            return super().forward(x + sum(others)) * scale

    net, x = Summed(6, 3), torch.ones(4, 6)
    for args, kwargs, name in (((x, [x]), {}, "1 of Summed"), ((x, x), {"scale": 2.0}, "scale of Summed")):
        with watching(training=True) as watch:
            net(*args, **kwargs).sum().backward()
        with pytest.raises(ValueError, match=f"argument {name} is no tensor with rows, but a (list|float)"):
            advise_training(watch.best())


def test_calls_of_a_wrappers_forward_are_seen():
    model = mgpu_core.DataParallel(nn.Linear(3, 3), ["cpu"] * 2)
    with watching(training=True) as watch:
        for _ in range(3):
            model.forward(torch.ones(4, 3)).sum().backward()
        model(torch.ones(4, 3))
    assert watch.best().net is model
    assert watch.best().count == 4


def test_advice_on_a_batch_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, ids, labels):
            return {"logits": None, "loss": None} if labels is None else self.loss(ids, labels)

        def loss(self, ids, labels):
            return nn.functional.cross_entropy(self.layer(ids), labels)

    sample = {"ids": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long)}
    found = advise(Named(), None, sample, device_ids=["cpu"] * 2, repeats=1, seconds=5.0)
    assert found.rows == 8
    assert all(each.median_s for each in found.measurements if each.batch == 8)
    with pytest.raises(ValueError, match="a sample by name has no target"):
        advise(Named(), nn.functional.cross_entropy, sample)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_recording_keeps_the_backward_of_wrappers_that_take_turns(steps):
    models = [mgpu_core.DataParallel(nn.Linear(4, 4), ["cpu"] * 2) for _ in range(3)]
    with mgpu_core.explain(steps=steps) as trace:
        for _ in range(4):
            x = torch.ones(6, 4)
            for model in models:
                x = model(x)
            x.sum().backward()
    assert len(trace.steps) == steps
    for step in trace.steps:
        assert {"backward", "reduce"} <= {span.step for span in step.spans}


def test_a_recording_without_gradients_ends_by_itself():
    models = [mgpu_core.DataParallel(nn.Linear(4, 4), ["cpu"] * 2) for _ in range(2)]
    with mgpu_core.explain(steps=1) as trace:
        for grad in (False, True):  # and one whose backward never comes
            with torch.set_grad_enabled(grad):
                for _ in range(12):
                    for model in models:
                        model(torch.ones(6, 4))
    assert len(trace.steps) == 1


# --- The command


def mgpu(folder, *words, **options):
    command = [sys.executable, "-P", "-m", "mgpu_core", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, **options)


PACKAGE = {
    "__init__.py": "WIDTH = 3\n",
    "net.py": "import torch\nfrom . import WIDTH\nnet = torch.nn.Linear(WIDTH, 2)\n",
    "__main__.py": "import sys, torch\nfrom .net import net\n"
    "print(torch.nn.DataParallel(net)(torch.ones(4, 3)).shape, __name__, sys.argv[1:])\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "mine.__main__"])
def test_a_package_runs_by_its_name(tmp_path, name):
    (tmp_path / "mine").mkdir()
    for file, text in PACKAGE.items():
        (tmp_path / "mine" / file).write_text(text)
    done = mgpu(tmp_path, "run", "--ranks", "2", "-m", name, "--own", "1")
    assert (done.returncode, done.stdout) == (0, "torch.Size([4, 2]) __main__ ['--own', '1']\n")
    assert "wrapped: Linear over 2 ranks" in done.stderr


@pytest.mark.slow
def test_a_missing_module_is_named(tmp_path):
    done = mgpu(tmp_path, "run", "-m", "no.such.thing")
    assert done.returncode == 2
    assert "-m no.such.thing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_option_of_ours_after_the_script_is_told_of(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = mgpu(tmp_path, "run", "script.py", "--ranks", "2", "--own")
    assert done.stdout == "['--ranks', '2', '--own']\n"
    assert "mgpu run: note: --ranks comes after the script, so it is passed to the script" in done.stderr


ENDLESS = """
import torch
model, optimizer = torch.nn.DataParallel(torch.nn.Linear(3, 2)), None
while True:
    model(torch.ones(4, 3)).sum().backward()
    print("step", flush=True)
"""


@pytest.mark.slow
def test_the_page_is_written_after_ctrl_c(tmp_path):
    (tmp_path / "script.py").write_text(ENDLESS)
    command = [sys.executable, "-P", "-m", "mgpu_core", "run", "--ranks", "2", "--explain", "page.html", "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(30):
        assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert time.monotonic() - begin < 30
    assert "written: page.html" in out
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_script_in_main_is_told_the_way_out(tmp_path):
    (tmp_path / "script.py").write_text("def main():\n    net = 1\n\nif __name__ == '__main__':\n    main()\n")
    done = mgpu(tmp_path, "advise", "script.py")
    assert done.returncode == 2
    assert "`mgpu run --wrap auto --advise script.py`" in done.stderr

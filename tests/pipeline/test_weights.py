"""Weights of files go straight to the devices of a placed module."""

import json
import threading

import pytest
import torch
from fakes.nets import cpu
from fakes.stacks import STACKS, mse
from torch import nn

from mgpu_core import Pipeline, TrainStep, parameters_on_meta, place

safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file


class Net(nn.Module):
    """Two blocks, a tied head, a buffer that is kept and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


TOKENS = torch.arange(6).reshape(3, 2) % 5


@pytest.fixture
def saved(tmp_path):
    """The net whose weights are saved, and the folder: two files and an index, the head's name in neither."""
    torch.manual_seed(1)
    net = Net()
    net.scale.add_(1)
    state = {name: each.clone() for name, each in net.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, own in parts.items():
        save_file({name: state[name].cpu() for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return net, tmp_path


def on_meta():
    with parameters_on_meta():
        return Net()


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_net_on_meta_has_the_weights_of_a_folder(saved, is_listed):
    whole, folder = saved
    if not is_listed:
        (folder / "model.safetensors.index.json").unlink()
    net = on_meta()
    before = {name: id(each) for name, each in net.named_parameters()}
    place(net, cpu(2), weights=folder)
    assert {name: id(each) for name, each in net.named_parameters()} == before
    assert net.head.weight is net.embed.weight
    assert str(net.blocks[3].weight.device) == cpu(2)[1]
    assert all(each.is_leaf and each.requires_grad for each in net.parameters())
    output = net(TOKENS.to(cpu(1)[0]))
    assert torch.equal(output.cpu(), whole.cpu()(TOKENS.cpu()))


def test_a_pipeline_trains_from_a_file(tmp_path):
    stack = STACKS["mlp"]
    whole = stack.net().cpu()
    save_file(dict(whole.state_dict()), tmp_path / "model.safetensors")
    with parameters_on_meta():
        net = stack.make().double()
    pipe = Pipeline(net, cpu(2), chunks=2, weights=tmp_path / "model.safetensors")
    step = TrainStep(pipe, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    alone = TrainStep(whole, mse, torch.optim.SGD(whole.parameters(), lr=0.1), ["cpu"])
    x, target = stack.x.cpu(), stack.target.cpu()
    for _ in range(2):
        wanted = float(alone(x, target))
        assert float(step(x.to(cpu(1)[0]), target.to(cpu(1)[0]))) == pytest.approx(wanted, rel=1e-12)


def test_buffers_of_a_file_go_to_the_part_of_their_layer(tmp_path):
    """A part that begins with a batch normalisation."""

    def stack():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()

    whole = stack().cpu()
    whole[1].running_mean += 1
    save_file(dict(whole.state_dict()), tmp_path / "model.safetensors")
    x = torch.ones(3, 4, device="cpu")
    with parameters_on_meta():
        net = stack()
    place(net, cpu(2), ["1"], weights=tmp_path)
    assert {str(each.device) for each in net[1].buffers()} == {cpu(2)[1]}
    assert torch.allclose(net(x.to(cpu(1)[0])).cpu(), whole(x))


def test_the_dtype_is_the_module_s_and_names_may_be_changed(saved):
    whole, folder = saved
    for file in folder.glob("*.safetensors"):
        file.unlink()
    state = {f"model.{name}": each.cpu().double() for name, each in whole.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "c.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    net = place(on_meta(), cpu(2), weights=folder, rename=lambda name: name.removeprefix("model."))
    assert net.embed.weight.dtype == torch.float32
    assert torch.equal(net.embed.weight.cpu(), whole.embed.weight.cpu())


def test_what_does_not_fit_is_named_and_nothing_is_moved(saved):
    _, folder = saved
    net = on_meta()
    with pytest.raises(ValueError, match=r"missing nothing; surplus blocks\.0\.bias"):
        place(nn.ModuleDict({"embed": nn.Embedding(5, 4)}), ["cpu"], weights=folder)
    net.blocks.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"missing blocks\.4\.weight, blocks\.4\.bias; surplus nothing"):
        place(net, cpu(2), weights=folder)
    assert net.embed.weight.is_meta
    other = on_meta()
    other.blocks[1] = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"blocks\.1\.bias has the shape \(3,\)"):
        place(other, cpu(2), weights=folder)


def test_files_that_are_not_there_or_broke_off_are_named(saved, tmp_path):
    _, folder = saved
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder a/name: .*snapshot_download\('a/name'\)"):
        place(on_meta(), cpu(2), weights="a/name")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no \*\.safetensors"):
        place(on_meta(), cpu(2), weights=tmp_path / "empty")
    whole = (folder / "b.safetensors").read_bytes()
    for length in (3, 20, len(whole) - 1):
        (folder / "b.safetensors").write_bytes(whole[:length])
        net = on_meta()
        with pytest.raises(ValueError, match=r"b\.safetensors is no whole file of safetensors"):
            place(net, cpu(2), weights=folder)
        assert net.embed.weight.is_meta


def test_names_may_be_left_out(saved):
    whole, folder = saved
    save_file({"old.shift": torch.ones(4), "blocks.0.rotary_emb.inv_freq": torch.ones(2)}, folder / "b2.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match=r"missing nothing; surplus old\.shift\. Give rename=.*None for those to leave out"
    ):
        place(on_meta(), cpu(2), weights=folder)
    net = place(
        on_meta(), cpu(2), weights=folder, rename=lambda name: None if "." in name and "o" in name[:1] else name
    )
    assert torch.equal(net.head.weight.cpu(), whole.head.weight.cpu())


@pytest.mark.parametrize("change", ["bfloat16", "half", "to", "to_inside"])
def test_buffers_that_no_file_has_are_not_rounded_before_the_weights_are_there(saved, change):
    _, folder = saved
    net = nn.Sequential(on_meta()) if change == "to_inside" else on_meta()
    with pytest.raises(ValueError, match=r"buffer shift of Net would be rounded to torch\.b?float16.*from_config"):
        net.to(torch.bfloat16) if change.startswith("to") else getattr(net, change)()
    for other in (on_meta().double(), on_meta().float()):
        place(other, cpu(2), weights=folder)
        other.bfloat16()  # its own affair from now on
        assert other.shift.dtype == torch.bfloat16


def test_the_dtype_may_be_asked_for(saved):
    whole, folder = saved
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        net = on_meta()
    finally:
        torch.set_default_dtype(before)
    place(net, cpu(2), weights=folder)
    assert {each.dtype for each in net.parameters()} == {torch.bfloat16}
    assert torch.equal(net.embed.weight.cpu(), whole.embed.weight.cpu().bfloat16())


def test_memory_that_nobody_gives_is_refused(saved):
    _, folder = saved
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match=r"buffer 'shift' has no memory.*parameters_on_meta"):
        place(net, cpu(2), weights=folder)
    with pytest.raises(ValueError, match=r"parameter 'embed.weight' has no memory: pass weights="):
        place(on_meta(), cpu(2))


def test_other_threads_make_parameters_with_memory():
    found = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
        assert nn.Linear(1, 1).weight.is_meta
    assert not found[0].weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_reads_for_each_device(saved, monkeypatch, fails):
    """One core copies from a file's pages to a device slower than a device takes it; a failure ends all of them."""
    _, folder = saved
    devices, met, seen = list(dict.fromkeys(cpu(2))), threading.local(), []
    both = threading.Barrier(len(devices))
    opened = safetensors.safe_open

    class Opened:
        def __init__(self, path, framework):
            self.file = opened(path, framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            if not hasattr(met, "once"):
                met.once = both.wait(20)
            seen.append(name)
            if fails:
                raise RuntimeError("the disk is gone")
            return self.file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Opened)
    if fails:
        with pytest.raises(RuntimeError, match="the disk is gone"):
            place(on_meta(), cpu(2), weights=folder)
        assert len(seen) == len(devices)
    else:
        assert not any(each.is_meta for each in place(on_meta(), cpu(2), weights=folder).parameters())

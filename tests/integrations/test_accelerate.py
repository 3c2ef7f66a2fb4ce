"""``Accelerator.prepare`` of a wrapped net, and what it saves: there is no code of ours for it."""

import pytest
import torch
from torch import nn

import mgpu_core

pytestmark = pytest.mark.slow
accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
def fresh():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Seen(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.kinds = []

    def forward(self, x):
        out = super().forward(x)
        self.kinds.append((len(x), out.dtype))
        return out


def trained(ranks, **options):
    """Two epochs over 18 rows in batches of 5, accumulated by two, clipped."""
    accelerate.state.AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    net = Seen()
    data = torch.utils.data.TensorDataset(torch.randn(18, 4), torch.randint(3, (18,)))
    model = mgpu_core.DataParallel(net, ["cpu"] * ranks) if ranks else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 5))
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return accelerator, model, net, losses


def test_losses_and_parameters_are_those_of_one_device(ranks):
    _, _, one, wanted = trained(0)
    _, model, net, losses = trained(ranks)
    assert type(model) is mgpu_core.DataParallel
    assert losses == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(net.weight, one.weight)
    assert {rows for rows, _ in net.kinds} == {1: {5, 3}, 2: {3, 2, 1}, 3: {2, 1}}[ranks]


def test_nets_and_states_are_unwrapped(tmp_path):
    accelerator, model, net, _ = trained(2)
    assert accelerator.unwrap_model(model) is net
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
    accelerator.save_model(model, tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(saved, dict(net.state_dict()), check_device=False)


def test_a_saved_state_goes_on_with_other_ranks(tmp_path):
    accelerator, _, net, _ = trained(2)
    accelerator.save_state(tmp_path)
    assert sorted(safetensors.load_file(tmp_path / "model.safetensors")) == ["module.bias", "module.weight"]
    other, _, loaded, _ = trained(3)
    nn.init.zeros_(loaded.weight)
    other.load_state(tmp_path)
    assert torch.equal(loaded.weight, net.weight)


def test_mixed_precision_reaches_the_ranks():
    accelerator, model, net, losses = trained(2, mixed_precision="bf16")
    assert {dtype for _, dtype in net.kinds} == {torch.bfloat16}
    assert model(torch.ones(4, 4)).dtype is torch.float32
    assert accelerator.unwrap_model(model) is net
    assert losses == pytest.approx(trained(0, mixed_precision="bf16")[3], abs=1e-2)


@pytest.mark.parametrize("cut", [mgpu_core.place, mgpu_core.Pipeline])
def test_layers_with_hooks_of_device_map_are_refused_by_name(cut):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(4, 2)
    expected = net(x)
    accelerate.hooks.add_hook_to_module(net[1], accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(ValueError, match=r"^1 has a hook of accelerate, .* without device_map"):
        cut(net, ["cpu"] * 2)
    accelerate.hooks.remove_hook_from_submodules(net)
    torch.testing.assert_close(cut(net, ["cpu"] * 2)(x), expected)

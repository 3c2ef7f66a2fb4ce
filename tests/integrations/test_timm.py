"""The pieces of timm's train script around a wrapped net and around a step: there is no code of ours for it."""

import pytest
import torch

import mgpu_core

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
timm = pytest.importorskip("timm")
from timm.data import Mixup  # noqa: E402
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy  # noqa: E402
from timm.models import load_checkpoint  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import CheckpointSaver, ModelEmaV3, dispatch_clip_grad, unwrap_model  # noqa: E402


def vit():
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    return timm.models.VisionTransformer(num_classes=3, **shape)


def trained(ranks, *, step=False, opt="adamw", loss_fn=None):
    """Four updates by 10 images; returns losses, net, model, optimizer and the moving average."""
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(0)
    net, loss_fn = vit(), loss_fn or SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(net, opt=opt, lr=1e-2, weight_decay=0.05)
    model = mgpu_core.DataParallel(net, ["cpu"] * ranks) if ranks and not step else net
    ema, mixup = ModelEmaV3(model, decay=0.9), Mixup(mixup_alpha=0.5, num_classes=3)
    many = mgpu_core.TrainStep(net, loss_fn, optimizer, ["cpu"] * ranks, clip_norm=1.0) if step else None
    images, labels = torch.randn(10, 3, 16, 16), torch.randint(3, (10,))
    losses = []
    for update in range(4):
        x, y = mixup(images.clone(), labels) if isinstance(loss_fn, SoftTargetCrossEntropy) else (images, labels)
        if many is not None:
            loss = many(x, y)
        else:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
        ema.update(model, step=update)
        losses.append(loss.item())
    return losses, net, model, optimizer, ema


@pytest.mark.parametrize("loss_fn", [SoftTargetCrossEntropy(), LabelSmoothingCrossEntropy()])
@pytest.mark.parametrize("step", [False, True])
def test_losses_and_averages_are_those_of_one_device(ranks, step, loss_fn):
    one, many = trained(0, loss_fn=loss_fn), trained(ranks, step=step, loss_fn=loss_fn)
    assert len(set(one[0])) == 4
    assert many[0] == pytest.approx(one[0], abs=1e-6)
    assert unwrap_model(many[2]) is many[1]
    averages = zip(many[4].module.parameters(), one[4].module.parameters(), strict=True)
    for mine, theirs in averages:
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("opt", ["sgd", "lamb", "nadamw"])
def test_optimizers_of_timm_in_a_step(opt):
    assert trained(3, step=True, opt=opt)[0] == pytest.approx(trained(0, opt=opt)[0], abs=1e-6)


@pytest.mark.parametrize("step", [False, True])
def test_checkpoints_have_the_keys_of_the_net(step, tmp_path):
    _, net, model, optimizer, ema = trained(2, step=step)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(0, metric=1.0)
    saved = torch.load(tmp_path / "last.pth.tar", weights_only=False)
    assert list(saved["state_dict"]) == list(saved["state_dict_ema"]) == list(vit().state_dict())
    images = torch.randn(4, 3, 16, 16)
    for use_ema, wanted in ((False, net), (True, unwrap_model(ema))):
        other = vit()
        load_checkpoint(other, str(tmp_path / "last.pth.tar"), use_ema=use_ema)
        torch.testing.assert_close(other.eval()(images), wanted.eval()(images))


def test_an_optimizer_made_of_the_wrapper_decays_other_parameters():
    """As the guide says: timm does not see a wrapped net's list of parameters without weight decay."""
    net = vit()
    kept = [
        {id(p) for group in create_optimizer_v2(model, opt="adamw", weight_decay=0.05).param_groups
         for p in group["params"] if not group["weight_decay"]}
        for model in (net, mgpu_core.DataParallel(net, ["cpu"] * 2))
    ]  # fmt: skip
    assert id(net.pos_embed) in kept[0]
    assert id(net.pos_embed) not in kept[1]

"""Lightning's Trainer over several ranks: each number is compared with a Trainer on one device."""

import logging
import sys
import warnings
from functools import cache
from importlib import import_module

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.support.extras import MissingExtra

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::lightning")]
with warnings.catch_warnings(action="ignore"):
    pl = pytest.importorskip("lightning.pytorch")
    torchmetrics = pytest.importorskip("torchmetrics")

from mgpu_core.integrations.lightning import MultiGPUStrategy  # noqa: E402

F = nn.functional
WAYS = {"forward": {}, "train_step": {"train_step": True}}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)
    torch.manual_seed(0)


class Net(pl.LightningModule):
    """Keeps the losses that the Trainer saw."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.kind, self.losses = optimizer, []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (scores.argmax(1) == y).float().mean()}, on_epoch=True, batch_size=len(x))
        return {"loss": loss}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=0.3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def loader():
    """22 rows in batches of 5, 5, 5, 5, 2."""
    seeded = torch.Generator().manual_seed(1)
    data = torch.randn(22, 4, generator=seeded), torch.randint(3, (22,), generator=seeded)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 5)


def trainer(strategy="auto", epochs=1, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": epochs, "accelerator": "cpu", **quiet, **options}
    return pl.Trainer(strategy=strategy, **options)


def fitted(strategy="auto", net=None, **options):
    torch.manual_seed(0)
    net = Net() if net is None else net()
    used = trainer(strategy, **options)
    used.fit(net, loader(), loader() if "validation_step" in dir(net) else None)
    return net, {name: value.item() for name, value in used.callback_metrics.items()}


def assert_alike(one, other):
    assert one[0].losses == pytest.approx(other[0].losses, abs=1e-5)
    assert one[1] == pytest.approx(other[1], abs=1e-5)
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


CASES = {
    "plain": (torch.optim.AdamW, {}),
    "ours, accumulated and clipped": (mgpu_core.optim.SGD, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "accumulated and clipped": (torch.optim.SGD, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
}


@cache
def on_one_device(case):
    kind, options = CASES[case]
    return fitted("auto", lambda: Net(kind), epochs=2, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_metrics_and_parameters_are_those_of_one_device(way, ranks, case):
    kind, options = CASES[case]
    one = on_one_device(case)
    many = fitted(MultiGPUStrategy(["cpu"] * ranks, **WAYS[way]), lambda: Net(kind), epochs=2, **options)
    assert len(set(one[0].losses)) == 10
    assert {"loss_epoch", "right_epoch", "val"} <= set(one[1])
    assert_alike(many, one)


class LogsInForward(Net):
    """Logs numbers of the rows that a forward sees."""

    def forward(self, x):
        self.log("mean", x.mean(), on_epoch=True, on_step=False)
        self.log_dict({"largest": x.abs().mean(), "rows": 1.0}, on_epoch=True, on_step=False)
        return self.net(x)


@pytest.mark.several_ranks
def test_what_a_forward_logs_is_the_mean_over_all_rows(ranks):
    one, many = fitted("auto", LogsInForward), fitted(MultiGPUStrategy(["cpu"] * ranks), LogsInForward)
    assert {"mean", "largest", "rows"} <= set(one[1])
    assert_alike(many, one)


def test_a_forward_logs_sums_on_one_device_alone():
    class Sums(Net):
        def forward(self, x):
            self.log("n", float(len(x)), reduce_fx="sum", on_epoch=True, on_step=False)
            return self.net(x)

    with pytest.raises(
        ValueError, match=r"self.log\('n', reduce_fx=...\): in a forward over ranks it is the mean over"
    ):
        fitted(MultiGPUStrategy(["cpu"] * 2), Sums)


def test_a_skipped_batch_is_refused_in_a_whole_step():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(TypeError, match="training_step returned None: with train_step=True a batch cannot be skipped"):
        fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), Skips)


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_gets_its_part_of_the_rows(way):
    parts = []

    class Seen(Net):
        def forward(self, x):
            parts.append(len(x))
            return self.net(x)

    fitted(MultiGPUStrategy(["cpu"] * 3, **WAYS[way]), Seen, num_sanity_val_steps=0)
    assert sorted(parts) == sorted(2 * [2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 1, 1])


def test_the_devices_of_the_trainer_are_taken():
    strategy = MultiGPUStrategy()
    used = trainer(strategy, devices=3)
    assert strategy.parallel_devices == [torch.device("cpu")] * 3
    used.fit(Net(), loader())
    assert used.world_size == 1


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_load_with_and_without_the_strategy(way, tmp_path):
    """Two epochs, each on other ranks, are two epochs on one device."""
    whole = on_one_device("plain")[0]
    for ranks in ((0, 2), (2, 0), (2, 3)):
        first, second = (MultiGPUStrategy(["cpu"] * n, **WAYS[way]) if n else "auto" for n in ranks)
        torch.manual_seed(0)
        nets, path = (Net(torch.optim.AdamW), Net(torch.optim.AdamW)), tmp_path / "last.ckpt"
        used = trainer(first, 1)
        used.fit(nets[0], loader())
        used.save_checkpoint(path)
        assert list(torch.load(path, weights_only=False)["state_dict"]) == list(Net().state_dict())
        trainer(second, 2).fit(nets[1], loader(), ckpt_path=path, weights_only=False)
        assert nets[0].losses + nets[1].losses == pytest.approx(whole.losses, abs=1e-5)


def test_validate_test_and_predict(ranks):
    net = Net().eval()
    used = trainer(MultiGPUStrategy(["cpu"] * ranks))
    alone = trainer()
    for call in ("validate", "test"):
        (many,), (one,) = (getattr(each, call)(net, loader(), verbose=False) for each in (used, alone))
        assert many == pytest.approx(one, abs=1e-6)
    for many, one in zip(used.predict(net, loader()), alone.predict(net, loader()), strict=True):
        torch.testing.assert_close(many, one)


class Contrastive(Net):
    """A loss that compares rows with each other: no rank can compute it."""

    def training_step(self, batch, batch_idx):
        z = F.normalize(self(batch[0]), dim=1)
        return {"loss": F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))}


def test_a_loss_that_couples_rows_is_right_unless_ranks_compute_it():
    one = fitted(net=Contrastive)[0].losses
    assert fitted(MultiGPUStrategy(["cpu"] * 2), Contrastive)[0].losses == pytest.approx(one, abs=1e-5)
    per_rank = fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), Contrastive)[0].losses
    assert abs(per_rank[0] - one[0]) > 0.1


class Part(nn.Linear):
    """Keeps the rows of each call."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.rows = []

    def forward(self, x):
        self.rows.append(len(x))
        return super().forward(x)


class Adversarial(pl.LightningModule):
    """Two nets, two optimizers, a metric, and the updates made by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Part(2, 4), Part(4, 1)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.losses = []

    def training_step(self, batch, batch_idx):
        both = self.optimizers()
        made = self.generator(batch[0][:, :2])
        scores = self.critic(torch.cat([batch[0], made.detach()]))
        real = torch.cat([torch.ones(len(made), 1), torch.zeros(len(made), 1)])
        self.accuracy(scores.sigmoid(), real.int())
        self.log("accuracy", self.accuracy, on_epoch=True)
        losses = [F.binary_cross_entropy_with_logits(scores, real), -self.critic(made).mean()]
        for optimizer, loss in zip(both, losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
        for optimizer in both:
            optimizer.step()
        self.losses += [loss.item() for loss in losses]

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.critic, self.generator)]


@pytest.mark.several_ranks
def test_submodules_by_name_manual_optimization_and_metrics(ranks):
    many, one = (
        fitted(each, Adversarial)
        for each in (MultiGPUStrategy(["cpu"] * ranks, modules=["generator", "critic"]), "auto")
    )
    assert 0 < one[1]["accuracy"] < 1
    assert (max(many[0].generator.rows), max(many[0].critic.rows)) == {2: (3, 5), 3: (2, 4)}[ranks]
    assert_alike(many, one)


def test_hooks_of_the_module_run_once_with_all_rows():
    seen = []
    net = Net()
    net.net.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    trainer(MultiGPUStrategy(["cpu"] * 2, modules=["net"])).predict(net, loader())
    assert seen == [5, 5, 5, 5, 2]


def test_a_step_that_calls_nothing_over_the_ranks_warns_once():
    class Direct(Net):
        def __init__(self):
            super().__init__()
            self.idle, self.spare = nn.Linear(1, 1), nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

        validation_step = None

    with pytest.warns(UserWarning, match=r"Direct.training_step did not call self\(...\)") as found:
        fitted(MultiGPUStrategy(["cpu"] * 2), Direct)
    assert sum("did not call" in str(each.message) for each in found) == 1
    with pytest.warns(UserWarning, match=r"did not call self.idle\(...\) or self.spare\(...\), so nothing ran"):
        fitted(MultiGPUStrategy(["cpu"] * 2, modules=["idle", "spare"]), Direct)
    with warnings.catch_warnings(record=True, action="always") as found:
        fitted(MultiGPUStrategy(["cpu"] * 2, modules=["net"]), Direct)
    assert not any("did not call" in str(each.message) for each in found)


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_in_a_rank_names_it_and_leaves_the_module_as_it_was(way):
    class Failing(Net):
        def forward(self, x):
            if len(x) == 1 and self.training:
                raise KeyError("one row")
            return self.net(x)

    net = Failing()
    before = set(vars(net))
    with pytest.raises(KeyError, match="in replica 2 on device cpu"):
        trainer(MultiGPUStrategy(["cpu"] * 3, **WAYS[way])).fit(net, loader())
    assert {"forward", "log"}.isdisjoint(vars(net))
    assert before <= set(vars(net))


def test_bfloat16_autocast_reaches_the_ranks():
    for way in WAYS.values():
        kinds = []

        class Seen(Net):
            def forward(self, x, kinds=kinds):
                scores = self.net(x)
                kinds.append(scores.dtype)
                return scores

        fitted(MultiGPUStrategy(["cpu"] * 2, **way), Seen, precision="bf16-mixed")
        assert set(kinds) == {torch.bfloat16}


def test_devices_that_do_not_exist():
    with pytest.raises(ValueError, match="does not exist"):
        MultiGPUStrategy(["cuda:99"])
    with pytest.raises(ValueError, match="empty"):
        MultiGPUStrategy([])
    with pytest.raises(TypeError, match="list of names"):
        MultiGPUStrategy(["cpu"] * 2, modules="net")
    compiled = Net()
    compiled.net.forward = compiled.net.forward  # as torch.compile does
    with pytest.raises(TypeError, match="compile modules inside"):
        trainer(MultiGPUStrategy(["cpu"] * 2, modules=["net"])).fit(compiled, loader())
    with pytest.raises(AttributeError, match="nett"):
        trainer(MultiGPUStrategy(["cpu"] * 2, modules=["nett"])).fit(Net(), loader())


class Hooked(Net):
    def on_after_backward(self):
        pass


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class Watching(pl.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        pass


@pytest.mark.parametrize(
    ("net", "options", "named"),
    [
        (Hooked, {}, "Hooked.on_after_backward"),
        (Clipping, {}, "Clipping.configure_gradient_clipping"),
        (Adversarial, {}, "automatic_optimization = False"),
        (Net, {"callbacks": Watching()}, "Watching.on_before_optimizer_step"),
        (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 'gradient_clip_algorithm="value"'),
    ],
)
def test_what_a_train_step_cannot_have_is_named_and_works_without_it(net, options, named):
    with pytest.raises(ValueError, match="leave train_step out") as caught:
        fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), net, **options)
    assert named in str(caught.value)
    if net is not Adversarial:
        assert_alike(fitted(MultiGPUStrategy(["cpu"] * 2), net, **options), fitted("auto", net, **options))


def test_a_scale_of_the_loss_is_refused():
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match='precision="16-mixed": leave train_step out'):
        fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), plugins=precision)


def test_the_step_is_closed_after_training():
    class Keeping(pl.Callback):
        def on_train_end(self, trainer, module):
            kept.append(trainer.strategy._step.step)

    kept = []
    fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), callbacks=Keeping())
    with pytest.raises(RuntimeError, match="closed"):
        kept[0].flush()


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [("number", {"reduce_fx": "max"}, ValueError), ("metric", {}, TypeError)],
)
def test_what_cannot_be_logged_from_ranks_is_named(value, options, error):
    class Logging(Net):
        def __init__(self):
            super().__init__()
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.log(value, self.metric if value == "metric" else 1.0, **options)
            return super().training_step(batch, batch_idx)

    with pytest.raises(error, match=rf"self.log\('{value}'"):
        fitted(MultiGPUStrategy(["cpu"] * 2, train_step=True), Logging)


def test_a_missing_lightning_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", None)
    monkeypatch.delitem(sys.modules, "mgpu_core.integrations.lightning")
    with pytest.raises(MissingExtra, match=r"MultiGPUStrategy needs lightning: pip install 'mgpu-core\[lightning\]"):
        import_module("mgpu_core.integrations.lightning")

"""The words that users see at the edge: what objects print, and what wrong calls say."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, DeviceLoader, Pipeline, Predictor, TensorParallel, TrainStep

TWO = ["cpu"] * 2


def net_of(width=4):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4))


def step_of(net, loss_fn=nn.functional.mse_loss, **options):
    return TrainStep(net, loss_fn, mgpu_core.optim.SGD(net.parameters(), lr=0.1), TWO, **options)


class Constant(nn.Module):
    """Returns what it was made with, whatever comes."""

    def __init__(self, value):
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.ones(1)), value

    def forward(self, *_inputs, **_kwargs):
        return self.value


# --- repr ---


def test_a_step_shows_its_module_and_the_options_that_were_chosen():
    step = step_of(net_of(), clip_norm=1.0, accumulate=2)
    assert repr(step) == (
        "TrainStep(Sequential, mse_loss, SGD, device_ids=[cpu, cpu], updates=0, accumulate=2, clip_norm=1.0)"
    )
    step(torch.ones(4, 4), torch.ones(4, 4))
    step(torch.ones(4, 4), torch.ones(4, 4))
    assert "updates=1" in repr(step)
    assert repr(step_of(Constant(1), None)).startswith("TrainStep(Constant, None, SGD,")
    assert repr(step_of(net_of(), nn.MSELoss())).startswith("TrainStep(Sequential, MSELoss, SGD,")


def test_a_predictor_shows_its_devices_and_how_much_it_has_answered():
    with Predictor(net_of(), TWO, max_batch=8) as predict:
        predict(torch.ones(3, 4))
        assert repr(predict) == (
            "Predictor(Sequential, device_ids=[cpu, cpu], max_batch=8)\n"
            "1 requests answered in 1 batches; print(predictor.stats()) shows each rank's"
        )


def test_modules_over_several_devices_are_one_line():
    pipe = Pipeline(net_of(), TWO, split_points=["2"], chunks=4)
    assert repr(pipe) == ("Pipeline(Sequential, device_ids=[cpu, cpu], split_points=['2'], chunks=4, schedule=1f1b)")
    cut = TensorParallel(net_of(), TWO, plan={"0": "column", "2": "row"})
    assert repr(cut) == "TensorParallel(Sequential, device_ids=[cpu, cpu], 3 of 4 parameters cut)"


def test_a_balance_shows_its_cut_and_how_even_it_is():
    found = mgpu_core.balance(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(2, 4), 2, "memory")
    assert repr(found) == "Balance(split=['2'], table=<2 parts, the largest 1.00 of their mean>)"


def test_a_trace_shows_its_last_steps():
    step = step_of(net_of())
    with mgpu_core.explain() as trace:
        for _ in range(4):
            step(torch.ones(4, 4), torch.ones(4, 4))
    time = r"train_step [\d.]+ [mu]?s"
    assert re.fullmatch(
        rf"Trace\(4 steps: \.\.\., {time}, {time}, {time}\); print\(trace\.table\(\)\) shows the last, .*", repr(trace)
    )


# --- wrong calls ---


@pytest.mark.parametrize(
    "make",
    [DataParallel, DeviceLoader, Predictor, TensorParallel, mgpu_core.place, lambda net, ids: step_of_ids(net, ids)],
)
@pytest.mark.parametrize("ids", ["cpu", "auto", 0, torch.device("cpu")])
def test_one_device_is_no_list(make, ids):
    with pytest.raises(TypeError) as caught:
        make(net_of(), ids)
    assert (
        str(caught.value) == f'device_ids is a list with one entry per rank, such as [0, 1] or ["cpu"] * 2, not {ids!r}'
    )


def step_of_ids(net, ids):
    return TrainStep(net, None, mgpu_core.optim.SGD(net.parameters(), lr=0.1), ids)


def test_the_functional_forms_name_their_own_arguments():
    with pytest.raises(TypeError, match=r"^target_gpus is a list"):
        mgpu_core.scatter(torch.ones(2), "cpu")
    with pytest.raises(TypeError, match=r"^devices is a list"):
        mgpu_core.comm.broadcast_coalesced([torch.ones(2)], "cpu")


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_predictor_cannot_be_copied(copied):
    with (
        Predictor(net_of(), TWO) as predict,
        pytest.raises(TypeError, match=r"a Predictor has threads .* save the module"),
    ):
        copied(predict)


def test_a_loader_can_be_copied():
    loader = copy.deepcopy(DeviceLoader([torch.ones(2, 1)], TWO))
    assert [batch.shape for batch in loader] == [torch.Size([2, 1])]


@pytest.mark.parametrize(
    ("batch", "stars"), [((torch.ones(4, 4), torch.ones(4, 4)), "*"), ({"x": torch.ones(4, 4)}, "**")]
)
def test_a_batch_as_one_argument(batch, stars):
    hint = f"the whole batch came as one {type(batch).__name__}: step({stars}batch) passes its entries"
    with pytest.raises(TypeError, match=re.escape(hint)):
        step_of(net_of())(batch)
    with pytest.raises(TypeError) as caught:  # the module is called with it
        step_of(net_of(), None)(batch)
    assert caught.value.__notes__ == [hint]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            None,
            TypeError,
            "the loss must be a tensor of one element, not None: with loss_fn=None the module returns it",
        ),
        (3.0, TypeError, "the loss must be a tensor of one element, not a float"),
        (
            (torch.ones(()),) * 2,
            TypeError,
            r"the loss must .* not a tuple: \(sum, weight\) needs reduction=\"weighted\"",
        ),
        (torch.ones(2), ValueError, r"the loss must be one number, not a tensor of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loss_that_is_none_is_told_without_a_traceback_in_the_message(value, error, text, ranks):
    net = Constant(value)
    step = TrainStep(net, None, mgpu_core.optim.SGD(net.parameters(), lr=0.1), ["cpu"] * ranks)
    with pytest.raises(error, match=f"^{text}") as caught:
        step(torch.ones(3, 1))
    assert "Traceback" not in str(caught.value)
    assert ("(in replica 0 on device cpu)" in str(caught.value)) == (ranks > 1)


def test_errors_of_the_users_code_keep_their_traceback():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match=r"(?s)Caught KeyError in replica 0 .*in forward"):
        DataParallel(Fails(1, 1), TWO)(torch.ones(2, 1))


def test_a_refusal_below_the_users_code_keeps_the_users_line():
    class Nested(nn.Linear):
        def forward(self, x):
            return mgpu_core.scatter(x, "cpu")

    with pytest.raises(TypeError, match=r"(?s)Caught TypeError in replica 0 .*in forward.*target_gpus is a list"):
        DataParallel(Nested(1, 1), TWO)(torch.ones(2, 1))


def test_an_empty_batch_warns():
    step = step_of(net_of())
    with pytest.warns(UserWarning, match="the batch has no rows"):
        loss = step(torch.ones(0, 4), torch.ones(0, 4))
    assert torch.isnan(loss)


def test_a_resized_layer_is_named():
    net = nn.Sequential(nn.Embedding(4, 2))
    optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=0.1)
    step = TrainStep(net, lambda out, _: out.sum(), optimizer, TWO)
    ids = torch.zeros(2, dtype=torch.long)
    step(ids, ids)
    net[0].weight.data = torch.ones(6, 2)
    with pytest.raises(ValueError) as caught:
        step(ids, ids)
    assert str(caught.value) == (
        "0.weight has shape (6, 2), and the optimizer's exp_avg of it (4, 2): after a module was resized, make a new "
        "optimizer and a new step"
    )


def test_a_sample_without_rows_is_explained():
    with Predictor(net_of(8), TWO, max_batch=4) as predict, pytest.raises(RuntimeError) as caught:
        predict(torch.ones(8))
    assert "one sample x is predict(x[None])" in caught.value.__notes__[-1]


def test_batches_of_other_shapes_are_explained():
    class Ragged(nn.Linear):
        def forward(self, x):
            return torch.zeros(len(x), int(x[0, 0]))

    with Predictor(Ragged(1, 1), ["cpu"], max_batch=2) as predict, pytest.raises(ValueError) as caught:
        predict(torch.arange(4.0).reshape(4, 1))
    assert caught.value.__notes__[-1].startswith(
        "the 4 rows were answered in 2 batches, whose outputs have other shapes"
    )


def test_numbers_among_kept_outputs_are_averaged_by_rows(recwarn):
    class Model(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return {"out": out, "mean": out.mean(), "count": torch.tensor(7)}

    net = Model(1, 1)
    x = torch.arange(3.0).reshape(3, 1)
    step = step_of(net, lambda out, target: (out["out"] - target).square().mean())
    _, outputs = step.evaluate(x, x, return_outputs=True)
    expected = net(x)
    torch.testing.assert_close(outputs["mean"], expected["mean"])
    assert outputs["count"] == 7
    assert not recwarn.list


def test_a_class_is_no_loss_function():
    with pytest.raises(TypeError, match=r"^loss_fn must be an instance, CrossEntropyLoss\(\), and not the class$"):
        step_of(net_of(), nn.CrossEntropyLoss)


def test_a_weighted_loss_of_a_bare_model():
    net = Constant(torch.ones(()))
    step = TrainStep(net, None, mgpu_core.optim.SGD(net.parameters(), lr=0.1), TWO, reduction="weighted")
    with pytest.raises(
        TypeError, match=r"^reduction=\"weighted\" needs \(sum, weight\) .* from the module as .*WeightedLoss"
    ):
        step(torch.ones(2, 1))


def test_a_placed_module_is_no_net_of_a_step():
    net = mgpu_core.place(net_of(), TWO, ["2"])
    with pytest.raises(RuntimeError, match=r"net's parts are on several devices, .*: pass the Pipeline to the step$"):
        step_of(net)


def test_the_state_of_a_net_is_no_state_of_a_step():
    net = net_of()
    with pytest.raises(ValueError, match=r"a net's own is loaded by net\.load_state_dict\(\)$"):
        step_of(net).load_state_dict(net.state_dict())


@pytest.mark.parametrize("memory", [[1e9], {0: "1GiB", 1: "1GiB"}, ["1GiB", "1GiB"]])
def test_memory_is_a_number_of_bytes_for_each_device(memory):
    with pytest.raises(ValueError, match=r"^memory must be 2 numbers of bytes, one per device, not "):
        mgpu_core.place(net_of(), TWO, memory=memory)

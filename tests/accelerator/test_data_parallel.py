"""``DataParallel`` on fake devices and mixed teams: whole numbers, so that everything equals one device exactly."""

import copy
import io
import threading

import pytest
import torch
from fakes.accelerator import TEAMS, fakes
from fakes.nets import Cnn, Polynomial, chunks, whole
from fakes.tensors import devices_of, gradients, numbers
from torch import nn

from mgpu_core import DataParallel, _core, data_parallel

every_team = pytest.mark.parametrize("team", TEAMS, ids="-".join)
several = pytest.mark.parametrize("team", [team for team in TEAMS if len(team) > 1], ids="-".join)


class Spy(nn.Module):
    """Notes where its tensors are and what is current, per rank; row i of the input is full of i."""

    def __init__(self):
        super().__init__()
        self.linear = whole(nn.Linear(2, 2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        tensors = (x, self.linear.weight, self.calls)
        self.seen.append((x[:, 0].tolist(), devices_of(tensors), torch.accelerator.current_device_index()))
        return self.linear(x)


@every_team
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_training_equals_one_device(team, rows):
    plain = Polynomial().double().to(team[0])
    net = copy.deepcopy(plain)
    wrapper = DataParallel(net, team)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (plain, net)]
    for step in range(2):
        x = numbers(rows, 3, device="cpu").double() + step
        for each, optimizer in zip((plain, wrapper), optimizers, strict=True):
            optimizer.zero_grad()
            each(x.to(team[0])).sum().backward()
        assert gradients(net) == gradients(plain)
        assert set(devices_of(p.grad for p in net.parameters())) == {team[0]}
        for optimizer in optimizers:
            optimizer.step()
    assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in plain.parameters()]


@several
def test_every_step_goes_through_the_torch_backend(team):
    net = whole(nn.Linear(2, 3)).to(team[0])
    wrapper = DataParallel(net, team)
    x = numbers(16, 2, device=team[0])
    _core.reset_counters()
    wrapper(x).sum().backward()
    rows = chunks(16, len(team))
    wanted = {("broadcast", "generic", rank): (1, 36) for rank in range(1, len(team))}  # weight and bias in one message
    for rank, count in enumerate(rows):
        wanted["scatter", "generic", rank] = (2, count * 8 + count * 12)  # the input, and the output's gradient
        wanted["gather", "generic", rank] = (1, count * 12)
        wanted["reduce", "generic", rank] = (1, 36)
    assert _core.counters() == wanted


class Many(nn.Module):
    """Small parameters of two dtypes, one in another order of dimensions, one that no rank uses, one large one."""

    def __init__(self):
        super().__init__()
        self.small = nn.ParameterList([nn.Parameter(numbers(3, 2) + i) for i in range(20)])
        self.wide = nn.ParameterList([nn.Parameter(numbers(2).double() + i) for i in range(5)])
        self.turned = nn.Parameter(numbers(2, 3).t())
        self.unused = nn.Parameter(numbers(2))
        self.large = nn.Parameter(torch.ones(300, 300))

    def forward(self, x):
        out = x @ sum(self.small).t() + x @ self.turned.t()
        return out + sum(self.wide).float().sum() + self.large.sum()


@several
def test_many_small_tensors_travel_in_one_message(team):
    net = Many().to(team[0])
    x = numbers(2 * len(team), 2, device=team[0])
    net(x).sum().backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    out = DataParallel(net, team)(x)
    _core.reset_counters()
    out.sum().backward()
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert parameter.grad.tolist() == gradient.tolist()
            assert parameter.grad.stride() == gradient.stride()
    nbytes = 20 * 24 + 5 * 16 + 24 + 360_000
    for rank in range(len(team)):  # those of one dtype, those of the other, and the large one
        assert _core.counters()["reduce", "generic", rank] == (3, nbytes)
    storages = {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}
    assert len(storages) == 27, "gradients do not share memory"


@several
def test_each_rank_has_its_tensors_and_its_device(team):
    spy = Spy().to(team[0])
    x = torch.arange(9.0, device="cpu").repeat(2, 1).t()
    DataParallel(spy, team)(x)
    current = torch.accelerator.current_device_index()
    rows = iter(x[:, 0].tolist())
    wanted = [
        ([next(rows) for _ in range(count)], [device] * 3, torch.device(device).index or 0)
        for device, count in zip(team, chunks(9, len(team)), strict=True)
    ]
    assert sorted(spy.seen) == wanted
    assert spy.calls.item() == 1, "rank 0's buffers are the module's own"
    assert torch.accelerator.current_device_index() == current == 0


@pytest.mark.parametrize(
    ("team", "in_threads"), [(["fake:0", "fake:1"], True), (["fake:0", "fake:0"], False), (["fake:0", "cpu"], False)]
)
def test_auto_is_threads_where_no_rank_shares_its_accelerator(team, in_threads):
    net, threads = nn.Linear(2, 2).to("fake:0"), []
    net.register_forward_pre_hook(lambda *_: threads.append(threading.get_ident()))
    DataParallel(net, team, workers="auto")(torch.ones(4, 2, device="cpu"))
    assert len(threads) == 2
    assert (threading.get_ident() in threads) != in_threads


def test_no_device_ids_are_all_fake_devices():
    spy = Spy().to("fake:0")
    wrapper = DataParallel(spy)
    assert wrapper.device_ids == [0, 1, 2, 3]
    assert (wrapper.output_device, wrapper.src_device_obj) == (0, torch.device("fake:0"))
    wrapper(numbers(8, 2))
    assert sorted(found[0] for _, found, _ in spy.seen) == fakes(4)


@pytest.mark.parametrize("ids", [[1, 0, 3], ["fake:1", torch.device("fake", 0), 3]])
def test_a_number_is_a_fake_device(ids):
    wrapper = DataParallel(Polynomial().to("fake:1"), ids)
    assert wrapper.device_ids == [1, 0, 3]
    assert wrapper(numbers(6, 3)).device == torch.device("fake:1")
    assert DataParallel(Polynomial().to("fake:0"), [0, "cpu"]).device_ids == [0, torch.device("cpu")]


@pytest.mark.parametrize("output", ["cpu", "fake:3", 2, -1])
@pytest.mark.parametrize("team", TEAMS, ids="-".join)
@pytest.mark.filterwarnings("ignore:Using -1:FutureWarning")
def test_output_device(team, output):
    wanted = {2: "fake:2", -1: "cpu"}.get(output, output)
    plain = Polynomial().to(team[0])
    net = copy.deepcopy(plain)
    x = numbers(9, 3, device=team[0])
    for out in (DataParallel(net, team, output)(x), data_parallel(net, x, team, output)):
        assert str(out.device) == wanted
        assert out.tolist() == plain(x).tolist()
    out.sum().backward()
    plain(x).sum().backward()
    assert gradients(net) == gradients(plain)


@several
@pytest.mark.parametrize("what", ["parameter", "buffer"])
@pytest.mark.parametrize("elsewhere", ["fake:2", "cpu", "meta"])
def test_module_on_the_wrong_device(team, what, elsewhere):
    if elsewhere == team[0]:
        elsewhere = "fake:3"
    net = Spy().to(team[0])
    if what == "parameter":
        net.linear.bias = nn.Parameter(torch.ones(2, device=elsewhere))
    else:
        net.calls = torch.zeros((), device=elsewhere)
    _core.reset_counters()
    for call in (DataParallel(net, team), lambda x: data_parallel(net, x, team)):
        with pytest.raises(RuntimeError) as caught:
            call(numbers(4, 2))
        assert str(caught.value) == (
            f"module must have its parameters and buffers on device {team[0]} (device_ids[0]) "
            f"but found one of them on device: {elsewhere}"
        )
    assert _core.counters() == {}


@pytest.mark.parametrize("device", ["fake:2", "cpu", 3])
def test_one_device_takes_the_module_along(device):
    net = Cnn()
    wrapper = DataParallel(net, [device])
    wanted = "fake:3" if device == 3 else device
    assert set(devices_of([*net.parameters(), *net.buffers()])) == {wanted}
    _core.reset_counters()
    assert str(wrapper(numbers(4, 1, 4, 4)).device) == wanted
    assert _core.counters() == {}


@every_team
def test_checkpoints(team):
    net = Cnn().to(team[0])
    wrapper = DataParallel(net, team)
    wrapper(numbers(16, 1, 4, 4)).sum().backward()
    stream = io.BytesIO()
    torch.save(wrapper.state_dict(), stream)
    back = DataParallel(Cnn().to(team[0]), team)
    for where in (None, "cpu", "fake:3"):
        stream.seek(0)
        back.load_state_dict(torch.load(stream, map_location=where, weights_only=True), strict=True)
        assert [t.tolist() for t in back.state_dict().values()] == [t.tolist() for t in net.state_dict().values()]
        assert set(devices_of(back.state_dict().values())) == {team[0]}


class Picky(nn.Module):
    def forward(self, x, wrong):
        if str(x.device) in wrong:
            raise LookupError(str(x.device))
        return x


def test_failures_name_their_devices():
    wrapper = DataParallel(Picky(), ["fake:1", "cpu", "fake:3"])
    x = numbers(6, 2)
    with pytest.raises(LookupError) as caught:
        wrapper(x, ["cpu", "fake:3"])
    assert str(caught.value).startswith("Caught LookupError in replica 1 on device cpu.\nOriginal Traceback")
    assert str(caught.value.__cause__) == "cpu"
    assert caught.value.__notes__ == ["also in replica 2 on device fake:3: LookupError('fake:3')"]
    assert wrapper(x, []).tolist() == x.tolist(), "the team is still good"


@several
def test_zero_rows_run_once_and_shares_are_kept(team):
    spy = Spy().to(team[0])
    out = DataParallel(spy, team)(numbers(0, 2))
    assert (out.shape, str(out.device)) == ((0, 2), team[0])
    assert [(rows, found) for rows, found, _ in spy.seen] == [([], [team[0]] * 3)]
    spy.seen.clear()
    shares = list(range(1, len(team) + 1))
    DataParallel(spy, team, shares=shares)(torch.arange(float(sum(shares)), device="cpu").repeat(2, 1).t())
    assert [len(rows) for rows, *_ in sorted(spy.seen)] == shares

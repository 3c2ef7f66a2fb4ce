"""The optimizers of devices without kernels of ours: to the bit the arithmetic of one segment after the other."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_core import kernels
from mgpu_core.kernels import reference
from mgpu_core.kernels.flat_tables import ACTIVE, STEP

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COUNTS, BEGINS = [5, 0, 64, 1, 301, 7], [0, 5, 6, 70, 75, 376]  # neighbours and gaps, of one group and of two
GROUPS, LENGTH = [0, 1, 1, 1, 0, 0], 400
INACTIVE = {(0, 2), (2, 4), (2, 0)}  # (step, segment): one joins late, two leave out a step

SGD = [
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 0.2, "momentum": 0.8, "nesterov": 1, "maximize": 1},
]
ADAM = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "maximize": 1}]
LION = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.2, "beta1": 0.8, "beta2": 0.9, "maximize": 1}]


def sgd_of_one(p, g, states, step, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=0):
    g = g + weight_decay * p
    if momentum:
        states[0] = g if step == 1 else momentum * states[0] + (1 - dampening) * g
        g = g + momentum * states[0] if nesterov else states[0]
    return p - lr * g


def adam_of_one(p, g, states, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    return adam_moves(p, g + weight_decay * p, states, step, lr, beta1, beta2, eps)


def adamw_of_one(p, g, states, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    return adam_moves(p * (1 - lr * weight_decay), g, states, step, lr, beta1, beta2, eps)


def adam_moves(p, g, states, step, lr, beta1, beta2, eps):
    states[0] = states[0] + (1 - beta1) * (g - states[0])
    states[1] = states[1] * beta2 + (1 - beta2) * g * g
    if len(states) == 3:
        states[2] = torch.maximum(states[2], states[1])
    # A list of one, as torch's division of a tensor by a number may multiply by its inverse.
    (root,) = torch._foreach_div([states[-1].sqrt()], (1 - beta2**step) ** 0.5)
    return p - lr / (1 - beta1**step) * (states[0] / (root + eps))


def lion_of_one(p, g, states, step, lr, beta1=0.9, beta2=0.99, weight_decay=0.0):
    way = states[0] + (1 - beta1) * (g - states[0])
    states[0] = states[0] * beta2 + (1 - beta2) * g
    return p * (1 - lr * weight_decay) - lr * way.sign()


# name: settings of the groups, their table, number of states, arithmetic of one segment.
CASES = {
    "sgd": (SGD, kernels.sgd_groups, 1, sgd_of_one),
    "sgd without momentum": ([{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1}], kernels.sgd_groups, 0, sgd_of_one),
    "adam": (ADAM, kernels.adam_groups, 2, adam_of_one),
    "adam with amsgrad": (ADAM, kernels.adam_groups, 3, adam_of_one),
    "adamw": (ADAM, kernels.adam_groups, 2, adamw_of_one),
    "adamw with amsgrad": (ADAM, kernels.adam_groups, 3, adamw_of_one),
    "lion": (LION, kernels.lion_groups, 1, lion_of_one),
}
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def random_flat(dtype, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(LENGTH, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    return made.to(torch.get_default_device())


def run_reference(case, parameters, gradients, states, segments, groups, scalars=(None, None)):
    name = case.split()[0]
    if name in ("sgd", "lion"):
        state = states[0] if states else None
        getattr(reference, name)(parameters, gradients, state, segments, groups, *scalars)
        return
    most = states[2] if len(states) == 3 else None
    reference.adam(parameters, gradients, *states[:2], most, segments, groups, name == "adamw", *scalars)


def run_segment_by_segment(case, step, parameters, gradients, states, steps, factor):
    """Make one step in the dtype of the arithmetic, each number rounded once; ``steps`` of the segments are raised."""
    settings, _, _, of_one = CASES[case]
    wide = torch.float64 if parameters.dtype == torch.float64 else torch.float32
    for index, (begin, count, group) in enumerate(zip(BEGINS, COUNTS, GROUPS, strict=True)):
        if (step, index) in INACTIVE:
            continue
        steps[index] += 1
        chosen = dict(settings[group])
        sign = -1.0 if chosen.pop("maximize", 0) else 1.0
        p, g, *kept = (flat[begin : begin + count].to(wide) for flat in (parameters, gradients, *states))
        parameters[begin : begin + count] = of_one(p, g * (sign * factor), kept, steps[index], **chosen)
        for state, made in zip(states, kept, strict=True):
            state[begin : begin + count] = made


@every_dtype
@every_case
def test_it_is_the_arithmetic_of_each_segment(case, dtype):
    settings, make_groups, state_count, _ = CASES[case]
    groups, segments = make_groups(*settings), kernels.segment_table(COUNTS, groups=GROUPS, begins=BEGINS)
    ours = [random_flat(dtype, 0)] + [torch.zeros(LENGTH, dtype=dtype) for _ in range(state_count)]
    truth = [flat.clone() for flat in ours]
    steps = [0] * len(COUNTS)
    scalars = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.0)
    for step in range(4):
        for index in range(len(COUNTS)):
            segments[index, ACTIVE] = (step, index) not in INACTIVE
        gradients = random_flat(dtype, step + 1)
        given = gradients.clone()
        run_reference(case, ours[0], given, ours[1:], segments, groups, scalars)
        assert torch.equal(given, gradients)
        run_segment_by_segment(case, step, truth[0], gradients, truth[1:], steps, 0.7)
        assert segments[:, STEP].tolist() == steps
        for one, other in zip(ours, truth, strict=True):
            assert torch.equal(one, other)
    assert steps == [3, 4, 3, 4, 3, 4]


@every_dtype
@every_case
def test_an_overflow_changes_nothing(case, dtype):
    settings, make_groups, state_count, _ = CASES[case]
    segments = kernels.segment_table(COUNTS, groups=GROUPS, begins=BEGINS)
    flats = [random_flat(dtype, seed) for seed in range(state_count + 1)]
    before = [flat.clone() for flat in (*flats, segments)]
    for overflow in (1.0, float("inf"), float("nan")):
        scalars = None, torch.tensor(overflow)
        run_reference(case, flats[0], random_flat(dtype, 9), flats[1:], segments, make_groups(*settings), scalars)
        assert all(torch.equal(one, other) for one, other in zip(before, (*flats, segments), strict=True))


@every_dtype
@every_case
def test_what_is_inactive_or_between_segments_keeps_its_bits(case, dtype):
    settings, make_groups, state_count, _ = CASES[case]
    segments = kernels.segment_table(COUNTS, groups=GROUPS, begins=BEGINS)
    segments[2, ACTIVE] = 0
    flats = [torch.full((LENGTH,), float("nan"), dtype=dtype) for _ in range(state_count + 1)]
    taking_part = torch.zeros(LENGTH, dtype=torch.bool)
    for index, (begin, count) in enumerate(zip(BEGINS, COUNTS, strict=True)):
        taking_part[begin : begin + count] = index != 2
    for flat in flats:
        flat[taking_part] = 0.0
    run_reference(case, flats[0], torch.ones(LENGTH, dtype=dtype), flats[1:], segments, make_groups(*settings))
    for flat in flats:
        assert torch.equal(flat.isnan(), ~taking_part)
        assert (flat[taking_part] != 0).all()
    assert segments[:, STEP].tolist() == [1, 1, 0, 1, 1, 1]


@every_case
def test_without_an_active_segment_nothing_happens(case):
    settings, make_groups, state_count, _ = CASES[case]
    segments = kernels.segment_table(COUNTS, groups=GROUPS, begins=BEGINS)
    segments[:, ACTIVE] = 0
    flats = [torch.ones(LENGTH) for _ in range(state_count + 1)]
    run_reference(case, flats[0], torch.ones(LENGTH), flats[1:], segments, make_groups(*settings))
    assert all(flat.eq(1).all() for flat in flats)
    assert segments[:, STEP].eq(0).all()


class Operations(TorchDispatchMode):
    """Counts what torch is asked for, and how often a number leaves the device."""

    def __init__(self):
        super().__init__()
        self.counts, self.reads = Counter(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        name = function.overloadpacket.__name__
        self.counts[name] += name not in ("slice", "split_with_sizes", "select")
        if name == "_local_scalar_dense":
            self.reads += arguments[0].device.type != "cpu"
        elif name in ("_to_copy", "copy_"):
            source = arguments[0] if name == "_to_copy" else arguments[1]
            self.reads += source.device.type != "cpu" and made.device.type == "cpu"
        return made


@every_dtype
@every_case
def test_neither_operations_nor_reads_grow_with_the_number_of_segments(case, dtype):
    settings, make_groups, state_count, _ = CASES[case]
    groups, found = make_groups(*settings), []
    scalars = torch.tensor(0.25, dtype=torch.float64), torch.tensor(0.0)
    for count in (2, 50):
        begins, of_groups = [4 * index for index in range(count)], [index % 2 for index in range(count)]
        segments = kernels.segment_table([3] * count, groups=of_groups, begins=begins)
        flats = [torch.zeros(LENGTH, dtype=dtype) for _ in range(state_count + 2)]
        with Operations() as operations:
            run_reference(case, *flats[:2], flats[2:], segments, groups, scalars)
        found.append(operations.counts)
        assert operations.reads == (0 if torch.get_default_device().type == "cpu" else 1)
    assert found[0] == found[1]
    assert found[0]["_foreach_mul"] >= 2


def test_momentum_needs_a_buffer():
    parameters, segments = torch.ones(4), kernels.segment_table([4])
    groups = kernels.sgd_groups({"lr": 0.5, "momentum": 0.5})
    with pytest.raises(ValueError, match="a group has momentum, but there is no momentum buffer"):
        reference.sgd(parameters, torch.ones(4), None, segments, groups, None, None)
    assert parameters.tolist() == [1.0] * 4
    assert segments[0, STEP] == 0


@every_dtype
@pytest.mark.parametrize("case", ["sgd", "sgd without momentum", "lion"])
def test_kernels_have_its_bits(case, dtype):
    """Adam's may differ in the last digit of its bias correction, and torch's root on a CPU in the last bit."""
    settings, make_groups, state_count, _ = CASES[case]
    groups, results = make_groups(*settings), []
    for is_kernel in (False, True):
        segments = kernels.segment_table(COUNTS, groups=GROUPS, begins=BEGINS)
        flats = [random_flat(dtype, 0)] + [torch.zeros(LENGTH, dtype=dtype) for _ in range(state_count)]
        for step in range(4):
            segments[2, ACTIVE] = step != 0
            gradients = random_flat(dtype, step + 1)
            if is_kernel:
                state = flats[1] if state_count else None
                getattr(kernels, case.split()[0])(flats[0], gradients, state, segments, groups)
            else:
                run_reference(case, flats[0], gradients, flats[1:], segments, groups)
        results.append([*flats, segments])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

"""``TensorParallel``: outputs, gradients and steps are those of the module alone, whatever the plan and the ranks."""

import copy
import gc
import pickle
import threading
import weakref
from functools import partial

import pytest
import torch
from fakes.collector import FREES_LATE
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from mgpu_core import TensorParallel, TrainStep
from mgpu_core.optim import SGD, AdamW, Lion

WIDTH, HEADS, WORDS = 16, 4, 23


class Attention(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.head_dim, self.rate = WIDTH // HEADS, rate
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = attention(q, k, v, is_causal=True, dropout_p=self.rate if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Two experts in 3-d Parameters, gate and up one behind the other; all tokens go to both."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * 10, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, 10) / 4)

    def forward(self, x):
        gate, up = torch.einsum("bsi,eoi->ebso", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebsi,eoi->bso", nn.functional.silu(gate) * up, self.down_proj)


class Block(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(rate)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 22), nn.Linear(22, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 11), nn.Linear(11, WIDTH, bias=False)
        self.experts, self.drop = Experts(), nn.Dropout(rate)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        x = x + self.fc2(torch.tanh(self.fc1(x)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(torch.sigmoid(gate) * up) + self.experts(x)


class Net(nn.Module):
    """Tied embeddings, a scale in a subclass of the embedding, a buffer, blocks with all kinds of cuts."""

    class Scaled(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens) * 3

    def __init__(self, tied=True, rate=0.0, checkpointed=False):
        super().__init__()
        self.words = self.Scaled(WORDS, WIDTH, padding_idx=22)
        self.words.weight.data.mul_(0.05)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("shift", torch.arange(WIDTH) / 10)
        self.scale = nn.Parameter(torch.ones(()))
        self.checkpointed = checkpointed

    def forward(self, tokens, *, more=None):
        x = self.words(tokens) + self.shift
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x) * self.scale
        return {"logits": logits if more is None else logits + more, "hidden": x}


PLAN = {
    "words": "vocab",
    "head": "column_gathered",
    "blocks.*.attention.q_proj": "column",
    "blocks.*.attention.k_proj": "column",
    "blocks.*.attention.v_proj": "column",
    "blocks.*.attention.o_proj": "row",
    "blocks.*.fc1": "column_gathered",
    "blocks.*.fc2": "rowwise_split_input",
    "blocks.*.gate_up": "packed_column",
    "blocks.*.down": "rowwise",
    "blocks.*.experts.gate_up_proj": "packed_colwise",
    "blocks.*.experts.down_proj": "row",
    "blocks.*.experts": "moe_tp_experts",
    "blocks.*.norm": "replicate",
}
TOKENS = torch.randint(0, WORDS, (5, 6), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
WANTED = torch.randint(0, WORDS, (5, 6), generator=torch.Generator("cpu").manual_seed(1), device="cpu")


def made(**options):
    torch.manual_seed(0)
    return Net(**options).double().to(cpu(1)[0])


def cut(net, ranks, plan=PLAN):
    return TensorParallel(copy.deepcopy(net), cpu(ranks), plan)


def here(tensor):
    return tensor.to(cpu(1)[0])


def loss_of(net, tokens=TOKENS, wanted=WANTED):
    return nn.functional.cross_entropy(net(here(tokens))["logits"].flatten(0, 1), here(wanted).flatten())


def grads_of(tp):
    """The gradients of the module alone."""
    with torch.no_grad():
        kept = {name: value.clone() for name, value in tp.full_state_dict().items()}
        values = [each.detach().clone() for each in tp.parameters()]
        for each in tp.parameters():
            each.data.copy_(each.grad if each.grad is not None else torch.zeros_like(each))
        found = tp.full_state_dict()
        for each, value in zip(tp.parameters(), values, strict=True):
            each.data.copy_(value)
    assert kept.keys() == found.keys()
    return found


def assert_same_grads(tp, alone, within=1e-12):
    found = grads_of(tp)
    for name, each in alone.named_parameters(remove_duplicate=False):
        assert torch.allclose(found[name], each.grad, rtol=0, atol=within), name


RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


@RANKS
@pytest.mark.parametrize("tied", [True, False])
def test_outputs_gradients_and_steps_are_those_of_the_module_alone(ranks, tied):
    alone = made(tied=tied)
    tp = cut(alone, ranks)
    output, wanted = tp(here(TOKENS)), alone(here(TOKENS))
    assert list(output) == ["logits", "hidden"]
    for name in output:
        assert torch.allclose(output[name], wanted[name], rtol=0, atol=1e-12)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (tp, alone)]
    for _ in range(5):
        for each, optimizer in zip((tp, alone), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each).backward()
        assert_same_grads(tp, alone, 1e-10)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5).cpu() for each in (tp, alone)]
        assert torch.allclose(*norms, rtol=0, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    state = alone.state_dict()
    for name, each in tp.full_state_dict().items():
        assert torch.allclose(each, state[name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize("name", ["words", "head"])
def test_a_plan_that_names_one_of_two_tied_layers_cuts_both(name):
    alone = made()
    tp = cut(alone, 2, {name: PLAN[name]})
    loss_of(tp).backward()
    loss_of(alone).backward()
    assert_same_grads(tp, alone)
    assert [tuple(each.shape) for name, each in tp.named_parameters() if "words" in name] == [(12, WIDTH), (11, WIDTH)]
    assert not any("head" in name for name, _ in tp.named_parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_device_has_its_part_and_the_first_all_else(ranks):
    net = made()
    planned = {"words.weight"} | {
        name for name, _ in net.named_parameters() if "norm" not in name and "bias" not in name and "scale" not in name
    }
    nbytes = sum(each.nbytes for name, each in net.named_parameters() if name in planned)
    tp = cut(net, ranks)
    devices = [torch.device(each) for each in cpu(ranks)]
    found = dict.fromkeys(range(ranks), 0)
    for name, each in tp.named_parameters():
        last = name.rpartition(".")[2]
        if last.isdigit() and each.ndim > 1:
            assert each.device == devices[int(last)]
            found[int(last)] += each.nbytes
    assert sum(found.values()) == nbytes
    assert max(found.values()) <= nbytes * (1 / ranks + 0.05)


def test_the_module_that_was_given_is_emptied():
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    memory = weakref.ref(net.blocks[0].fc1.weight.untyped_storage())
    tp = TensorParallel(net, cpu(2), PLAN)
    gc.collect()
    assert memory() is None
    assert all(each.is_meta for each in net.parameters())
    with pytest.raises(RuntimeError, match="has no weights of its own: call the TensorParallel"):
        net(here(TOKENS))
    with pytest.raises(RuntimeError, match=r"make the optimizer of tp\.parameters"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"make the optimizer of tp\.parameters"):
        optimizer.zero_grad()
    loss_of(tp).backward()


def test_the_state_goes_out_and_in_bit_for_bit():
    alone = made()
    alone.shift.add_(0.25)
    tp, other = cut(alone, 4), cut(made(), 2)
    state = tp.full_state_dict()
    assert list(state) == list(alone.state_dict())
    assert all(torch.equal(*pair) for pair in zip(state.values(), alone.state_dict().values(), strict=True))
    assert state["head.weight"].data_ptr() == state["words.weight"].data_ptr()
    other.load_full_state_dict({name: 2 * each for name, each in state.items()})
    assert all(torch.equal(2 * state[name], each) for name, each in other.full_state_dict().items())
    whole = other.uncut()
    assert type(whole) is Net
    assert whole.head.weight is whole.words.weight
    assert whole.head.out_features == WORDS
    assert torch.allclose(whole(here(TOKENS))["logits"], other(here(TOKENS))["logits"], rtol=1e-10, atol=0)
    own = tp.state_dict()
    third = cut(made(), 4)
    third.load_state_dict(own)
    assert all(torch.equal(state[name], each) for name, each in third.full_state_dict().items() if name != "shift")
    for wrong in ({}, {**state, "more": torch.ones(1)}, {**state, "shift": torch.ones(1)}):
        with pytest.raises(ValueError, match="the state does not fit"):
            tp.load_full_state_dict(wrong)


def test_inputs_that_require_grad_have_the_gradient_of_the_module_alone():
    alone = made()
    tp = cut(alone, 4)
    more = [torch.randn(5, 6, WORDS, dtype=torch.float64, device=cpu(1)[0]) for _ in range(1)]
    found = []
    for net in (tp, alone):
        leaf = more[0].clone().requires_grad_()
        net(here(TOKENS), more=leaf * 2)["logits"].square().sum().backward()
        found.append(leaf.grad)
    assert torch.allclose(*found, rtol=0, atol=1e-9)


def test_twenty_runs_have_one_set_of_bits():
    tp = cut(made(), 4)
    bits = set()
    for _ in range(20):
        tp.zero_grad()
        loss_of(tp).backward()
        bits.add(b"".join(each.grad.cpu().numpy().tobytes() for each in tp.parameters()))
    assert len(bits) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_run_again_in_a_backward_get_what_they_got(ranks):
    alone = made()
    tp = cut(made(checkpointed=True), ranks)
    few = TOKENS[:2], WANTED[:2]
    first, second = loss_of(tp), loss_of(tp, *few)
    loss_of(alone).backward()
    first.backward()  # in the order of the forwards
    assert_same_grads(tp, alone)
    loss_of(alone, *few).backward()
    second.backward(retain_graph=True)
    assert_same_grads(tp, alone)
    dropped = loss_of(tp)
    del dropped
    loss_of(alone, *few).backward()
    second.backward()
    loss_of(alone).backward()
    loss_of(tp).backward()
    assert_same_grads(tp, alone)


def test_a_reentrant_checkpoint_is_refused_by_name():
    class Old(Net):
        def forward(self, tokens):
            x = self.words(tokens) + self.shift
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return {"logits": self.head(x)}

    tp = TensorParallel(Old().double().to(cpu(1)[0]), cpu(2), PLAN)
    with pytest.raises(
        RuntimeError, match=r"blocks\.1\.attention\.o_proj ran again in a backward.*use_reentrant=False"
    ):
        loss_of(tp).backward()


def test_dropout_is_the_same_in_all_ranks_and_in_a_second_forward():
    found = []
    for checkpointed in (False, True):
        tp = cut(made(rate=0.4, checkpointed=checkpointed), 2)
        torch.manual_seed(7)
        loss = loss_of(tp)
        loss.backward()
        found.append((loss.detach(), list(grads_of(tp).values())))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(found[0][1], found[1][1], strict=True))
    assert not torch.equal(loss_of(tp), found[0][0])
    tp.eval()
    assert torch.allclose(loss_of(tp), loss_of(made(rate=0.4).eval()), rtol=0, atol=1e-12)


def test_dropout_between_cuts_is_that_of_the_module_alone():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.fc2(torch.tanh(self.fc1(self.drop(x)))))

    torch.manual_seed(0)
    alone = Between().double().to(cpu(1)[0])
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {"fc1": "column", "fc2": "row"})
    x = torch.rand(3, 6, dtype=torch.float64, device=cpu(1)[0])
    torch.manual_seed(3)
    found, state = tp(x), torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.allclose(found, alone(x), rtol=0, atol=1e-12)
    assert torch.equal(state, torch.get_rng_state())


def test_a_train_step_takes_it_as_one_rank():
    alone = made()
    tp = cut(alone, 2)
    where = [each.device for each in tp.parameters()]

    def loss_fn(output, wanted):
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), wanted.flatten())

    ours = TrainStep(tp, loss_fn, AdamW(tp.parameters(), lr=1e-2), clip_norm=0.5)
    plain = TrainStep(alone, loss_fn, AdamW(alone.parameters(), lr=1e-2), cpu(1), clip_norm=0.5)
    for _ in range(5):
        pair = [step(here(TOKENS), here(WANTED)) for step in (ours, plain)]
        assert torch.allclose(pair[0].cpu(), pair[1].cpu(), rtol=0, atol=1e-9)
    assert [each.device for each in tp.parameters()] == where
    for name, each in tp.full_state_dict().items():
        assert torch.allclose(each, alone.state_dict()[name], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="device_ids must be those of the TensorParallel"):
        TrainStep(tp, loss_fn, AdamW(tp.parameters(), lr=1e-2), cpu(1))


def test_modes_and_changes_reach_all_ranks():
    tp = cut(made(rate=0.4), 2)
    assert tp.eval() is tp
    assert torch.equal(loss_of(tp), loss_of(tp))
    tp.train()
    assert all(tp.each(lambda net: net.blocks[0].drop.training))
    tp.requires_grad_(False)
    tp.each(lambda net: net.blocks[0].fc1.requires_grad_())
    loss_of(tp).backward()
    assert {name for name, each in tp.named_parameters() if each.grad is not None} == {
        f"weights.blocks.0.fc1.{kind}.{rank}" for kind in ("weight", "bias") for rank in (0, 1)
    }
    nets = tp.each(lambda net: net)
    nets[1].blocks[0].eval()
    with pytest.raises(RuntimeError, match=r"changed alone: use tp\.train"):
        loss_of(tp)
    tp.train()
    loss_of(tp)


def test_autocast_half_and_double():
    alone = made().float()
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), PLAN)
    assert torch.allclose(loss_of(tp), loss_of(alone), rtol=0, atol=1e-4)
    with torch.autocast(torch.device(cpu(1)[0]).type, torch.bfloat16):
        assert torch.allclose(loss_of(tp), loss_of(alone), rtol=0, atol=5e-2)
    assert tp.double() is tp
    assert torch.allclose(loss_of(tp), loss_of(alone.double()), rtol=0, atol=1e-12)
    assert tp.full_state_dict()["shift"].dtype == torch.float64


def test_two_threads_wait_for_each_other():
    alone = made()
    tp, found = cut(alone, 2), [None] * 6

    def call(index):
        with torch.no_grad():
            for _ in range(3):
                found[index] = tp(here(TOKENS[: index + 1]))["logits"].cpu()

    threads = [threading.Thread(target=call, args=(index,)) for index in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for index in range(5):
        assert torch.allclose(found[index], alone(here(TOKENS[: index + 1]))["logits"].cpu(), rtol=0, atol=1e-12)


class Cache:
    """What a forward has seen, as a decoder's cache; every rank has its own columns in it."""

    def __init__(self):
        self.seen = []

    def update(self, x):
        self.seen.append(x)
        return torch.stack(self.seen).sum(0)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        return self.fc2(cache.update(self.fc1(x))), cache


@pytest.mark.parametrize("own", [True, False])
def test_a_cache_may_be_passed_in_again(own):
    torch.manual_seed(0)
    alone = Cached().double().to(cpu(1)[0])
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {"fc1": "column", "fc2": "row"})
    caches = [Cache() if own else None for _ in range(2)]
    x = torch.rand(3, 4, dtype=torch.float64, device=cpu(1)[0])
    for _ in range(4):
        found, caches[0] = tp(x, cache=caches[0])
        wanted, caches[1] = alone(x, cache=caches[1])
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert caches[0].seen[0].shape == (3, 3)


def test_an_object_that_cannot_be_copied_is_refused_by_name():
    tp = TensorParallel(Cached(), cpu(2), {"fc1": "column", "fc2": "row"})
    cache = Cache()
    cache.lock = threading.Lock()
    with pytest.raises(TypeError, match="a Cache among the arguments cannot be copied for each rank"):
        tp(torch.rand(3, 4, device=cpu(1)[0]), cache=cache)


class Meets(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.skips, self.fails = [None], [None]

    def forward(self, x):
        rank = 0 if len(self.a.weight) == 4 else 1
        if self.fails[0] is not None and rank:
            raise self.fails[0]
        if not (self.skips[0] == "a" and rank):
            x = self.a(x)
        if not (self.skips[0] == "b" and rank):
            x = self.b(x)
        return x

    def sample(self, x):
        return torch.multinomial(self(x).softmax(-1), 1), torch.rand_like(x), x.clone().uniform_()


@pytest.fixture
def meets():
    """A net of two ranks that knows in which it is: the first has four of seven features."""
    torch.manual_seed(0)
    return TensorParallel(Meets().to(cpu(1)[0]), cpu(2), {"a": "column_gathered", "b": "column_gathered"})


def test_ranks_that_come_to_different_layers_are_told_so(meets):
    x = torch.rand(2, 7, device=cpu(1)[0])
    wanted = meets(x)
    meets.each(lambda net: net.skips.__setitem__(0, "a"))
    with pytest.raises(Exception, match="rank 0 came to a and rank 1 to b"):
        meets(x)
    meets.each(lambda net: net.skips.__setitem__(0, "b"))
    with pytest.raises(Exception, match="rank 1 ended without coming"):
        meets(x)
    meets.each(lambda net: net.skips.__setitem__(0, None))
    assert torch.equal(meets(x), wanted)


@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_a_rank_that_fails_ends_the_call(meets, error):
    x = torch.rand(2, 7, device=cpu(1)[0])
    wanted = meets(x)
    meets.each(lambda net: net.fails.__setitem__(0, error))
    with pytest.raises(type(error)):
        meets(x)
    meets.each(lambda net: net.fails.__setitem__(0, None))
    assert torch.equal(meets(x), wanted)


def test_a_method_draws_what_the_module_alone_would_draw(meets):
    alone, x = meets.uncut(), torch.rand(2, 7, device=cpu(1)[0])
    torch.manual_seed(4)
    found, state = meets.call("sample", x), torch.get_rng_state()
    torch.manual_seed(4)
    assert all(torch.equal(*pair) for pair in zip(found, alone.sample(x), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(AttributeError, match="generate"):
        meets.call("generate", x)


def test_a_layer_outside_of_a_call_says_so(meets):
    with pytest.raises(Exception, match="ranks, which meet in calls of the TensorParallel alone"):
        meets.each(lambda net: net(torch.rand(2, 7, device=cpu(1)[0])))


def test_threads_and_memory_stay_flat():
    tp = cut(made(), 2)
    with torch.no_grad():
        for _ in range(20):
            tp(here(TOKENS))
        gc.collect()
        threads, objects = threading.active_count(), sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        for _ in range(100):
            tp(here(TOKENS))
        gc.collect()
    assert threading.active_count() <= threads
    assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) <= objects


class Hidden(nn.Module):
    """Draws without a sign of it."""

    def __init__(self, draws):
        super().__init__()
        self.fc1, self.fc2, self.noisy = nn.Linear(4, 6), nn.Linear(6, 4), draws

    def forward(self, x):
        x = self.fc2(torch.tanh(self.fc1(x)))
        return x + torch.rand_like(x) if self.noisy else x


@pytest.mark.parametrize("draws", [True, False])
def test_numbers_that_are_drawn_without_a_sign_are_the_same_in_all_ranks(draws):
    torch.manual_seed(0)
    alone = Hidden(draws).double().to(cpu(1)[0])
    plan = {"fc1": "column", "fc2": "row"}
    # the sum of the ranks' outputs shows what each of them drew
    tp = TensorParallel(nn.Sequential(copy.deepcopy(alone), nn.Linear(4, 2).double().to(cpu(1)[0])), cpu(2), {
        **{f"0.{name}": word for name, word in plan.items()}, "1": "rowwise_split_input"
    })  # fmt: skip
    alone = tp.uncut()
    x = torch.rand(3, 4, dtype=torch.float64, device=cpu(1)[0])
    for seed in range(3):
        torch.manual_seed(seed)
        found, state = tp(x), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.allclose(found, alone(x), rtol=0, atol=1e-12)
        assert torch.equal(state, torch.get_rng_state())


def test_ranks_that_share_an_accelerator_cannot_draw():
    device = cpu(1)[0]
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)).to(device)
    tp = TensorParallel(net, [device, device], {"0": "column", "2": "row"})
    x = torch.rand(3, 4, device=device)
    if torch.device(device).type == "cpu":
        tp(x)
        return
    with pytest.raises(RuntimeError, match="not all ranks can draw the same"):
        tp(x)
    tp.eval()
    tp(x)


class Samples(nn.Module):
    """Samples rows of words, by layers that may draw masks."""

    def __init__(self, rate):
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 12)
        self.drop = nn.Dropout(rate)

    def forward(self, words):
        return self.down(self.drop(torch.relu(self.up(self.drop(self.words(words))))))

    def sample(self, words, count):
        for _ in range(count):
            chances = self(words)[:, -1].softmax(-1)
            words = torch.cat([words, torch.multinomial(chances, 1)], 1)
        return words


def sampled(alone, devices, plan):
    """What the module alone samples, and what it does over devices."""
    tp, words = TensorParallel(copy.deepcopy(alone), devices, plan), torch.arange(10).reshape(5, 2).to(devices[0])
    for _ in range(2):
        for call in (alone.sample, partial(tp.call, "sample")):
            torch.manual_seed(5)
            with torch.no_grad():
                yield call(words, 6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_go_on_after_a_draw_for_all_ranks(ranks):
    torch.manual_seed(0)
    found = sampled(Samples(0.5).double().to(cpu(1)[0]), cpu(ranks), {"down": "column_gathered"})
    wanted, *others = found
    assert all(torch.equal(wanted, other) for other in others)


def test_ranks_that_share_an_accelerator_sample_in_train_mode_unless_layers_draw():
    device, plan = cpu(1)[0], {"up": "column", "down": "row"}
    torch.manual_seed(0)
    wanted, *others = sampled(Samples(0.0).double().to(device), [device] * 2, plan)
    assert all(torch.equal(wanted, other) for other in others)
    if torch.device(device).type != "cpu":
        with pytest.raises(RuntimeError, match="not all ranks can draw the same"):
            list(sampled(Samples(0.5).double().to(device), [device] * 2, plan))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_torchs_optimizers_in_all_their_forms(options):
    if "fused" in options and torch.device(cpu(1)[0]).type not in ("cpu", "cuda"):
        pytest.skip("torch has no fused optimizer for this device")
    alone = made()
    tp = cut(alone, 2)
    pairs = [(net, torch.optim.AdamW(net.parameters(), lr=1e-2, **options)) for net in (tp, alone)]
    for _ in range(3):
        for net, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    for name, each in tp.full_state_dict().items():
        assert torch.allclose(each, alone.state_dict()[name], rtol=0, atol=1e-9)


def test_no_rows():
    alone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(cpu(1)[0])
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {"0": "column", "2": "row"})
    x = torch.zeros(0, 4, device=cpu(1)[0], requires_grad=True)
    assert tp(x).shape == (0, 4)
    tp(x).sum().backward()
    assert all(not each.grad.any() for each in tp.parameters())
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"word": "vocab"}, "the plan has names that match nothing in Net: word"),
        ({"blocks.*": "replicate", "block.*.fc1": "column"}, r"match nothing in Net: block\.\*\.fc1"),
        ({"head": "columns"}, "'columns' for 'head', which is not understood: column, row"),
        ({"blocks.*.norm": "column"}, r"blocks\.0\.norm is a LayerNorm, and 'column' is for an nn\.Linear"),
        ({"head": "vocab"}, r"head is a Linear, and 'vocab' is for an nn\.Embedding"),
        (
            {"blocks.*.experts.down_proj": "vocab"},
            r"of shape \(2, 16, 10\), which cannot be cut by 'vocab'",
        ),
        ({"words": "vocab", "head": "row"}, r"the plan cuts words\.weight in two ways: it is head\.weight, too"),
        ({"scale": "row"}, r"scale is a Parameter of shape \(\), which cannot be cut by 'row'"),
    ],
)
def test_plans_that_cannot_be(plan, message):
    net = made()
    before = [each.clone() for each in net.parameters()]
    with pytest.raises(ValueError, match=message):
        TensorParallel(net, cpu(2), plan)
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
    net(here(TOKENS))


def test_more_ranks_than_features_or_heads_and_other_devices():
    with pytest.raises(ValueError, match="cannot be cut along dimension 0 for 3 ranks"):
        TensorParallel(nn.Sequential(nn.Linear(4, 2)), ["cpu"] * 3, {"0": "column_gathered"})
    with pytest.raises(ValueError, match=r"q_proj has 4 heads, which cannot be divided among 3 ranks"):
        TensorParallel(made().cpu(), ["cpu"] * 3, PLAN)
    with pytest.raises(ValueError, match=r"has no plan of its own: pass plan=, such as \{'0': 'column', '2': 'row'\}"):
        TensorParallel(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4)), ["cpu"] * 2)
    with pytest.raises(TypeError, match=r"net must be a torch\.nn\.Module"):
        TensorParallel(3, ["cpu"] * 2)


def test_moves_copies_and_pickles_are_refused():
    tp = cut(made(), 2)
    for move in (lambda: tp.to("meta"), tp.cpu, tp.cuda):
        with pytest.raises(RuntimeError, match="parts are on several devices"):
            move()
    with pytest.raises(TypeError, match=r"make another of a module, such as tp\.uncut\(\)"):
        copy.deepcopy(tp)
    with pytest.raises(TypeError, match=r"save tp\.full_state_dict\(\)"):
        pickle.dumps(tp)
    assert repr(tp) == f"TensorParallel(Net, device_ids=[{', '.join(cpu(2))}], 31 of 40 parameters cut)"


@pytest.mark.skipif(FREES_LATE, reason="a free-threaded build frees late")
def test_a_dropped_one_frees_its_memory_at_once():
    tp = cut(made(), 2)
    loss_of(tp).backward()
    memory = [weakref.ref(each.untyped_storage()) for each in tp.parameters()]
    gc.disable()
    try:
        del tp
        assert all(each() is None for each in memory)
    finally:
        gc.enable()


def test_layers_that_are_called_by_keyword_and_hooks_of_before():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.up, self.down = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, tokens):
            return self.down(input=torch.tanh(self.up(input=self.words(input=tokens))))

    alone = ByKeyword().double().to(cpu(1)[0])
    alone.up.register_forward_hook(lambda module, args, output: output * 2)
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {"words": "vocab", "up": "column", "down": "row"})
    tokens = torch.arange(9, device=cpu(1)[0])
    assert torch.allclose(tp(tokens), alone(tokens), rtol=0, atol=1e-12)


def embedding(padding_idx=None):
    return nn.Sequential(nn.Embedding(10, 3, padding_idx, dtype=torch.float64)).to(cpu(1)[0])


@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1])
def test_a_cut_embedding_is_the_plain_one(ranks, padding_idx):
    alone, tokens = embedding(padding_idx), here(torch.tensor([[0, 9, 4], [4, 5, 9]], dtype=torch.int32))
    tp = cut(alone, ranks, {"0": "vocab"})
    assert torch.equal(tp(tokens), alone(tokens))
    for each in (tp, alone):
        each(tokens).square().sum().backward()
    assert_same_grads(tp, alone, 0)


def test_second_derivatives():
    alone = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(cpu(1)[0])
    tp = cut(alone, 2, {"0": "column", "2": "row"})
    x = torch.rand(2, 2, dtype=torch.float64, device=cpu(1)[0], requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: tp(x) ** 2, x)


@pytest.mark.parametrize("token", [-1, 10, 11])
def test_a_token_outside_the_vocabulary(ranks, token):
    tp = cut(embedding(), ranks, {"0": "vocab"})
    with pytest.raises(IndexError):
        tp(here(torch.tensor([0, token])))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


MLP = {"*.up": "column", "*.down": "row"}


def test_a_module_under_two_names_is_cut_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.words = Mlp(), nn.Embedding(9, 8)
            self.second, self.others = self.first, self.words

        def forward(self, tokens):
            return self.second(self.first(self.words(tokens)) + self.others(tokens))

    alone = Twice().double().to(cpu(1)[0])
    plan = {"first.up": "column", "*.down": "row", "second.up": "column", "others": "vocab"}
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), plan)
    tokens = torch.arange(9, device=cpu(1)[0])
    assert torch.allclose(tp(tokens), alone(tokens), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"the plan says 'column' and 'column_gathered' of first\.up"):
        TensorParallel(alone, cpu(2), {**plan, "second.up": "column_gathered"})


class Rows:
    """An object of a user's that a forward reads."""

    def __init__(self, x):
        self.x = x


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, rows):
        return self.mlp(rows.x)


def test_an_object_that_the_user_writes_is_read_anew():
    alone = Reads().double().to(cpu(1)[0])
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), MLP)
    rows = Rows(None)
    for _ in range(3):
        rows.x = torch.rand(2, 8, dtype=torch.float64, device=cpu(1)[0])
        assert torch.allclose(tp(rows), alone(rows), rtol=0, atol=1e-12)
        rows.x.mul_(2)
        assert torch.allclose(tp(rows), alone(rows), rtol=0, atol=1e-12)
    rows.x = rows.x.clone().requires_grad_()
    with pytest.raises(TypeError, match="a Rows among the arguments holds a tensor that requires grad"):
        tp(rows)


def test_a_cache_that_the_user_changes_or_copies_is_refused():
    tp = TensorParallel(Cached().to(cpu(1)[0]), cpu(2), {"fc1": "column", "fc2": "row"})
    x = torch.rand(3, 4, device=cpu(1)[0])
    with torch.no_grad():
        _, cache = tp(x)
        _, cache = tp(x, cache=cache)
        with pytest.raises(TypeError, match="a Cache with contents that no call of this TensorParallel has given back"):
            tp(x, cache=copy.deepcopy(cache))
        cache.seen.pop()
        with pytest.raises(TypeError, match="a Cache that calls have written was changed between them"):
            tp(x, cache=cache)
        assert len(tp(x, cache=Cache())[1].seen) == 1


def test_torchs_encoder_layer_does_not_take_its_own_shortcut():
    alone = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).to(cpu(1)[0]).eval()
    tp = TensorParallel(copy.deepcopy(alone), cpu(2), {"linear1": "column", "linear2": "row"})
    x = torch.rand(2, 3, 8, device=cpu(1)[0])
    with torch.no_grad():
        assert torch.allclose(tp(x), alone(x), rtol=0, atol=1e-5)


def test_layers_that_cannot_be_cut_are_named():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4))
    with pytest.raises(ValueError, match="1 is a Doubled, of whose own forward 'row' parts cannot be summed"):
        TensorParallel(net, ["cpu"] * 2, {"0": "column", "1": "row"})
    with pytest.raises(ValueError, match=r"0\.weight is computed, by a parametrization or pruning"):
        TensorParallel(
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), ["cpu"] * 2, {"0": "column_gathered"}
        )
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match=f"0 is an embedding with {next(iter(option))}, which cannot be cut"):
            TensorParallel(nn.Sequential(nn.Embedding(4, 4, **option)), ["cpu"] * 2, {"0": "vocab"})
    net[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"0\.weight has a hook, which its parts would not have"):
        TensorParallel(net, ["cpu"] * 2, {"0": "column_gathered"})


def test_numbers_that_only_later_calls_draw_are_told_of():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x, draws=False):
            return self.mlp(x + torch.rand_like(x) if draws else x)

    tp = TensorParallel(Late().double(), ["cpu"] * 2, MLP)
    alone, x = tp.uncut(), torch.rand(2, 8, dtype=torch.float64, device="cpu")
    tp(x)
    with pytest.warns(UserWarning, match="random numbers were drawn while Late ran"):
        tp(x, draws=True)
    torch.manual_seed(0)
    found = tp(x, draws=True)
    torch.manual_seed(0)
    assert torch.allclose(found, alone(x, draws=True), rtol=0, atol=1e-12)


def test_buffers_are_in_the_state_and_follow_it():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(8), Mlp()).double().to(cpu(1)[0])

    tp, other, x = (
        *(TensorParallel(net(), cpu(2), MLP) for _ in range(2)),
        torch.rand(6, 8, device=cpu(1)[0]).double(),
    )
    for _ in range(3):
        tp(x)
    assert "weights.0.running_mean" in tp.state_dict()
    other.load_state_dict(tp.state_dict())
    tp.eval()
    other.eval()
    assert torch.equal(tp(x), other(x))
    assert torch.equal(
        other.each(lambda net: net[0].running_var.cpu())[1], tp.state_dict()["weights.0.running_var"].cpu()
    )
    assert torch.allclose(tp(x), tp.uncut()(x), rtol=0, atol=1e-12)
    assert tp.float().each(lambda net: net[0].running_mean.dtype) == [torch.float32] * 2


def test_changes_of_all_ranks_are_in_the_uncut_module_and_new_parameters_are_refused():
    tp, x = cut(made(), 2), here(TOKENS)
    tp(x)
    tp.each(lambda net: net.blocks[0].fc1.requires_grad_(False))
    tp.each(lambda net: setattr(net.blocks[1], "drop", nn.Dropout(0.5)))
    whole = tp.uncut()
    assert whole.blocks[1].drop.p == 0.5
    assert not whole.blocks[0].fc1.weight.requires_grad
    tp.eval()
    assert torch.allclose(whole.eval()(x)["logits"], tp(x)["logits"], rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="change the module before it is cut"):
        tp.each(lambda net: net.blocks.append(Block()))


@pytest.mark.parametrize("kind", [SGD, Lion])
@pytest.mark.filterwarnings("error:the memory of")  # which only the ranks' copies hold
def test_steps_of_several_calls_and_our_optimizers(kind):
    alone = made()
    tp = cut(alone, 2)

    def loss_fn(output, wanted):
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), wanted.flatten())

    ours = TrainStep(tp, loss_fn, kind(tp.parameters(), lr=1e-3), accumulate=2)
    plain = TrainStep(alone, loss_fn, kind(alone.parameters(), lr=1e-3), cpu(1), accumulate=2)
    for number in range(6):
        few = slice(number % 3, number % 3 + 3)
        pair = [step(here(TOKENS[few]), here(WANTED[few])) for step in (ours, plain)]
        assert torch.allclose(pair[0].cpu(), pair[1].cpu(), rtol=0, atol=1e-9)
    for name, each in tp.full_state_dict().items():
        if kind is SGD or not name.endswith("k_proj.bias"):  # whose gradient is rounding, and Lion takes its sign
            assert torch.allclose(each, alone.state_dict()[name], rtol=0, atol=1e-9)


def test_an_extra_state_is_kept():
    class Counts(Mlp):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    tp = TensorParallel(Counts(), ["cpu"] * 2, {"up": "column", "down": "row"})
    state = tp.full_state_dict()
    assert state["_extra_state"] == {"calls": 3}
    tp.load_full_state_dict(state)
    assert tp.uncut().state_dict()["_extra_state"] == {"calls": 3}

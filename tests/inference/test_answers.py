"""An answer depends on its own request alone: outputs that cannot be divided, and rows that see each other."""

import asyncio
import dataclasses
import re
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from mgpu_core import Predictor, Replicate, Rows, register_container
from mgpu_core.tools.mnist.model import SimpleNet
from mgpu_core.trees.comparison import difference

HOST = torch.device("cpu")


def numbers(*values):
    return torch.tensor(values, device=cpu(1)[0]).reshape(-1, 1)


class Net(nn.Module):
    """A module that is one function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, *others):
        return self.function(x, *others)


def answers_of(module, requests, **options):
    """Return the answers to requests that wait for each other, and the warnings that were given."""
    options = {"max_batch": 64, "max_wait_ms": 150, **options}
    with warnings.catch_warnings(record=True) as told, Predictor(module, cpu(1), **options) as predict:
        warnings.simplefilter("always")
        futures = [predict.submit(*(each if isinstance(each, tuple) else (each,))) for each in requests]
        found = [future.result(30) for future in futures]
    return found, [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor


class Cache:
    """An object with tensors, which its iterator gives."""

    def __init__(self, x):
        self.keys = x

    def __iter__(self):
        return iter([self.keys])


class Named(dict):
    """A dict with an attribute of all rows."""


def named(x):
    made = Named(y=x)
    made.users = [int(value) for value in x[:, 0]]
    return made


def packed(x):
    with torch.device("cpu"):
        return pack_sequence(list(x.cpu()))


def texts(x):
    return [f"user {int(value)}" for value in x[:, 0]]


UNDIVIDED = {
    "a list of texts": lambda x: {"y": x * 2, "label": texts(x)},
    "a text": lambda x: (x, " ".join(texts(x))),
    "a number": lambda x: (x, float(x.sum())),
    "a count": lambda x: (x, len(x)),
    "an array": lambda x: x.cpu().numpy() * 2,
    "a dataclass": lambda x: Boxes(x * 2),
    "a distribution": lambda x: torch.distributions.Normal(x, torch.ones_like(x)),
    "a cache": lambda x: (x, Cache(x)),
    "a set": lambda x: {int(value) for value in x[:, 0]},
    "an attribute": named,
    "a packed sequence": packed,
    "a sum": lambda x: x.sum(),
    "a statistic": lambda x: {"a": x, "b": [torch.cat([x.amax(0), x.amin(0), x.mean(0)])]},
}


def plain(answer):
    """Return the numbers and texts of an answer, for comparisons."""
    if isinstance(answer, torch.distributions.Normal):
        return plain(answer.loc)
    if isinstance(answer, Boxes | Cache):
        return plain(list(vars(answer).values()))
    if isinstance(answer, Named):
        return plain([*answer.items(), *vars(answer).items()])
    if isinstance(answer, torch.Tensor | np.ndarray):
        return answer.tolist()
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items()}
    return [plain(each) for each in answer] if isinstance(answer, list | tuple | set) else answer


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_outputs_that_are_no_rows_never_reach_another_caller(kind):
    function = UNDIVIDED[kind]
    requests = [numbers(float(index)) for index in range(1, 6)]
    found, told = answers_of(Net(function), requests)
    assert [plain(each) for each in found] == [plain(function(x)) for x in requests]
    (text,) = told
    assert "outputs" in text
    assert "split=" in text
    assert "register_container" in text or kind == "a packed sequence"
    assert "answered one at a time" in text


def test_the_path_of_what_cannot_be_divided_is_named():
    _, (text,) = answers_of(Net(UNDIVIDED["a list of texts"]), [numbers(1.0), numbers(2.0)])
    assert 'outputs of Net cannot be divided among requests: outputs["label"][0] is a str' in text.replace("'", '"')


Pair = namedtuple("Pair", "a b")
DIVIDED = {
    "a tensor": lambda x: x * 2,
    "a dict": lambda x: {"y": x * 2, "z": [x, None]},
    "a named tuple": lambda x: Pair(x, (x + 1,)),
    "rows": lambda x: (x, Rows(texts(x))),
    "none": lambda x: (x, None),
    "nothing": lambda x: (x, []),
    "values and indices": lambda x: x.max(1, keepdim=True),
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_outputs_with_rows_are_divided(kind):
    function, batches = DIVIDED[kind], []

    def counted(x):
        batches.append(len(x))
        return function(x)

    requests = [numbers(*range(index)) for index in (1, 2, 3)]
    found, told = answers_of(Net(counted), requests)
    assert [plain(each) for each in found] == [plain(function(x)) for x in requests]
    assert told == []
    assert batches[0] == 6


def test_a_registered_container_is_divided():
    class Mine:
        def __init__(self, value, note):
            self.value, self.note = value, note

    register_container(Mine, lambda mine: ([mine.value], mine.note), lambda values, note: Mine(*values, note))
    requests = [numbers(1.0), numbers(2.0)]
    found, told = answers_of(Net(lambda x: Mine(x, "same")), requests)
    assert [each.value.tolist() for each in found] == [[[1.0]], [[2.0]]]
    assert told == []


def test_a_split_function_gets_outputs_of_any_kind():
    requests = [numbers(1.0), numbers(2.0), numbers(3.0)]
    found, told = answers_of(Net(texts), requests, split=lambda outputs, calls: outputs)
    assert found == ["user 1", "user 2", "user 3"]
    assert told == []


def test_a_form_is_not_joined_again():
    batches = []

    def labels(x):
        batches.append(len(x))
        return texts(x)

    with warnings.catch_warnings(record=True) as told, Predictor(Net(labels), cpu(1), max_batch=8) as predict:
        for _ in range(2):
            futures = [predict.submit(numbers(float(index))) for index in range(4)]
            assert [future.result(20) for future in futures] == [[f"user {index}"] for index in range(4)]
        assert predict(numbers(*map(float, range(20)))) == [f"user {index}" for index in range(20)]
        stats = predict.stats()
    assert len(told) == 1
    assert batches == [4, *[1] * 8, 20]
    assert sum(each.retries for each in stats) == 4


@pytest.mark.parametrize("rows", [4, 8, 16, 20])
def test_a_call_with_such_outputs_is_not_cut(rows):
    x = numbers(*map(float, range(rows)))
    with warnings.catch_warnings(), Predictor(Net(UNDIVIDED["a list of texts"]), cpu(2), max_batch=8) as predict:
        warnings.simplefilter("ignore")
        answer = predict(x)
    assert answer["label"] == texts(x)
    assert torch.equal(answer["y"], x * 2)


def test_equal_texts_of_the_parts_of_a_call_are_not_taken_for_one():
    x = torch.ones(20, 1, device=cpu(1)[0])
    with warnings.catch_warnings(), Predictor(Net(texts), cpu(2), max_batch=8) as predict:
        warnings.simplefilter("ignore")
        assert predict(x) == ["user 1"] * 20


@pytest.mark.parametrize("entries", [list(range(20)), np.arange(20)])
def test_a_list_with_an_entry_per_row_of_a_call_that_is_cut_is_told_of(entries):
    path = f"kwargs['entries_of_{type(entries).__name__}']"
    told = pytest.warns(UserWarning, match=f"{re.escape(path)} is a .* with 20 entries, as many as there are rows")
    with told, Predictor(Keyed(), cpu(2), max_batch=8) as predict:
        predict(torch.ones(20, 1, device=cpu(1)[0]), **{f"entries_of_{type(entries).__name__}": entries})


class Keyed(nn.Module):
    def forward(self, x, **others):
        return x


def by_length(x):
    longest = int((x != 0).sum(1).max())
    made = torch.zeros_like(x)
    made[:, :longest] = x[:, :longest] + 1
    return made


def with_capacity(x):
    expert = (x[:, 0] > 0).long()
    place = torch.stack([(expert[: row + 1] == expert[row]).sum() for row in range(len(expert))])
    return x * (place <= 4)[:, None]


def some_ones():
    return (torch.arange(8) <= torch.randint(8, ())).float()[None]


COUPLED = {
    "sorted": (lambda x: x[x[:, 0].argsort()], lambda: torch.randn(1, 4)),
    "softmax over rows": (lambda x: x.softmax(0), lambda: torch.randn(1, 4)),
    "mask of the longest row": (by_length, some_ones),
    "capacity": (with_capacity, lambda: torch.randn(1, 4)),
    "centred": (lambda x: x - x.mean(0), lambda: torch.randn(1, 4)),
    "cut to the longest": (lambda x: x[:, : int((x != 0).sum(1).max())], some_ones),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_rows_that_see_each_other_are_found_and_answered_alone(kind):
    function, row = COUPLED[kind]
    found = 0
    for seed in range(10):
        torch.manual_seed(seed)
        requests = [row().to(cpu(1)[0]) for _ in range(16)]
        answers, told = answers_of(Net(function), requests, max_batch=16)
        expected = [function(x) for x in requests]
        right = all(torch.equal(answer, each) for answer, each in zip(answers, expected, strict=True))
        assert len(told) <= 1
        assert not told or (right and "Net gives a request other outputs in a batch than alone" in told[0])
        found += right
    assert found >= 9


def test_random_outputs_are_not_judged():
    requests = [torch.ones(1, 64, device=cpu(1)[0])] * 8
    found, told = answers_of(Net(lambda x: nn.functional.dropout(x, 0.5, True)), requests)
    assert all(set(each.flatten().tolist()) == {0, 2} for each in found)
    assert told == []


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def test_a_module_that_counts_its_calls_is_not_judged_and_told_of():
    with warnings.catch_warnings(record=True) as told, Predictor(Counting(), cpu(1), max_wait_ms=150) as predict:
        for future in [predict.submit(numbers(1.0)), predict.submit(numbers(2.0))]:
            future.result(20)
    (text,) = [str(each.message) for each in told]
    assert text.startswith("the forward of Counting assigns calls: each device's copy keeps its own value")


def test_a_module_that_writes_its_inputs_is_compared_with_copies():
    requests = [numbers(float(index)) for index in range(4)]
    found, told = answers_of(Net(lambda x: x.mul_(2)), requests)
    assert [float(each) for each in found] == [0, 2, 4, 6]
    assert [float(each) for each in requests] == [0, 1, 2, 3]
    assert told == []


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "make", [SimpleNet, lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Linear(256, 9))]
)
def test_no_false_alarm(make, half):
    torch.manual_seed(0)
    options = {"amp_dtype": torch.bfloat16} if half else {}
    requests = [torch.randn(1, 1, 28, 28, device=cpu(1)[0]) for _ in range(32)]
    _, told = answers_of(make(), requests, max_batch=16, **options)
    assert told == []


def test_sixteen_requests_of_a_form_are_compared():
    calls = []
    with Predictor(Net(lambda x: calls.append(len(x)) or x), cpu(1), max_batch=4, max_wait_ms=100) as predict:
        for _ in range(6):
            for future in [predict.submit(numbers(1.0)) for _ in range(4)]:
                future.result(20)
        assert calls.count(1) == 16
        for future in [predict.submit(numbers(1.0).double()) for _ in range(4)]:  # another form
            future.result(20)
    assert calls.count(1) == 20


def test_containers_of_an_answer_are_its_own():
    requests = [numbers(float(index)) for index in range(4)]
    found, told = answers_of(Net(lambda x: {"y": x, "extras": [], "cache": {}}), requests)
    found[0]["extras"].append("mine")
    assert told == []
    assert [each["extras"] for each in found] == [["mine"], [], [], []]
    assert found[2]["cache"] is not found[3]["cache"]


def test_with_collate_nothing_is_compared():
    calls = []

    def collate(requests):
        return (torch.cat([args[0] for args, _ in requests]),), {}

    _, told = answers_of(Net(lambda x: calls.append(len(x)) or x), [numbers(1.0)] * 4, collate=collate)
    assert calls == [4]
    assert told == []


def test_how_answers_differ():
    one = torch.tensor([1.0, torch.nan, torch.inf])
    assert difference(one, one.clone(), half=False) is None
    assert difference({"y": torch.ones(2)}, {"y": torch.ones(2) + 5e-5}, half=False) is None
    assert difference([torch.ones(2)], [torch.ones(2) + 2e-4], half=False).startswith("outputs[0] differs by 0.0002")
    assert difference(torch.ones(2), torch.ones(2) + 2e-2, half=True) is None
    assert "shape (1, 3), not (1, 2)" in difference(torch.ones(1, 3), torch.ones(1, 2), half=False)
    assert "differs" in difference(one, torch.zeros(3), half=False)
    assert difference(Rows(["a"]), Rows(["b"]), half=False).endswith("is another object")
    assert difference([1], (1,), half=False) is not None
    assert difference(torch.ones(0), torch.ones(0), half=False) is None
    assert difference(torch.tensor([True]), torch.tensor([False]), half=False) is not None
    assert difference(torch.tensor([1j]), torch.tensor([1j]), half=False) is None


# --- Requests are cut as scatter cuts them


def test_rows_go_with_their_rows():
    x = numbers(*map(float, range(20)))

    def tagged(x, names):
        return Rows(f"{name}: {int(value)}" for name, value in zip(names, x[:, 0], strict=True))

    names = [f"user {index}" for index in range(20)]
    with Predictor(Net(tagged), cpu(2), max_batch=8, max_wait_ms=100) as predict:
        assert predict(x, Rows(names)) == [f"user {index}: {index}" for index in range(20)]
        futures = [predict.submit(x[index : index + 1], Rows([names[index]])) for index in range(4)]
        assert [future.result(20) for future in futures] == [[f"user {index}: {index}"] for index in range(4)]
    assert sum(each.batches for each in predict.stats()) <= 5


def test_replicate_is_given_to_all_rows_and_joined_by_identity():
    table, batches = torch.tensor([[10.0], [20.0], [30.0]], device=cpu(1)[0]), []

    def looked_up(x, table):
        batches.append((len(x), len(table)))
        return x + table.sum(0)

    with Predictor(Net(looked_up), cpu(2), max_batch=8, max_wait_ms=100) as predict:
        assert torch.equal(predict(numbers(*map(float, range(20))), Replicate(table)), numbers(*range(60, 80)).float())
        assert all(rows == 3 for _, rows in batches)
        batches.clear()
        futures = [predict.submit(numbers(float(index)), Replicate(table)) for index in range(3)]
        futures.append(predict.submit(numbers(3.0), Replicate(table.clone())))
        assert [float(future.result(20)) for future in futures] == [60, 61, 62, 63]
    assert sorted(batch for batch, _ in batches if batch > 1) == [3]


def test_a_tensor_without_dimensions_belongs_to_every_row():
    scale = torch.tensor(3.0, device=cpu(1)[0])
    with Predictor(Net(lambda x, scale: x * scale), cpu(2), max_batch=4, max_wait_ms=100) as predict:
        assert predict(numbers(*map(float, range(9))), scale).flatten().tolist() == [3.0 * index for index in range(9)]
        futures = [predict.submit(numbers(float(index)), scale) for index in range(2)]
        assert [float(future.result(20)) for future in futures] == [0, 3]


def test_rows_alone_are_a_request():
    with Predictor(Net(lambda names: Rows(map(str.upper, names))), cpu(1), max_wait_ms=100) as predict:
        futures = [predict.submit(Rows([name])) for name in "ab"]
        assert [future.result(20) for future in futures] == [["A"], ["B"]]


# --- Workers have the settings of the thread that makes the predictor


def test_gradients_by_the_inputs_can_be_taken():
    def force(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x**2).sum(), x)[0]

    found, told = answers_of(Net(force), [numbers(1.0), numbers(2.0)])
    assert [float(each) for each in found] == [2, 4]
    assert told == []
    assert not found[0].is_inference()


def test_workers_have_the_default_device_and_the_context_of_the_maker():
    variable = ContextVar("variable", default=0)
    variable.set(7)
    with (
        torch.device("meta"),
        Predictor(Net(lambda x: (torch.empty(1).device.type, variable.get())), cpu(1)) as predict,
    ):
        assert predict(torch.ones(1, 1, device=cpu(1)[0])) == ("meta", 7)


@pytest.mark.parametrize("call", ["submit", "asubmit"])
def test_stop_iteration_ends_no_coroutine(call):
    def stop(x):
        raise StopIteration

    async def asked(predict):
        return await asyncio.wait_for(predict.asubmit(numbers(1.0)), 20)

    calls = {"submit": lambda: predict.submit(numbers(1.0)).result(20), "asubmit": lambda: asyncio.run(asked(predict))}
    with Predictor(Net(stop), cpu(1)) as predict, pytest.raises(RuntimeError, match="raised StopIteration"):
        calls[call]()


# --- Many callers


@pytest.mark.slow
def test_2000_requests_of_ten_kinds_of_outputs_from_16_threads():
    kinds = [*list(UNDIVIDED.values())[:8], DIVIDED["rows"], DIVIDED["a named tuple"]]

    def any_kind(x, kind):
        return kinds[kind](x)

    wrong, lock = [], threading.Lock()

    def caller(predict, thread):
        for index in range(125):
            kind, x = (thread + index) % len(kinds), numbers(float(1000 * thread + index))
            if plain(predict.submit(x, kind).result(60)) != plain(kinds[kind](x)):
                with lock:
                    wrong.append((thread, index, kind))

    with warnings.catch_warnings(), Predictor(Net(any_kind), cpu(2), max_batch=16) as predict:
        warnings.simplefilter("ignore")
        with ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(caller, predict, thread) for thread in range(16)]:
                future.result(120)
        stats = predict.stats()
    assert wrong == []
    assert sum(each.requests for each in stats) == 2000


# --- Sizes that depend on values


def tokens(*rows):
    return [torch.tensor([row], device=cpu(1)[0]) for row in rows]


class Tagger(nn.Module):
    """An LSTM over packed sequences: its outputs are as long as the longest text of the batch."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 2, batch_first=True)

    def forward(self, x):
        lengths = (x != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None].float(), lengths, True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True)[0]


def kinds_of_tokens(x):
    """One column for each kind of token."""
    return (x[..., None] == x.unique()).sum(1)


OF_VALUES = {
    "pad_packed_sequence": Tagger(),
    "unique": Net(kinds_of_tokens),
    "bincount": Net(lambda x: x + torch.zeros(len(x), x.sum(1).bincount().numel() - 1, device=x.device)[:, :1]),
    "nonzero": Net(lambda x: x[:, : int(x.sum(0).nonzero().amax()) + 1]),
    "item": Net(lambda x: x[:, : int((x != 0).sum(1).max())]),
}


@pytest.mark.parametrize("kind", OF_VALUES)
def test_sizes_that_depend_on_values_are_answered_alone_also_after_many_alike(kind):
    net = OF_VALUES[kind].to(cpu(1)[0])
    alike = tokens(*[[1, 2, 3, 0]] * 16)
    others = tokens([3, 1, 2, 1], [1, 0, 0, 0], [2, 3, 0, 0], [1, 1, 0, 0])
    wanted = [net(x) for x in (*alike, *others)]
    with warnings.catch_warnings(record=True) as told, Predictor(net, cpu(1), max_batch=4, max_wait_ms=100) as predict:
        warnings.simplefilter("always")
        found = []
        for begin in range(0, 20, 4):
            futures = [predict.submit(x) for x in (*alike, *others)[begin : begin + 4]]
            found += [future.result(20) for future in futures]
    assert all(one.shape == other.shape for one, other in zip(found, wanted, strict=True))
    assert all(torch.allclose(*each, atol=1e-6) for each in zip(found, wanted, strict=True))
    (text,) = [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]
    assert (
        "depends on the values of all rows" in text or "have shapes [(3,)] in one batch and [(4,)] in another" in text
    )
    assert "split=" in text


OF_ROWS = {
    "chosen by numbers": lambda x: x[:, torch.tensor([0, 2, 0], device=x.device)],
    "chosen by where": lambda x: torch.where(x > 1, x, 0) + x.masked_fill(x == 2, 5),
    "repeated, in a size that is given": lambda x: x.repeat_interleave(
        torch.tensor([1, 2, 1, 1], device=x.device), 1, output_size=5
    ),
    "a number that is read": lambda x: x * (2 if bool((x >= 0).all()) else 3),
}


@pytest.mark.parametrize("kind", OF_ROWS)
def test_sizes_of_rows_are_joined(kind):
    requests = tokens([1, 2, 3, 0], [3, 1, 2, 1], [1, 0, 0, 0])
    with Predictor(Net(OF_ROWS[kind]), cpu(1), max_wait_ms=150) as predict, warnings.catch_warnings():
        warnings.simplefilter("error")
        futures = [predict.submit(x) for x in requests]
        assert [each.result(20).tolist() for each in futures] == [OF_ROWS[kind](x).tolist() for x in requests]
        assert sum(each.batches for each in predict.stats()) == 1


def test_some_later_requests_are_compared():
    calls = []
    with Predictor(Net(lambda x: calls.append(len(x)) or x), cpu(1), max_batch=2, max_wait_ms=1000) as predict:
        for _ in range(70):
            for future in [predict.submit(numbers(1.0)) for _ in range(2)]:
                future.result(20)
    assert calls.count(2) == 70
    assert [calls[: index + 1].count(2) for index, rows in enumerate(calls) if rows == 1][16:] == [16, 32, 64]


def test_a_text_of_the_arguments_is_given_to_each_request():
    """As SentenceTransformer returns the dict that it was given, with more in it."""
    requests = [{"x": numbers(float(index)), "modality": "text"} for index in range(3)]
    found, told = answers_of(Net(lambda given: {**given, "y": given["x"] * 2}), requests)
    assert [(float(each["y"]), each["modality"]) for each in found] == [(0, "text"), (2, "text"), (4, "text")]
    assert told == []


class Texts(nn.Module):
    """Row [n] gives n tokens, then padding, as generate of transformers does."""

    def generate(self, ids):
        steps = torch.arange(1, int(ids.max()) + 1, device=ids.device)
        return torch.where(steps <= ids[:, :1], steps, 0)

    encode = generate


def cut_padding(outputs, calls):
    return [row[row != 0][None] for row in outputs]


@pytest.mark.parametrize("method", ["generate", "encode"])
@pytest.mark.parametrize("split", [None, cut_padding])
def test_other_methods_are_joined_only_where_split_says_how(method, split):
    lengths = [3] * 20 + [1, 2, 3, 6]
    options = {"method": method, "split": split, "max_batch": 4, "max_wait_ms": 100}
    with warnings.catch_warnings(), Predictor(Texts(), cpu(1), **options) as predict:
        warnings.simplefilter("error")
        futures = [predict.submit(torch.tensor([[length]], device=cpu(1)[0])) for length in lengths]
        found = [future.result(20).tolist() for future in futures]
        batches = sum(each.batches for each in predict.stats())
    assert found == [[list(range(1, length + 1))] for length in lengths]
    assert batches == (24 if split is None else 6)

"""Which requests are joined, how a batch is made of them, and who gets which part of its outputs."""

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import pad

from mgpu_core import Predictor
from mgpu_core.inference.answers import Answers
from mgpu_core.inference.requests import Joiner

PLAIN = Joiner(None, None)
ANSWERS = Answers("Net", None, compares=True)
HOST = torch.device("cpu")


def request(*args, joiner=PLAIN, **kwargs):
    return joiner.request((args, kwargs))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((torch.ones(1, 3),), {}), ((torch.ones(5, 3),), {})),
        (((torch.ones(1), 2), {"mode": "a"}), ((torch.zeros(2), 2), {"mode": "a"})),
        ((([torch.ones(1), None],), {}), (([torch.ones(3), None],), {})),
        (((), {"x": torch.ones(1)}), ((), {"x": torch.ones(1)})),
    ],
)
def test_equal_keys(one, other):
    assert PLAIN.request(one).key == PLAIN.request(other).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((torch.ones(1, 3),), {}), ((torch.ones(1, 4),), {})),
        (((torch.ones(1, 3),), {}), ((torch.ones(1, 3).double(),), {})),
        (((torch.ones(1, 3),), {}), ((), {"x": torch.ones(1, 3)})),
        (((torch.ones(1, 3),), {}), (([torch.ones(1, 3)],), {})),
        (((torch.ones(1), 1), {}), ((torch.ones(1), True), {})),
        (((torch.ones(1), 1), {}), ((torch.ones(1), 2), {})),
        (((torch.ones(1), {1}), {}), ((torch.ones(1), {1}), {})),
    ],
)
def test_unequal_keys(one, other):
    assert PLAIN.request(one).key != PLAIN.request(other).key


class Options:
    """Equal by their contents, which may change."""

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return hash(self.value)

    def __eq__(self, other):
        return self.value == other.value


def test_a_key_stays_while_its_options_change():
    options = Options(1)
    one = request(torch.ones(1), options)
    key = hash(one.key)
    options.value = 2
    assert hash(one.key) == key
    assert one.key == request(torch.ones(1), options).key
    assert one.key != request(torch.ones(1), Options(2)).key


def test_methods_and_texts_are_joined_by_their_values():
    class Text(str):
        """With attributes."""

    one, other = (request(torch.ones(1), PLAIN.request, Text("a")) for _ in range(2))
    assert one.key == other.key
    assert one.key != request(torch.ones(1), Joiner(None, None).request, Text("a")).key


def test_nests_are_joined_and_split():
    requests = [request([torch.full((n, 2), float(n)), "same"], mask=torch.full((n,), n)) for n in (1, 3)]
    (nest,), kwargs = PLAIN.joined(requests, HOST)
    assert nest[0].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert nest[1] == "same"
    assert kwargs["mask"].tolist() == [1, 3, 3, 3]
    one, other = ANSWERS.split({"y": nest[0] + 1, "note": None}, requests)
    assert one["y"].tolist() == [[2, 2]]
    assert other["y"].tolist() == [[4, 4]] * 3
    assert one["note"] is other["note"] is None


def test_chunks_are_nearly_equal():
    calls = request(torch.arange(7), 5).chunks(3)
    assert [call[0][0].tolist() for call in calls] == [[0, 1, 2], [3, 4], [5, 6]]
    assert all(call[0][1] == 5 for call in calls)


def lengths(x):
    return -(-x.size(1) // 4)


def padded(calls):
    longest = max(args[0].size(1) for args, _ in calls)
    return (torch.cat([pad(args[0], (0, longest - args[0].size(1))) for args, _ in calls]),), {}


def cut(outputs, calls):
    rows = outputs.split([len(args[0]) for args, _ in calls])
    return [each[:, : args[0].size(1)] for each, (args, _) in zip(rows, calls, strict=True)]


class Counting(nn.Module):
    """Adds one, and notes the shapes of its batches."""

    shapes: list = []  # noqa: RUF012 (of all copies)

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return x + 1


def test_lengths_are_padded_in_buckets():
    Counting.shapes.clear()
    xs = [torch.full((1, length), float(length), device=cpu(1)[0]) for length in (1, 2, 4, 5, 7)]
    hooks = {"bucket_by": lengths, "collate": padded, "split": cut}
    with Predictor(Counting(), cpu(1), max_wait_ms=200, **hooks) as predict:
        answers = [future.result(20) for future in [predict.submit(x) for x in xs]]
    assert [answer.tolist() for answer in answers] == [(x + 1).tolist() for x in xs]
    assert sorted(Counting.shapes) == [(2, 7), (3, 4)]


def test_without_collate_a_bucket_holds_one_shape():
    Counting.shapes.clear()
    xs = [torch.ones(1, length, device=cpu(1)[0]) for length in (1, 2, 2)]
    with Predictor(Counting(), cpu(1), max_wait_ms=200, bucket_by=lambda x: "one") as predict:
        assert [f.result(20).size(1) for f in [predict.submit(x) for x in xs]] == [1, 2, 2]
    assert sorted(Counting.shapes) == [(1, 1), (1, 2), (1, 2), (2, 2)]  # two of them alone, to compare


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        ({"collate": lambda calls: 1 / 0}, ZeroDivisionError, "division"),
        ({"split": lambda outputs, calls: []}, ValueError, "split returned 0 answers for 1 requests"),
        ({"split": lambda outputs, calls: {}["lost"]}, KeyError, "lost"),
    ],
)
def test_hooks_that_fail_fail_the_request_and_the_predictor_goes_on(hooks, error, message):
    with Predictor(nn.Identity(), cpu(1), **hooks) as predict:
        for _ in range(2):
            with pytest.raises(error, match=message):
                predict.submit(torch.ones(1, device=cpu(1)[0])).result(20)


def test_a_bucket_function_that_fails_fails_the_submit():
    with Predictor(nn.Identity(), cpu(1), bucket_by=lambda x: x.missing) as predict, pytest.raises(AttributeError):
        predict.submit(torch.ones(1))

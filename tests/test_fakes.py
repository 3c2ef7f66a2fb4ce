"""Which tests run again on which fake accelerator, and which are left out there."""

from pathlib import Path

import pytest
from fakes.on_the_fake import LISTS, fake_of

TESTS = Path(__file__).parent


def files_of(tests):
    paths = [TESTS / each for each in tests]
    return {file for path in paths for file in ([path] if path.suffix else path.rglob("test_*.py"))}


def test_every_test_runs_on_one_fake():
    once = [file for name, tests in LISTS.items() if name != "tpu" for file in files_of(tests)]
    more = files_of(LISTS["tpu"])  # those that run again by the rules of a TPU
    assert [path for path in (*once, *more) if not path.exists()] == []
    assert len(once) == len(set(once))
    assert set((TESTS / "accelerator").glob("test_*.py")) <= {*once, *more}


@pytest.mark.parametrize(
    ("test", "fake"),
    [
        ("accelerator/test_streams.py", "1"),
        ("accelerator/test_one_per_process.py", "tpu"),
        ("inference/test_predictor.py", "1"),
        ("data_parallel/test_call.py", "cuda"),
        ("data_parallel", "cuda"),
    ],
)
def test_the_fake_of_a_test(test, fake):
    assert fake_of(test) == fake


def test_a_test_that_runs_on_neither():
    with pytest.raises(ValueError, match="docs runs on neither fake"):
        fake_of("docs")

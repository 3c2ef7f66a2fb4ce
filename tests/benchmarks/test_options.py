"""What the command line understands, and how it says no."""

import argparse

import pytest

from mgpu_core.tools.bench.options import (
    OneLineParser,
    names_among,
    parse_count,
    parse_counts,
    parse_nbytes,
    parse_sizes,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512", 512), ("1K", 1024), (" 64M ", 64 << 20), ("3G", 3 << 30)], ids=lambda value: str(value)
)
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64M", [64 << 20]),
        ("1K:8K", [1024, 2048, 4096, 8192]),
        ("1K:7K", [1024, 2048, 4096]),
        ("1K:1K", [1024]),
        ("3,1K:2K,512", [3, 1024, 2048, 512]),
    ],
)
def test_a_range_doubles(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "4Q", "4k", "8K:4K", "1K:", ":4K", "1K,,2K", "9" * 99])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_sizes(text)


def test_counts() -> None:
    assert parse_counts("2, 4,8") == [2, 4, 8]
    assert parse_count("7") == 7


@pytest.mark.parametrize("text", ["", "0", "2,", "-3", "two", "1e9"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_counts(text)


def test_one_count_is_not_two() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="more than one"):
        parse_count("1,2")


def test_names_are_known_and_distinct() -> None:
    parse = names_among(("gloo", "torch"))
    assert parse("torch, gloo,torch") == ["torch", "gloo"]
    with pytest.raises(argparse.ArgumentTypeError, match="'nccl' is not one of gloo, torch"):
        parse("gloo,nccl")


def test_an_error_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="x")
    parser.add_argument("--sizes", type=parse_sizes)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--sizes", "4Q"])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("x: error: argument --sizes: '4Q' is not a size")
    assert message.count("\n") == 1

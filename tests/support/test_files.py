"""A file is written whole or stays as it was, and what cannot be written is known beforehand."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from mgpu_core.support.files import check_outputs, check_writable, write_whole


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        write_whole(path, lambda stream, content=content: stream.write(content))
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_failure_in_the_middle_keeps_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half(stream: BinaryIO) -> None:
        stream.write(b"ne")
        raise failure

    with pytest.raises(failure):
        write_whole(path, half)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """Also where a library makes something else of it, as torch.save does."""
    path = tmp_path / "file"

    def fails(stream: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def disguised(stream: BinaryIO) -> None:
        try:
            fails(stream)
        finally:
            raise RuntimeError("unexpected position")

    for write in (fails, disguised):
        with pytest.raises(OSError, match=r"No space left on device: '.*file'") as refused:
            write_whole(path, write)
        assert refused.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="of its own"):
        write_whole(path, lambda stream: (_ for _ in ()).throw(RuntimeError("of its own")))
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "file")
    write_whole(link, lambda stream: stream.write(b"x"))
    assert link.is_symlink()
    assert (tmp_path / "far" / "file").read_bytes() == b"x"


def test_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_check_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "missing" / "file", tmp_path / "file" / "file", Path(os.devnull)):
        with pytest.raises(OSError, match=str(path)):
            check_writable(path)
    # As root every file is writable, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="read-only"):
        check_writable(tmp_path / "file")


def test_two_names_of_one_file_are_refused(tmp_path: Path) -> None:
    one, other, link = tmp_path / "one", tmp_path / "other", tmp_path / "link"
    link.symlink_to(one)
    check_outputs([one, other], [tmp_path / "input"])
    for outputs, inputs in (([one, one], []), ([one, link], []), ([one, other], [link])):
        with pytest.raises(ValueError, match="two of these are the same file"):
            check_outputs(outputs, inputs)
    with pytest.raises(OSError, match="cannot write into its folder"):
        check_outputs([one, tmp_path / "missing" / "file"])
    assert os.listdir(tmp_path) == ["link"]

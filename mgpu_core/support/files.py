"""Files that are there whole or not at all.

Everything is written into a temporary file in the folder of the target and moved over it in one step
(`os.replace`), so that neither Ctrl-C, a full disk nor a crash leaves half a file or loses the one before. Whether
that will work is tried before a training starts, not found out after it.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO


def check_writable(path: Path) -> None:
    """Raise `OSError`, with `path` in its text, if `write_whole(path, ...)` could not work. Leave no file."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path}: wanted the name of a file, this is something else")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: the file is read-only")
    try:
        with _temporary_beside(path.resolve()):
            pass
    except OSError as error:
        raise OSError(f"{path}: cannot write into its folder ({error.strerror})") from error


def check_outputs(paths: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raise unless each can be written, and none is the file of another output, or of an input.

    Raises:
        OSError: see `check_writable`.
        ValueError: two names of one file.
    """
    for path in paths:
        check_writable(path)
    named = [*inputs, *paths]
    if len({path.resolve() for path in named}) < len(named):
        raise ValueError(f"two of these are the same file: {', '.join(map(str, named))}")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with an open binary file, then makes that file `path`; if it raises, `path` stays as it was.

    A full disk is an `OSError` that names `path`, also where `torch.save` raises another error for it.
    """
    try:
        _write_whole(path, write)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def check_picture(path: Path) -> None:
    """Raise `ValueError` unless the name ends in `.png`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path}: wanted a name that ends in .png")


def _write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    # Through a symbolic link, the file it points to is replaced, not the link.
    target = path.resolve()
    with _temporary_beside(target) as (stream, temporary):
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
        temporary.replace(target)


@contextlib.contextmanager
def _temporary_beside(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    temporary = target.parent / f".mgpu-{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as stream:
            yield stream, temporary
    finally:
        temporary.unlink(missing_ok=True)

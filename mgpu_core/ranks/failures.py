"""Raise the ranks' exceptions as one: that of the first rank, with the others' as notes."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb
from types import TracebackType

from torch._utils import ExceptionWrapper

from mgpu_core.errors import Error
from mgpu_core.support.warnings import is_ours, is_users

__all__ = ["RankExited", "raise_failures"]


class RankExited(Error):
    """A rank cannot go on, because another one has ended.  If that one has failed, its failure is reported."""


_OF_COPIES = (
    "the parameters of a replica are copies in the graph of this forward, not leaves: delete a parameter before "
    "another tensor takes its name, and make optimizers and hooks for the module outside of its forward; or use "
    "TrainStep, whose ranks have parameters that are leaves"
)
_CURES = {
    "Cannot assign non-leaf Tensor to parameter": _OF_COPIES,
    "can't optimize a non-leaf Tensor": _OF_COPIES,
    "post accumulate grad hooks cannot be registered on non-leaf": _OF_COPIES,
    "Expected more than 1 value per channel when training, got input size": (
        "this rank has one row, of which batch norm has no variance: give each rank two rows or more, or let the ranks "
        "share statistics: mgpu_core.convert_sync_batchnorm(net)"
    ),
}  # by a part of the message


def raise_failures(failures: list[BaseException | None], names: Sequence[str]) -> None:
    """Raise unless all ranks ended well; the list is empty afterwards.

    Args:
        failures: in rank order; ``None`` of a rank that ended well.
        names: of the ranks and their devices, for the message: ``replica 1 on device cuda:1``.

    Raises:
        Exception: as :func:`mgpu_core.parallel_apply` words it.
    """
    errors = {rank: error for rank, error in enumerate(failures) if error is not None}
    if not errors:
        return
    if not all(isinstance(error, RankExited) for error in errors.values()):  # they are a consequence
        errors = {rank: error for rank, error in errors.items() if not isinstance(error, RankExited)}
    # A traceback holds the frames, and a frame that holds the exception holds everything that the forward made, until
    # the garbage collector comes: who tries again with a smaller batch needs the memory at once.
    failures.clear()
    try:
        _raise_first(errors, names)
    finally:
        del errors


def _raise_first(errors: dict[int, BaseException], names: Sequence[str]) -> None:
    for original in errors.values():
        if not isinstance(original, Exception):
            errors.clear()
            try:
                raise original  # KeyboardInterrupt and SystemExit mean the program, not the rank
            finally:
                del original
    rank, original = next(iter(errors.items()))
    error = _with_origin(names[rank], original)
    for cure in dict.fromkeys(cure for text, cure in _CURES.items() if text in str(original)):
        error.add_note(cure)
    for other in list(errors)[1:]:
        error.add_note(f"also in {names[other]}: {_described(errors[other])}")
    errors.clear()
    original.__traceback__ = None  # the message has it; printed twice, it would hide the user's own line
    try:
        raise error from (None if error is original else original)
    finally:
        del error, original


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # a user's class may fail in it, and that must not be all that anybody hears
        return f"{type(error).__name__}, which has no repr()"


def _from_users_frame(whole: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's own code on; all of it where there is none."""
    here = whole
    while here is not None and not is_users(here.tb_frame.f_code.co_filename):
        here = here.tb_next
    return here or whole


def _is_refusal(whole: TracebackType | None) -> bool:
    """Return whether we have raised it ourselves, below no code of the user's: the message says all."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(whole)]
    return bool(files) and is_ours(files[-1]) and not any(map(is_users, files))


def _with_origin(name: str, original: BaseException) -> BaseException:
    """Return the exception as torch words it: same type, ``Caught ... in replica``, the original traceback.

    One of our own keeps its message, and names the rank after it: a traceback of our files would hide it.
    """
    where = f"in {name}"
    if _is_refusal(original.__traceback__):
        original.args = (f"{original} ({where})",)
        return original.with_traceback(None)
    wrapper = ExceptionWrapper((type(original), original, _from_users_frame(original.__traceback__)), where=where)
    try:
        wrapper.reraise()
    except Exception as error:
        if isinstance(error, RuntimeError) or type(error) is type(original):
            return error.with_traceback(None)
    # The constructor did not take what torch gave it, and said so: that would be all that anybody hears.
    return RuntimeError(f"Caught {type(original).__name__} {where}.\nOriginal {wrapper.exc_msg}")

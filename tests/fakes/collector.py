"""Keep the garbage collector out of a test: what is freed is freed by reference counts.

On a free-threaded build an object is freed by the thread that made it, when that thread runs again.
"""

import gc
import sysconfig
from contextlib import contextmanager

from mgpu_core.ranks import workers

FREES_LATE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def wake_workers():
    """Give each idle worker empty jobs where objects are freed late, so that it frees what it made.

    Several, because an object that one thread frees may hold the last reference to one of another thread.
    """
    for pool in 5 * workers._alive() if FREES_LATE else ():
        for crew in list(pool._idle):
            crew.run([int] * len(crew.workers), 10)


@contextmanager
def no_collector():
    """Collect all garbage now, and no more until the end of the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

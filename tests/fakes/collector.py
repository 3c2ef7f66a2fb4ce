"""Keep the garbage collector out of a test: what is freed is freed by reference counts."""

import gc
from contextlib import contextmanager


@contextmanager
def no_collector():
    """Collect all garbage now, and no more until the end of the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

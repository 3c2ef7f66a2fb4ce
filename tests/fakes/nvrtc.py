"""Find the compiler that cupy brings along."""

import pytest


def nvrtc():
    """Return cupy's NVRTC; skip the test where there is none."""
    found = pytest.importorskip("cupy.cuda", reason="cupy is not installed").nvrtc
    try:
        found.getVersion()
    except Exception as error:  # cupy has no class of its own for a library that is not there
        pytest.skip(f"no libnvrtc: {error}")
    return found

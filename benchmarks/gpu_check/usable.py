"""Says which backends the installed package has: `python usable.py DEVICE`; fails if its core cannot serve a GPU."""

import sys

from mgpu_core import _core

backends = {name: (built, detail) for name, built, detail in _core.backends()}
print(_core.__file__, backends, _core.device_count("cuda"))
if sys.argv[1] != "cpu":
    assert backends["cuda"][0], "the cuda backend is not built"
    assert _core.device_count("cuda") > 0, "the cuda backend sees no GPU"
    assert _core.has_code_for("cuda", 0), "the cuda backend has no code for this GPU"

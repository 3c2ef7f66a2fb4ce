"""The benchmarks are no part of the package: they are found next to it, as `run.py` finds them."""

import sys
from pathlib import Path

import pytest
from fakes.gpu_check import Machine
from fakes.other_programs import Others

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times do not matter here."""
    monkeypatch.setattr("mgpu_core.tools.bench.timing.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("mgpu_core.tools.bench.timing._cache_nbytes", lambda: 1024)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    """Other programs use no processor, unless the test says so."""
    found = Others()
    monkeypatch.setattr("mgpu_core.support.busy.others_busy", found)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)

"""Which test files need not run again (ci/proved_tests.py)."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent

LOADED = """
import json, sys
from pathlib import Path
import pytest

def pytest_sessionfinish():
    modules = [module for name, module in sys.modules.items() if name.startswith("mgpu_core.")]
    Path("{path}").write_text(json.dumps([getattr(module, "__file__", None) or "" for module in modules]))
"""


@pytest.fixture(scope="module")
def proved():
    spec = spec_from_file_location("proved_tests", ROOT / "ci" / "proved_tests.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reached(proved, test):
    return {str(file.relative_to(ROOT)) for file in proved.reached(TESTS / test)}


def test_a_test_reaches_what_it_imports_and_nothing_beside(proved):
    comm = reached(proved, "comm/test_rank_sums.py")
    assert {"mgpu_core/comm/rank_sums.py", "tests/conftest.py", "pyproject.toml"} <= comm
    assert not any(file.startswith(("mgpu_core/step", "mgpu_core/tools", "docs")) for file in comm)
    assert "mgpu_core/step/update.py" in reached(proved, "step/test_train_step.py")
    assert "mgpu_core/tools/explain/player/page.html" in reached(proved, "tools/explain/test_page.py")
    assert "docs/adding.md" in reached(proved, "notebooks/test_pages.py")


@pytest.mark.slow
@pytest.mark.parametrize("test", ["kernels/test_ops.py", "data_parallel/test_call.py", "step/test_loss_watch.py"])
def test_a_run_loads_no_file_of_the_package_that_it_is_not_said_to_reach(proved, tmp_path, test):
    (tmp_path / "loaded.py").write_text(LOADED.format(path=tmp_path / "files"))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "loaded", "-p", "no:cacheprovider", test]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pytest; sys.exit(pytest.main({command[4:]!r}))"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=TESTS, check=True, capture_output=True, timeout=100)
    folder = Path(proved.PACKAGE)
    names = {file.partition("mgpu_core/")[2] for file in json.loads((tmp_path / "files").read_text())}
    said = {str(file.relative_to(folder)) for file in proved.reached(TESTS / test) if file.is_relative_to(folder)}
    assert {name for name in names if name.endswith(".py")} - {"__init__.py"} <= said


def test_another_version_of_a_library_proves_nothing_for_tests_that_use_it(proved):
    tests = [TESTS / "comm/test_rank_sums.py", TESTS / "integrations/test_tensor_parallel_models.py"]
    noted = {"python": "3.11", "torch": "2.14", "transformers": "5.24", "skorch": "1.4"}

    def hold(**versions):
        return [proved.has_run_with(test, noted, noted | versions) for test in tests]

    assert hold() == hold(skorch="2") == [True, True]
    assert hold(torch="2.15") == hold(python="3.12") == [False, False]
    assert hold(transformers="6") == [True, False]
    assert [proved.has_run_with(test, noted, {"python": "3.11", "torch": "2.14"}) for test in tests] == [True, True]

"""What the tests of the lessons share."""

import pytest

from mgpu_core.tools.cli import main


@pytest.fixture
def mgpu(capsys):
    """Runs `mgpu lesson` with these words; returns the status, and what was printed."""

    def run(*words):
        try:
            status = main(["lesson", *map(str, words)])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run

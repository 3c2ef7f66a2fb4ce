"""The report of the PTX instructions that ran: what several processes left is merged, and too little is an error."""

import ptx_coverage
import pytest

pytestmark = pytest.mark.fakes

ONE = "_ZN4mgpu4cuda11copy_kernelE 98 100\n\t7\tmove.cuh:3\tadd.s32 %r1, 1\n\t9\tmove.cuh:4\tret\n"
OTHER = "_ZN4mgpu4cuda11copy_kernelE 99 100\n\t9\tmove.cuh:4\tret\n"


@pytest.fixture
def run(tmp_path, capsys):
    def run(*texts):
        for number, text in enumerate(texts):
            (tmp_path / f"coverage.{number}").write_text(text)
        status = ptx_coverage.main([str(path) for path in sorted(tmp_path.iterdir())])
        return status, capsys.readouterr().out

    return run


def test_an_instruction_counts_that_ran_in_one_process(run):
    status, page = run(ONE, OTHER)
    assert status == 0
    assert "copy_kernel                     100       99        0        1" in page
    assert "99.00% of the 100 instructions that can run have run, of 100 in all" in page
    assert "1 copy_kernel move.cuh:4" in page


def test_too_few_are_an_error(run):
    missed = "".join(f"\t{line}\tmove.cuh:{line}\tret\n" for line in range(6))
    status, page = run(f"_ZN4mgpu4cuda11copy_kernelE 94 100\n{missed}")
    assert status == 1
    assert "94.00% of the 100" in page


def test_what_cannot_run_does_not_count(run):
    missed = "".join(f"\t{line}\toptimizers.cuh:79\tret\n" for line in range(6))
    status, page = run(f"_ZN4mgpu4cuda19prepare_adam_kernelE 94 100\n{missed}")
    assert status == 0
    assert "100.00% of the 94 instructions that can run have run, of 100 in all" in page
    assert "6 prepare_adam_kernel: special cases of pow" in page


def test_without_files_it_says_how(capsys):
    assert ptx_coverage.main([]) == 2
    assert "MGPU_TEST_PTX_COVERAGE" in capsys.readouterr().err

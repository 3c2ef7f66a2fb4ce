"""The development commands: ``nox -l`` lists them, ``nox -s lint test`` runs some.

Sessions use the environment that nox runs in (see CONTRIBUTING), because torch alone takes 5 GB in each new one.  Those
of continuous integration are scripts in ``ci/``.
"""

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "test"]

TESTS = ["pytest", "-n", "2", "--dist", "loadfile"]


@nox.session
def dev(session: nox.Session) -> None:
    """Install the package in place, with what development needs; compiles the core."""
    session.run("pip", "install", "torch", "scikit-build-core>=0.10", "pybind11>=3", "cmake", "ninja")
    session.run("pip", "install", "--no-build-isolation", "-e", ".[dev]")


@nox.session
def test(session: nox.Session) -> None:
    """Run the default tests, in at most four minutes on two cores; arguments after -- go to pytest."""
    session.run(*TESTS, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests: those of the default run, then those that it leaves out."""
    session.run(*TESTS, "-m", "", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """List the benchmarks, or run the one named after --, with its options."""
    session.run("python", "benchmarks/run.py", *(session.posargs or ["--list"]))


def script(name: str, does: str) -> None:
    """Add a session that runs a script of continuous integration."""

    def run(session: nox.Session) -> None:
        session.run("bash", f"ci/{name}", external=True)

    run.__doc__ = does
    nox.session(run, name=name)


script("lint", "Check style, format and types, in Python and C++.")
script("python", "Run the README's second command, then the tests that the default run leaves out.")
script("fakes", "Run tests again on the fake accelerators.")
script("cpp", "Build and run the C++ tests under the address, undefined and thread sanitizers.")
script("ptx", "Run the C++ tests of the CUDA kernels from their PTX.")
script("gpu_check", "Run the check for one GPU without one.")
script("frameworks", "Run the tests with other frameworks, if their files have changed since they were proved.")
script("docs", "Build the site; warnings are errors.")

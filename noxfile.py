"""The development commands: ``nox -l`` lists them, ``nox -s lint test`` runs some.

Sessions use the environment that nox runs in (see CONTRIBUTING), because torch alone takes 5 GB in each new one.
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
def lint(session: nox.Session) -> None:
    """Check style, format and types, in Python and C++."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = session.run("git", "ls-files", "*.h", "*.cpp", "*.cu", "*.cuh", silent=True)
    session.run("clang-format", "--dry-run", "--Werror", *sources.split())
    session.run("mypy")


@nox.session
def test(session: nox.Session) -> None:
    """Run the default tests, in at most four minutes on two cores; arguments after -- go to pytest."""
    session.run(*TESTS, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run all tests: those of the default run, then those that it leaves out."""
    session.run(*TESTS, "-m", "", *session.posargs)


@nox.session
def cpp(session: nox.Session) -> None:
    """Build and run the C++ tests under a sanitizer: address, or the one named after --."""
    (sanitizer,) = session.posargs or ["address"]
    build = f"build/{sanitizer}"
    options = ["-DMGPU_PYTHON=OFF", "-DMGPU_TESTS=ON", "-DMGPU_CUDA=off", f"-DMGPU_SANITIZE={sanitizer}"]
    session.run("cmake", "-S", ".", "-B", build, "-G", "Ninja", *options)
    session.run("cmake", "--build", build)
    session.run("ctest", "--test-dir", build, "--output-on-failure")


@nox.session
def bench(session: nox.Session) -> None:
    """List the benchmarks, or run the one named after --, with its options."""
    session.run("python", "benchmarks/run.py", *(session.posargs or ["--list"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into build/site; warnings are errors."""
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "build/site")

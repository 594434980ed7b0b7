"""Every session installs the same environment once and runs one plain command, which it prints.

    nox -s check    every layer this machine can run, one summary
    nox -s unit     the tests a CPU can run

A machine without nox or network runs the printed commands itself, with PYTHONPATH=src.
"""

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["check"]

ENVIRONMENT = Path(".nox/treemla").absolute()  # one for all sessions: torch and nvcc are a gigabyte
PYTHON = str(ENVIRONMENT / "bin/python")
PYPROJECT = nox.project.load_toml("pyproject.toml")
SGLANG = "sglang==0.5.23"


@nox.session
def check(session: nox.Session) -> None:
    """Every layer this machine can run: the main job."""
    treemla(session, "check")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and mypy."""
    install(session)
    python(session, "-m", "ruff", "check")
    python(session, "-m", "ruff", "format", "--check")
    python(session, "-m", "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """The tests a CPU can run: unit, and parity of the portable path."""
    treemla(session, "test", "unit")


@nox.session
def static(session: nox.Session) -> None:
    """Build the cubins, fail on spills, stack, too much shared memory, missing kernels."""
    treemla(session, "static")
    treemla(session, "test", "static")


@nox.session(name="gpu-parity")
def gpu_parity(session: nox.Session) -> None:
    """The kernels against float64 and SGLang's Triton kernel."""
    treemla(session, "test", "gpu-parity")


@nox.session(name="gpu-graph")
def gpu_graph(session: nox.Session) -> None:
    """CUDA graph capture and replay."""
    treemla(session, "test", "gpu-graph")


@nox.session(name="gpu-sanitize")
def gpu_sanitize(session: nox.Session) -> None:
    """The kernels under compute-sanitizer."""
    treemla(session, "test", "gpu-sanitize")


@nox.session(name="gpu-perf")
def gpu_perf(session: nox.Session) -> None:
    """Kernel timings as data and as a table."""
    treemla(session, "bench")


def treemla(session: nox.Session, *verb: str) -> None:
    """Install, then the canonical command; arguments after `--` go to it."""
    install(session)
    python(session, "-m", "treemla", *verb, *session.posargs)


def python(session: nox.Session, *arguments: str) -> None:
    session.log(f"plain command: PYTHONPATH=src python {' '.join(arguments)}")
    session.run(PYTHON, *arguments, env={**os.environ, "PYTHONPATH": "src"}, external=True)


def install(session: nox.Session) -> None:
    """What `pyproject.toml` names; nothing is built, the checkout itself is what runs."""
    if not Path(PYTHON).exists():
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), external=True)
    needs = [*PYPROJECT["project"]["dependencies"], *nox.project.dependency_groups(PYPROJECT, "dev")]
    pip = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt")
    session.run(*pip, *needs, external=True)
    session.run(*pip, "--no-deps", SGLANG, external=True)

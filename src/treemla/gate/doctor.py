"""Facts about this machine, each with what is wrong and what to do about it."""

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from treemla import cubins, nvcc, tiles, tuned
from treemla.gate import static
from treemla.gate.exits import InvalidEnvironment
from treemla.gate.fingerprint import checkout_problem, driver_version, package_version
from treemla.sglang import BACKEND, compat, make_backend

MIN_TORCH = (2, 11)
MIN_DRIVER = 580  # the first that loads CUDA 13 code
SANITIZER_PROBE = "import torch; torch.zeros(1, device='cuda').add_(1).cpu()"


@dataclass(frozen=True)
class Fact:
    """`problem` is empty where the fact is fine; `remedy` says what to do otherwise."""

    name: str
    value: str
    problem: str = ""
    remedy: str = ""


def facts() -> list[Fact]:
    """Every fact, in the order in which one depends on another."""
    return [_python(), _torch(), _gpu(), _driver(), _cuda_core(), _nvcc(), *map(_cubin, tiles.TARGETS), _constants(), _cuobjdump(),
            _sanitizer(), _package("triton", "the Triton peer"), *_sglang()]  # fmt: skip


def needed() -> set[str]:
    """Names of the facts that must be good: torch on a machine without a GPU or its driver, on others what a kernel is
    launched and timed with.
    """
    if not torch.cuda.is_available() and driver_version() is None:
        return {"torch"}
    names = {"torch", "gpu", "driver", "cuda-core", "cost constants"}
    if not gpu_problem():
        names.add(f"cubin {cubins.target_of(torch.device('cuda', torch.cuda.current_device())).arch}")
    return names


def gpu_problem() -> str:
    """Why this machine cannot run the kernels; empty where it can."""
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA GPU"
        return f"no GPU: {built}"
    try:
        cubins.target_of(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return str(error)
    return ""


def sanitizer_path() -> str | None:
    """The compute-sanitizer on PATH, else of $CUDA_HOME, else beside nvcc."""
    folders = [os.environ.get("PATH", ""), os.environ.get("CUDA_HOME", "") + "/bin"]
    with contextlib.suppress(nvcc.NvccError):
        folders.append(str(nvcc.find().parent))
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitizer_problem() -> str:
    """Why compute-sanitizer cannot be used here; empty where a trivial program runs clean under it."""
    tool = sanitizer_path()
    if tool is None:
        return "compute-sanitizer: not on PATH, in $CUDA_HOME/bin or beside nvcc"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", SANITIZER_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        return "compute-sanitizer did not finish a trivial program in 300 s"
    said = done.stdout + done.stderr
    if done.returncode == 0 and "ERROR SUMMARY: 0 errors" in said:
        return ""
    return f"compute-sanitizer does not work here: {(said.strip().splitlines() or ['it said nothing'])[-1]}"


def _python() -> Fact:
    return Fact("python", sys.version.split()[0])  # pip enforces the minimum


def _torch() -> Fact:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    value = f"{torch.__version__} ({built})"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        return Fact("torch", value, f"older than {MIN_TORCH[0]}.{MIN_TORCH[1]}", "pip install 'torch>=2.11'")
    return Fact("torch", value)


def _gpu() -> Fact:
    problem = gpu_problem()
    if not torch.cuda.is_available():
        return Fact("gpu", "none", problem, "run the gpu layers on a machine with an H200 or RTX PRO 6000 Blackwell")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    value = f"{properties.name}, {properties.multi_processor_count} SMs, {torch.cuda.device_count()} visible"
    return Fact("gpu", value, problem, "the portable path runs on a CPU" if problem else "")


def _driver() -> Fact:
    version = driver_version()
    if version is None:
        return Fact(
            "driver",
            "none",
            "nvidia-smi does not answer",
            "install the NVIDIA driver, 580 or newer, for the gpu layers",
        )
    if int(version.split(".")[0]) < MIN_DRIVER:
        return Fact("driver", version, f"older than {MIN_DRIVER}: CUDA 13 code does not load", "update the driver")
    return Fact("driver", version)


def _cuda_core() -> Fact:
    core, bindings = package_version("cuda-core"), package_version("cuda-bindings")
    value = f"cuda-core {core or 'none'}, cuda-bindings {bindings or 'none'}"
    missing = not core or not bindings or not bindings.startswith("13.")
    remedy = "pip install 'cuda-core>=1,<2' 'cuda-bindings>=13,<14'"
    return Fact("cuda-core", value, "launching on a GPU needs both", remedy) if missing else Fact("cuda-core", value)


def _nvcc() -> Fact:
    try:
        found = nvcc.find()
    except nvcc.NvccError:
        return Fact("nvcc", "none", "cubins cannot be built here", nvcc.REMEDY)
    return Fact("nvcc", f"{nvcc.version(found)} at {found}")


def _cubin(arch: str) -> Fact:
    """Builds it where it is missing and a compiler is at hand."""
    try:
        return Fact(f"cubin {arch}", str(cubins.cubin_path(arch)))
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        return Fact(f"cubin {arch}", "none", first, "see nvcc above")


def _constants() -> Fact:
    """Whose constants decide how launches are cut: results differ in the last bits between two that cut otherwise."""
    name, defaults = "cost constants", "defaults, of an H200"
    if gpu_problem():
        return Fact(name, defaults)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        of = tuned.fingerprint(device, cubins.target_of(device).paths[0])
        return Fact(name, f"tuned, {of.path}" if tuned.load(of) else f"{defaults}; `python -m treemla tune` measures")
    except (RuntimeError, ValueError) as error:
        return Fact(name, "none", str(error).splitlines()[0], "plans cannot be made: mend what is named")


def _cuobjdump() -> Fact:
    try:
        return Fact("cuobjdump", str(static.cuobjdump()))
    except InvalidEnvironment as error:
        return Fact("cuobjdump", "none", "the static layer cannot read cubins", str(error).partition("; ")[2])


def _sanitizer() -> Fact:
    problem = gpu_problem() or sanitizer_problem()
    tool = sanitizer_path() or "none"
    remedy = "the gpu-sanitize layer needs a GPU machine where it works (CUDA toolkit 13.0)" if problem else ""
    return Fact("compute-sanitizer", tool, problem, remedy)


def _package(name: str, purpose: str) -> Fact:
    version = package_version(name)
    return Fact(name, version) if version else Fact(name, "none", f"{purpose} is missing", f"pip install {name}")


def _sglang() -> list[Fact]:
    """The version, whether SGLang will find the plug-in, and whether the plug-in loads and its contract holds."""
    version = compat.installed()
    if version is None:
        return [Fact("sglang", "none", "the Triton peer and the plug-in need it", "pip install 'treemla[sglang]'")]
    tested = version in compat.TESTED
    names = ", ".join(compat.TESTED)
    untested = Fact(
        "sglang", version, f"none of the tested versions ({names})", "serve only if the lines below are fine"
    )
    return [Fact("sglang", version) if tested else untested, _entry_point(), _backend()]


def _entry_point() -> Fact:
    name, found = "sglang plug-in", plugin_entry_points()
    if not found:
        remedy = "install treemla into SGLang's environment (pip install, not PYTHONPATH)"
        return Fact(name, "none", f"no entry point {BACKEND} in group {compat.PLUGINS}", remedy)
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen and BACKEND not in chosen.split(","):
        return Fact(name, found[0], f"SGLANG_PLUGINS={chosen} leaves it out", f"add {BACKEND} to SGLANG_PLUGINS")
    return Fact(name, found[0])


def _backend() -> Fact:
    """Imports SGLang: seconds."""
    name, remedy = "sglang backend", compat.REMEDY
    try:
        compat.register_backend(BACKEND, make_backend)
        backend = compat.backend_class().__name__
    except compat.UnsupportedSglang as error:
        return Fact(name, "none", " ".join(str(error).split()), remedy)
    except Exception as error:  # whatever importing SGLang raises here
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return Fact(name, "none", f"SGLang does not import: {first}", "install SGLang with its requirements")
    registered = compat.is_registered(BACKEND)
    return Fact(name, backend, "" if registered else f"{BACKEND} is not registered", "" if registered else remedy)


def plugin_entry_points() -> list[str]:
    """Where SGLang will find the plug-in, by the metadata of installed packages."""
    return [entry.value for entry in importlib.metadata.entry_points(group=compat.PLUGINS, name=BACKEND)]


def sglang_problem() -> str:
    """Why the contract tests cannot run in this environment; empty where they can."""
    if compat.installed() is None:
        return "sglang: not installed"
    missing = [name for name in ("torchvision", "transformers", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"sglang: {', '.join(missing)} not installed here; nox -s sglang makes environments that have them"
    return "" if plugin_entry_points() else "sglang: treemla is not installed here, so SGLang does not find the plug-in"


def engine_problem() -> str:
    """Why SGLang's Engine cannot start here; empty where what it imports is there."""
    needed = ("sglang", "sgl_kernel", "transformers", "xgrammar", "uvicorn")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"SGLang's Engine: {', '.join(missing)} not installed; pip install sglang==0.5.16" if missing else ""


WHY_NOT: dict[str, Callable[[], str]] = {
    "checkout": checkout_problem,
    "gpu": gpu_problem,
    "compute-sanitizer": sanitizer_problem,
    "sglang": sglang_problem,
    "engine": engine_problem,
}

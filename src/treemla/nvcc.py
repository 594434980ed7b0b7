"""Compiles csrc/ to one cubin per architecture with nvcc, into a private cache keyed by content.

Standard library only: the wheel's build hook loads this file by path, where neither torch nor treemla is installed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNIT = "treemla.cu"  # the one translation unit; it includes the rest of csrc/
SUPPORTED_RELEASE = "13."  # a driver of the 580 series loads what CUDA 13 compilers make
FLAGS = ("-cubin", "-O3", "-std=c++17", "-Xptxas", "-v,-warn-spills")  # no -lineinfo: it writes paths into the cubin
REMEDY = (
    "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' "
    "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*', or put the nvcc of a CUDA 13 toolkit on PATH"
)


class NvccError(RuntimeError):
    """nvcc rejected the source, or the cache cannot be trusted."""


class NvccMissing(NvccError):
    """This machine has no usable nvcc, or no host compiler for it."""


def find() -> Path:
    """The nvcc of the nvidia-cuda-nvcc package, else of $CUDA_HOME, else on PATH; the first that is CUDA 13."""
    candidates = [Path(entry, "nvidia/cu13/bin/nvcc") for entry in sys.path]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home, "bin/nvcc"))
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    present = [nvcc for nvcc in candidates if nvcc.is_file()]
    for nvcc in present:
        if version(nvcc).startswith(SUPPORTED_RELEASE):
            return nvcc
    seen = ", ".join(f"{nvcc} ({version(nvcc)})" for nvcc in present) or "none"
    raise NvccMissing(f"nvcc: expected a CUDA 13 compiler, found {seen}; {REMEDY}")


def version(nvcc: Path) -> str:
    """The compiler's own version, such as 13.0.88; empty where it does not run."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    return found.group(1) if found else ""


def source_hash(csrc: Path, arch: str) -> str:
    """What the cubin of `arch` is made from, the compiler aside: every file in csrc/, by name and content, and flags."""
    digest = hashlib.sha256(repr((arch, FLAGS)).encode())
    for path in sorted(p for p in csrc.rglob("*") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"\0{path.relative_to(csrc).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def log_path(cubin: Path) -> Path:
    """Where the compiler's words on a cubin lie: registers, stack, spills, warnings."""
    return cubin.with_suffix(".ptxas.txt")


def build(csrc: Path, arch: str) -> Path:
    """The cubin of `arch` for this source and compiler: from the cache, or compiled into it once."""
    nvcc = find()
    key = hashlib.sha256(f"{source_hash(csrc, arch)} {version(nvcc)}".encode()).hexdigest()[:24]
    cache = private_directory(cache_root() / "treemla")
    made = cache / key
    cubin = made / f"{arch}.cubin"
    if not made.exists():
        with _lock(cache):  # workers of one test run wait for the first instead of compiling the same again
            if not made.exists():
                with tempfile.TemporaryDirectory(dir=cache) as scratch:
                    target = Path(scratch, "made")
                    target.mkdir()
                    compile_cubin(nvcc, csrc / UNIT, arch, target / cubin.name)
                    target.rename(made)
    return cubin


def compile_cubin(nvcc: Path, unit: Path, arch: str, cubin: Path) -> None:
    """Run nvcc on one translation unit; what it says goes to `log_path(cubin)`."""
    if not shutil.which("g++"):
        raise NvccMissing(
            "nvcc needs g++, its host compiler, which is not on PATH: install it (Debian: apt-get install g++)"
        )
    command = [str(nvcc), f"-arch={arch}", *FLAGS, unit.name, "-o", str(cubin)]
    done = subprocess.run(
        command, cwd=unit.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise NvccError(f"nvcc failed on {unit} ({' '.join(command)}):\n{done.stdout.strip()}")
    log_path(cubin).write_text(done.stdout)


def cache_root() -> Path:
    """$XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home) if home.startswith("/") else Path.home() / ".cache"


def private_directory(path: Path) -> Path:
    """`path`, made with mode 0700. Code is loaded from it, so another's directory or a link is refused."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NvccError(
            f"{path}: expected a directory of user {os.getuid()}, got mode {stat.filemode(found.st_mode)} "
            f"of user {found.st_uid}; move it away or set XDG_CACHE_HOME"
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield

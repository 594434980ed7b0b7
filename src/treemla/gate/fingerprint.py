"""Where a measurement came from."""

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from treemla.gate.schema import Where

REPO = Path(__file__).parents[3]  # of a checkout


def collect(commit: str | None = None) -> Where:
    """This machine, its software and this command. `commit`: said by the caller where the copy has no git history."""
    return Where(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        driver=driver_version(),
        cuda=torch.version.cuda,
        torch=torch.__version__,
        triton=package_version("triton"),
        sglang=package_version("sglang"),
        treemla=commit or git_commit() or "unknown",
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=shlex.join(["python", "-m", "treemla", *sys.argv[1:]]),
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    return said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` where tracked files differ from it; None without one."""
    return (
        None
        if checkout_problem()
        else said("git", "-C", str(REPO), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    )


def checkout_problem() -> str:
    """Why this package's tests cannot be run; empty in a checkout."""
    return "" if (REPO / "noxfile.py").is_file() else "no checkout: an installed treemla comes without its tests"


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def said(*command: str) -> str | None:
    """First line of a command's output; None where it is missing or fails."""
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return out[0].strip() if out else None

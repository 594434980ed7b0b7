"""Which machine this is: the class of machines that its times compare with, and since when it runs."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from treemla import nvcc
from treemla.gate import nvml
from treemla.gate.fingerprint import driver_version, package_version

Facts = Mapping[str, int | str | None]
NVML_FACTS = ("power_limit_mw", "max_sm_mhz", "max_memory_mhz", "vbios", "mig", "ecc")


def gpu_uuid(device: int | None = None) -> str:
    """Of a CUDA device of this process, "GPU-...": an index means another GPU wherever CUDA_VISIBLE_DEVICES differs."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    return f"GPU-{properties.uuid}"


def facts(gauge: nvml.Gauge | None) -> dict[str, int | str | None]:
    """Of the current GPU and the software that times depend on; None: unknown."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "nvcc": _nvcc_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "sglang": package_version("sglang"),
        **(gauge.facts() if gauge else dict.fromkeys(NVML_FACTS)),
    }


def fingerprint(known: Facts) -> str:
    """12 hexadecimal digits that say "the same class of machine", whatever the order of the facts."""
    return hashlib.sha256(json.dumps(dict(known), sort_keys=True).encode()).hexdigest()[:12]


def arch(known: Facts) -> str:
    """The architecture, by which ratios are stored: sm_90."""
    return f"sm_{str(known['compute_capability']).replace('.', '')}"


def start(proc: Path = Path("/proc")) -> str | None:
    """12 digits for this start of the machine or container; None where it cannot be told."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        first = (proc / "1/stat").read_text().rpartition(")")[2].split()[19]  # when process 1 began, since the boot
    except (OSError, IndexError):
        return None
    return hashlib.sha256(f"{boot} {first}".encode()).hexdigest()[:12]


def _nvcc_version() -> str | None:
    try:
        return nvcc.version(nvcc.find())
    except nvcc.NvccError:
        return None

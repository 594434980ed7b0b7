"""Runs this folder's scripts under compute-sanitizer and reads what it says."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from treemla import nvcc
from treemla.gate.doctor import sanitizer_path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src"
FINDINGS = 9  # exit code that the tool is told to use
KERNELS = ("--kernel-name", "kernel_substring=treemla")  # torch's own kernels are not ours to check


@dataclass(frozen=True)
class Tool:
    """fault: the kernel of faults.cu that only this tool can find. finding: words of its report that name the fault."""

    name: str
    fault: str
    finding: str
    options: tuple[str, ...] = ()


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("memcheck", "treemla_fault_out_of_bounds", "Invalid __global__ read", ("--report-api-errors", "no")),
        Tool("racecheck", "treemla_fault_race", "Race reported between"),
        Tool("initcheck", "treemla_fault_uninitialised", "Uninitialized __global__ memory read"),
        # Of all blocks of a launch, 40 each. Told of fewer, the tool's own table overflows and it reports a failed launch.
        Tool("synccheck", "treemla_fault_barrier", "Barrier error", ("--num-cuda-barriers", "8192")),
    )
}


@dataclass(frozen=True)
class Run:
    exit_code: int
    said: str

    @property
    def is_clean(self) -> bool:
        return self.exit_code == 0

    def found(self, words: str) -> bool:
        return self.exit_code == FINDINGS and words.lower() in self.said.lower()


def run_cases(tool: Tool) -> Run:
    """The case list under the tool."""
    return _run(tool, FOLDER / "kernels.py")


def run_fault(tool: Tool, kernel: str) -> Run:
    """One kernel of faults.cu under the tool."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as scratch:
        cubin = Path(scratch, "faults.cubin")
        command = [str(nvcc.find()), "-cubin", f"-arch=sm_{major}{minor}", "-o", str(cubin), str(FOLDER / "faults.cu")]
        subprocess.run(command, check=True)
        return _run(tool, FOLDER / "faults.py", str(cubin), kernel)


def _run(tool: Tool, script: Path, *arguments: str) -> Run:
    options = ["--tool", tool.name, "--error-exitcode", str(FINDINGS), *KERNELS, *tool.options]
    command = [str(sanitizer_path()), *options, sys.executable, str(script), *arguments]
    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=280
    )
    return Run(done.returncode, f"$ {' '.join(command)}\n{done.stdout[-6000:]}\nexit {done.returncode}")

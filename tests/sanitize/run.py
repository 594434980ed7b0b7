"""The sanitize suite as one script: `PYTHONPATH=src python tests/sanitize/run.py --tool all`.

Exit codes: 0 clean and every planted fault found, 1 not so, 4 no GPU or no compute-sanitizer that works here.
"""

import argparse
import sys

import sanitizer
import torch

from treemla import cubins
from treemla.gate.doctor import sanitizer_path

FAILED, INVALID_ENVIRONMENT = 1, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=[*sanitizer.TOOLS, "all"], default="all")
    asked = parser.parse_args().tool
    if not torch.cuda.is_available() or sanitizer_path() is None:
        print("expected a CUDA GPU and compute-sanitizer, got neither or one of them")
        return INVALID_ENVIRONMENT
    device = torch.device("cuda", torch.cuda.current_device())
    cubins.cubin_path(cubins.target_of(device).arch)  # built now, and not under the sanitizer
    tools = sanitizer.TOOLS.values() if asked == "all" else [sanitizer.TOOLS[asked]]
    failed = []
    for tool in tools:
        right = sanitizer.run_fault(tool, "treemla_fault_none")
        if not right.is_clean:
            print(f"{tool.name} does not run a right kernel on this machine:\n{right.said}")
            return INVALID_ENVIRONMENT
        fault, kernels = sanitizer.run_fault(tool, tool.fault), sanitizer.run_cases(tool)
        for name, passed, run in (
            ("finds its planted fault", fault.found(tool.finding), fault),
            ("is clean on the kernels", kernels.is_clean, kernels),
        ):
            print(f"{tool.name}: {name}: {'yes' if passed else f'NO{chr(10)}{run.said}'}", flush=True)
            failed += [] if passed else [tool.name]
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""These tests need a GPU, and compute-sanitizer to work on it. Without, the session ends with exit code 4."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _needs_a_working_sanitizer(device) -> None:
    import sanitizer

    from treemla.gate.doctor import sanitizer_path

    if device.type != "cuda":
        pytest.exit("tests/sanitize: expected --device cuda, got --device cpu", returncode=4)
    if sanitizer_path() is None:
        pytest.exit("compute-sanitizer: not on PATH, in $CUDA_HOME/bin or beside nvcc", returncode=4)
    run = sanitizer.run_fault(sanitizer.TOOLS["memcheck"], "treemla_fault_none")
    if not run.is_clean:
        pytest.exit(f"compute-sanitizer does not run a right kernel on this machine:\n{run.said}", returncode=4)

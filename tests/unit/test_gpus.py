"""Each xdist worker of a GPU suite has a GPU of its own where the machine has several; elsewhere nothing changes."""

import subprocess
import sys
from pathlib import Path

import gpus
import pytest

TESTS = Path(__file__).parents[1]


def chosen(worker, present, visible=None):
    environment = {"PYTEST_XDIST_WORKER": worker} if worker else {}
    return gpus.own_gpu(environment | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}), present)


def test_workers_take_gpus_in_turns():
    assert [chosen(f"gw{n}", 4) for n in range(6)] == ["0", "1", "2", "3", "0", "1"]


def test_only_gpus_that_the_caller_sees_are_taken():
    assert [chosen(f"gw{n}", 8, "5,GPU-ab,7") for n in range(4)] == ["5", "GPU-ab", "7", "5"]


@pytest.mark.parametrize(
    ("worker", "present", "visible"),
    [("gw3", 1, None), ("gw3", 8, "2"), ("gw3", 0, None), ("gw3", 8, ""), ("", 8, None), ("master", 8, None)],
)
def test_on_one_gpu_and_without_workers_nothing_changes(worker, present, visible):
    assert chosen(worker, present, visible) is None


def test_gpus_are_counted_as_the_driver_lists_them(tmp_path, monkeypatch):
    said = tmp_path / "nvidia-smi"
    said.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho '  MIG 1g'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    said.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus.present() == 2
    monkeypatch.setenv("PATH", "")
    assert gpus.present() == 0


def test_a_worker_sees_its_gpu_before_cuda_is_used(tmp_path, monkeypatch):
    """In a process of its own, as xdist starts it: what it chose is in the environment, and torch was not imported."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    code = "import os, sys, gpus; gpus.choose(); print(os.environ.get('CUDA_VISIBLE_DEVICES'), 'torch' in sys.modules)"
    for worker, said in (("gw1", "1 False"), ("gw2", "0 False")):
        environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "PYTHONPATH": str(TESTS), "PYTEST_XDIST_WORKER": worker}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said

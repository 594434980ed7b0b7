"""Runs in an environment that holds one SGLang and, installed (`pip install -e .`), treemla: its entry point counts."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: SGLang's kernels run here too

NOT_HERE = 4  # exit code: the environment cannot run what was asked


def pytest_configure(config: pytest.Config) -> None:
    for package, why in (
        ("sglang", "the contract is with it"),
        ("treemla", "SGLang finds the plug-in by its metadata"),
    ):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.exit(f"tests/sglang: {package} is not installed ({why}); see docs/sglang.md", returncode=NOT_HERE)
    sys.path.insert(0, str(Path(__file__).parent))
    import torchvision_shim  # noqa: F401
    from sglang.test.test_utils import maybe_stub_sgl_kernel

    maybe_stub_sgl_kernel()


@pytest.fixture(scope="session", autouse=True)
def plugins():
    """SGLang with its plug-ins loaded, as each of its processes loads them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def rope_writer(monkeypatch):
    """The pool's kernel that writes latent and rope together does not run in Triton's interpreter (0.5.16)."""
    from sglang.srt.mem_cache import memory_pool

    def write(kv_buffer, loc, latent, rope):
        kv_buffer[loc] = torch.cat([latent, rope], dim=-1).reshape(len(loc), 1, -1)

    if hasattr(memory_pool, "set_mla_kv_buffer_triton"):
        monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_triton", write)


@pytest.fixture
def eagle():
    """A runner whose drafts are EAGLE's trees, and its backend."""
    from runners import make_runner

    from treemla.sglang.backend import TreemlaAttnBackend

    runner = make_runner(speculative_algorithm="EAGLE")
    return runner, TreemlaAttnBackend(runner)

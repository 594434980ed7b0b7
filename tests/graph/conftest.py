"""Graphs exist on CUDA devices alone: asked to run elsewhere, this folder ends the session and nothing passes."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _needs_cuda(device) -> None:
    if device.type != "cuda":
        pytest.exit("tests/graph: expected --device cuda, got --device cpu", returncode=4)

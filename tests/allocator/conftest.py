"""SGLang's real allocators, of whichever version is installed, on a CPU."""

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=150, metavar="N", help="sequences of steps for each allocator")


def pytest_configure() -> None:
    """SGLang 0.5.16 wants an image decoder from torchvision, which has no part in this, and warns of no absence."""
    if importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.io"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules["torchvision.io"].decode_jpeg = None

"""SGLang's real allocators, of whichever version is installed, on a CPU."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=150, metavar="N", help="sequences of steps for each allocator")


def pytest_report_header() -> str:
    return f"sglang {importlib.metadata.version('sglang')}"


def pytest_configure() -> None:
    """SGLang 0.5.16 wants an image decoder from torchvision, which has no part in this, and warns of no absence."""
    if importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.io"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules["torchvision.io"].decode_jpeg = None


def pytest_terminal_summary(terminalreporter) -> None:
    """How often each rule fired, by test; workers of xdist hand it over with their reports."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    told = [(report.nodeid, value) for report in reports for name, value in report.user_properties if name == "fired"]
    if told:
        terminalreporter.section("how often each rule fired")
    for test, fired in told:
        terminalreporter.write_line(f"{test.partition('::')[2]}: {fired}")

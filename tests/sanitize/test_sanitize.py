"""compute-sanitizer over every kernel: each tool is clean on ours, and finds the fault that was made for it."""

import pytest
import sanitizer
from sanitizer import TOOLS, Tool


@pytest.fixture(params=TOOLS.values(), ids=TOOLS)
def tool(request: pytest.FixtureRequest) -> Tool:
    return request.param


def test_tool_is_clean_on_a_right_kernel(tool: Tool) -> None:
    run = sanitizer.run_fault(tool, "treemla_fault_none")
    assert run.is_clean, run.said


def test_tool_finds_the_planted_fault(tool: Tool) -> None:
    run = sanitizer.run_fault(tool, tool.fault)
    assert run.found(tool.finding), run.said


def test_kernels_are_clean(tool: Tool) -> None:
    run = sanitizer.run_cases(tool)
    assert run.is_clean, run.said
    assert "cases ran" in run.said, run.said

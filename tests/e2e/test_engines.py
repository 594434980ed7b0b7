"""The verdict on real Engines. What run.py has not recorded in build/e2e yet it does first: minutes of GPU time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e import judge, report

REPO = Path(__file__).resolve().parents[2]
OUT = REPO / "build/e2e"

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def records(device):
    if device.type != "cuda":
        pytest.exit("tests/e2e: expected --device cuda, got --device cpu", returncode=4)
    subprocess.run(
        [sys.executable, Path(__file__).with_name("run.py"), "--out", OUT], check=False
    )  # its verdict is below
    return [json.loads(line) for line in (OUT / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("what", judge.JUDGED)
def test_engines_agree_and_faults_are_noticed(records, what):
    found = {name: wrong for name, _, wrong in judge.judge(records)}
    assert found[what] == []


@pytest.mark.parametrize("context", report.BARS)
def test_treemla_is_faster_by_the_bar(records, context):
    """Of medians over two starts of each Engine, measured in turns."""
    assert context not in report.missed(records)

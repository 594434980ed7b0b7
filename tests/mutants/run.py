"""Shows that the suites notice faults: `python tests/mutants/run.py [--device cuda] [--only NAME] [--jobs N]`.

Each entry of catalogue.toml for the device is applied to a copy of the checkout, where its tests must then fail;
without it, they must pass. Each copy has its own cubin cache, so that jobs build side by side. What was found is kept
in outcomes.json, and docs/mutants.md is made from it. Exit codes: 0 every fault was noticed, 1 not so, 2 usage, 4 no GPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import score

from treemla.gate import fingerprint

CHECKOUT = Path(__file__).parents[2]
COPIED = ("src", "tests", "csrc", ".ci", ".github", "noxfile.py", "pyproject.toml")
INVALID_ENVIRONMENT = 4
PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; any other is an accident that proves nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAME", help="this mutant alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies that are tested at once")
    parser.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    asked = parser.parse_args()
    mutants = [mutant for mutant in catalogue() if asked.only in (None, mutant["name"])]
    mutants = [mutant for mutant in mutants if mutant.get("device", "cpu") == asked.device]
    if not mutants:
        parser.error(f"no mutant of that name for {asked.device}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: expected a CUDA GPU, got none that torch can use")
        return INVALID_ENVIRONMENT
    with ThreadPoolExecutor(asked.jobs) as pool:
        healthy = {tests: pool.submit(fails_without_fault, list(tests), asked.device) for tests in unique(mutants)}
        tried = [pool.submit(noticed_by, mutant, asked.device) for mutant in mutants]
        proven = [
            (mutant, *outcome.result())
            for mutant, outcome in zip(mutants, tried, strict=True)
            if not healthy[tuple(mutant["tests"])].result()  # else its failure says nothing
        ]
    score.record(proven, asked.commit or fingerprint.git_commit() or "unknown")
    score.write()
    print(score.PAGE.read_text().removeprefix(score.HEAD).partition("\n| fault")[0])
    count = sum(noticed for _, noticed, _ in proven)
    print(f"{count} of {len(mutants)} faults noticed")
    return 0 if count == len(mutants) else 1


def fails_without_fault(tests: list[str], device: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        code, said = run_tests(copy_checkout(Path(scratch)), tests, device)
    if code != PASSED:
        print(f"without any fault, {' '.join(tests)} ends with {code}:\n{said}", flush=True)
    return code != PASSED


def noticed_by(mutant: dict[str, Any], device: str) -> tuple[bool, str]:
    """(whether the tests failed with the fault, the test that did)"""
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_checkout(Path(scratch))
        target = copy / mutant["file"]
        target.write_text(target.read_text().replace(mutant["old"], mutant["new"]))
        code, said = run_tests(copy, mutant["tests"], device)
    noticed = code == TESTS_FAILED
    verdict = "noticed " if noticed else f"SURVIVED (pytest exit {code})"
    print(f"{verdict} {mutant['name']}: {last_failure(said)}", flush=True)
    return noticed, last_failure(said)


def catalogue() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())["mutant"]


def copy_checkout(scratch: Path) -> Path:
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(source, scratch / name)
    return scratch


def run_tests(copy: Path, tests: list[str], device: str) -> tuple[int, str]:
    """Pytest's exit code and output, in the copy and with its sources."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--device", device, *tests]
    path = os.pathsep.join(filter(None, (str(copy / "src"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(copy / "cache")}
    done = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def last_failure(said: str) -> str:
    """The test that failed, as pytest's summary names it."""
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in said.splitlines() if line.startswith("FAILED ")]
    return failed[-1] if failed else said.strip().splitlines()[-1] if said.strip() else "no output"


def unique(mutants: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The tests that some mutant names, each list once."""
    return list(dict.fromkeys(tuple(mutant["tests"]) for mutant in mutants))


if __name__ == "__main__":
    sys.exit(main())

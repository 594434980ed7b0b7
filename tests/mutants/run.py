"""Shows that the suites notice faults: `python tests/mutants/run.py [--device cuda] [--only NAME]`.

Each entry of catalogue.toml for the device is applied to a copy of the checkout, where its tests must then fail;
without it, they must pass. Exit codes: 0 every fault was noticed, 1 not so, 2 usage.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
COPIED = ("src", "tests", "csrc", "pyproject.toml")
PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; any other is an accident that proves nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAME", help="this mutant alone")
    asked = parser.parse_args()
    mutants = [mutant for mutant in catalogue() if asked.only in (None, mutant["name"])]
    mutants = [mutant for mutant in mutants if mutant.get("device", "cpu") == asked.device]
    if not mutants:
        parser.error(f"no mutant of that name for {asked.device}")
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_checkout(Path(scratch))
        for tests in unique([mutant["tests"] for mutant in mutants]):
            code, said = run_tests(copy, tests, asked.device)
            if code != PASSED:
                print(f"without any fault, {' '.join(tests)} ends with {code}:\n{said}")
                return 1
        for mutant in mutants:
            target = copy / mutant["file"]
            source = target.read_text()
            target.write_text(source.replace(mutant["old"], mutant["new"]))
            code, said = run_tests(copy, mutant["tests"], asked.device)
            target.write_text(source)
            noticed = code == TESTS_FAILED
            print(
                f"{'noticed ' if noticed else f'SURVIVED (pytest exit {code})'} {mutant['name']}: {last_failure(said)}",
                flush=True,
            )
            survivors += [] if noticed else [mutant["name"]]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} faults noticed")
    return 1 if survivors else 0


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
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    done = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def last_failure(said: str) -> str:
    """The test that failed, as pytest's summary names it."""
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in said.splitlines() if line.startswith("FAILED ")]
    return failed[-1] if failed else said.strip().splitlines()[-1] if said.strip() else "no output"


def unique(lists: list[list[str]]) -> list[list[str]]:
    return [list(arguments) for arguments in dict.fromkeys(map(tuple, lists))]


if __name__ == "__main__":
    sys.exit(main())

"""The layers of the suite: what each runs, what it needs, and how its outcome is counted."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

from treemla.gate import ran, schema
from treemla.gate.doctor import WHY_NOT
from treemla.gate.exits import Exit
from treemla.gate.fingerprint import REPO

# 4 is what our conftests end with where the machine cannot run a suite, and pytest for arguments it does not know.
# Anything else, a crash too, is a failure.
PYTEST_EXITS = {0: Exit.PASS, 4: Exit.INVALID_ENVIRONMENT, 5: Exit.NOTHING_MEASURED}


@dataclass(frozen=True)
class Layer:
    """`arguments` follow `python -m`; `needs` are keys of `doctor.WHY_NOT`, asked in order. measured: where a verb leaves
    its measurements, below the checkout."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    measured: str = ""

    @property
    def is_pytest(self) -> bool:
        return self.arguments[0] == "pytest"

    @property
    def results(self) -> str:
        """Where it leaves its results, below the checkout: pytest's report, or measurements."""
        return self.measured or f"build/{self.name}.xml"

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.arguments, "--junitxml", self.results) if self.is_pytest else self.arguments

    def why_not(self) -> str:
        """Why this machine cannot run the layer; empty where it can."""
        return next((problem for need in self.needs if (problem := WHY_NOT[need]())), "")


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("unit", ("pytest", "tests/unit", "tests/parity", "tests/allocator", "-n", "auto"), ("checkout",)),
        Layer("static", ("pytest", "tests/static"), ("checkout",)),
        Layer("sglang", ("pytest", "tests/sglang"), ("checkout", "sglang")),
        Layer(
            "gpu-parity",
            ("pytest", "tests/parity", "--device", "cuda"),
            (
                "checkout",
                "gpu",
            ),
        ),
        Layer(
            "gpu-graph",
            ("pytest", "tests/graph", "--device", "cuda"),
            (
                "checkout",
                "gpu",
            ),
        ),
        Layer(
            "gpu-sanitize",
            ("pytest", "tests/sanitize", "--device", "cuda", "-n", "4"),  # a worker a tool: they wait on the host
            ("checkout", "gpu", "compute-sanitizer"),
        ),
        Layer("gpu-perf", ("treemla", "bench"), ("gpu",), "build/gpu-perf.jsonl"),
        Layer("gate", ("treemla", "gate"), ("checkout", "gpu"), "build/gate/sessions.jsonl"),
        Layer("gpu-e2e", ("pytest", "tests/e2e", "--device", "cuda"), ("checkout", "gpu", "engine")),
    )
}


@dataclass(frozen=True)
class Outcome:
    """`why` says why a layer did not run or did not pass; `ran` is False only where it was not even tried."""

    exit: Exit
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    why: str = ""
    ran: bool = True


def run(layer: Layer, extra: Sequence[str] = ()) -> Outcome:
    """Run a layer as a subprocess from the checkout, its output streamed; a layer that cannot run is not tried."""
    if problem := layer.why_not():
        return Outcome(Exit.INVALID_ENVIRONMENT, why=problem, ran=False)
    results = REPO / layer.results
    results.unlink(missing_ok=True)  # an old one must not count
    print(f"$ {plain_command(layer, extra)}", flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", *layer.command, *extra]
    # stdin is closed so that nothing waits for an answer that nobody gives
    code = subprocess.run(command, cwd=REPO, env=environment(), stdin=subprocess.DEVNULL, check=False).returncode
    counted = count_tests(code, results) if layer.is_pytest else count_measurements(code, results)
    if counted.exit is Exit.PASS and not extra:  # the whole layer
        ran.record(layer.name, counted.passed, on_gpu="gpu" in layer.needs, path=REPO / "build/ran.jsonl")
    return replace(counted, seconds=time.monotonic() - begin)


def plain_command(layer: Layer, extra: Sequence[str] = ()) -> str:
    """The command that does the same without this wrapper."""
    return "PYTHONPATH=src python -m " + shlex.join([*layer.command, *extra])


def environment() -> dict[str, str]:
    """The caller's, with the checkout's package first."""
    paths = [str(REPO / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def count_tests(code: int, junit: Path) -> Outcome:
    """What pytest's exit code and its report say together. Nothing passes by its absence: not a missing report, not
    zero tests, not a skipped test.
    """
    verdict = PYTEST_EXITS.get(code, Exit.FAILED)
    try:
        cases = list(ET.parse(junit).getroot().iter("testcase"))
    except (OSError, ET.ParseError) as error:
        return Outcome(verdict or Exit.NOTHING_MEASURED, why=f"no readable report (pytest exit {code}): {error}")
    failed = sum(any(case.find(tag) is not None for tag in ("failure", "error")) for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - failed - skipped
    if verdict is Exit.PASS and failed:
        return Outcome(Exit.FAILED, passed, failed, why=f"pytest exit 0 with {failed} failures in its report")
    if verdict is Exit.PASS and (skipped or not passed):
        why = f"{skipped} skipped: a skipped test proves nothing" if skipped else "no test ran"
        return Outcome(Exit.NOTHING_MEASURED, passed, failed, why=why)
    return Outcome(verdict, passed, failed, why="" if verdict is Exit.PASS else f"pytest exit {code}, see above")


def count_measurements(code: int, results: Path) -> Outcome:
    """What `treemla bench` or `treemla gate` left: its exit code is an `Exit`, its results are lines of the result schema."""
    verdict = Exit(code) if code in set(Exit) else Exit.FAILED
    try:
        cases = {measurement.case for measurement in schema.load(results)}
    except (OSError, ValueError) as error:
        return Outcome(verdict or Exit.NOTHING_MEASURED, why=f"no readable results: {error}")
    return Outcome(
        verdict, passed=len(cases), failed=int(verdict is Exit.FAILED), why="" if not verdict else verdict.name
    )

"""The gate on a real GPU: the same program three times, then one that is 5% slower.

    PYTHONPATH=src python tests/gpu_gate/proof.py --out build/proof

Three times `selfcheck`, which must say "same"; then `gate`, run in a copy of this checkout whose kernel waits for 5% of
its measured time (`plant`), with this checkout as base: it must end with 1 and name the case. Needs a GPU that nobody
else uses; Triton is left out. Every command is printed and may be run by hand. Exit codes: 0 proven, 1 not, 4 no GPU.

`--budget`: once the first selfcheck has shown what a process and a case cost, the later two keep to the cases that fit.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_gate import plant

CHECKOUT = Path(__file__).parents[2]
COPIED = ("src", "csrc", "perf_baselines", "noxfile.py")
CONTEXTS = {f"verify-b1-c{context}-t9-h8-p1-bf16": context for context in (65_536, 16_384, 4096)}
SLOWED = next(iter(CONTEXTS))
SHARE = 0.05
INVALID_ENVIRONMENT = 4
PROCESSES, ALL_PROCESSES = 3, 8  # of a verdict "same", of a red one
Execute = Callable[..., "Ran"]
SETTLED_S = 12.0  # at most, that a command takes before its first process once the machine's files are cached


@dataclass(frozen=True)
class Ran:
    """A command: its exit code, its findings, when each line of its output came (seconds since it began)."""

    code: int
    findings: Mapping[str, Any]
    lines: Sequence[tuple[float, str]]

    @property
    def verdicts(self) -> dict[str, str]:
        return {found["name"]: found["verdict"] for found in self.findings.get("found", ())}

    def us(self) -> dict[str, float]:
        """{case: microseconds a layer}"""
        found = [f for f in self.findings.get("found", ()) if f["name"] in CONTEXTS and "us" in f["cells"]]
        return {f["name"]: float(f["cells"]["us"]) for f in found}


def run(tree: Path, arguments: Sequence[str], out: Path, log: IO[str], limit_s: float) -> Ran:
    """`python -m treemla arguments --json out` on `tree`; killed after `limit_s`."""
    command = [sys.executable, "-u", "-m", "treemla", *arguments, "--json", str(out)]
    say(log, f"$ cd {tree} && PYTHONPATH=src {shlex.join(command)}")
    path = os.pathsep.join(filter(None, (str(tree / "src"), os.environ.get("PYTHONPATH"))))
    began, lines = time.monotonic(), []
    out.unlink(missing_ok=True)  # an older one must not count
    child = subprocess.Popen(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(max(limit_s, 1.0), os.killpg, (child.pid, signal.SIGKILL))
    timer.start()
    try:
        for line in child.stdout:
            lines.append((time.monotonic() - began, line.rstrip()))
            say(log, f"{lines[-1][0]:6.1f} s  {lines[-1][1]}")
        code = child.wait()
    finally:
        timer.cancel()
    say(log, f"exit code {code} after {time.monotonic() - began:.0f} s")
    return Ran(code, json.loads(out.read_text()) if out.is_file() else {}, lines)


def say(log: IO[str], text: str) -> None:
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()


def cost(ran: Ran) -> tuple[float, float]:
    """(seconds to start the processes of a launch, seconds a case), of the last launch: the first ones warm up."""
    began = [at for at, line in ran.lines if line.startswith("process ")][-1]
    done = [at for at, line in ran.lines if line.startswith("  verify-") and at >= began]
    case_s = (done[-1] - began) / len(done) if len(done) < 2 else (done[-1] - done[0]) / (len(done) - 1)
    return max(done[0] - began - case_s, 0.0), case_s


def cases_that_fit(first: Ran, left_s: float) -> int:
    """How many cases the later two selfchecks may have, so that they and the red gate end in `left_s`; at least 1."""
    start_s, case_s = cost(first)
    red = SETTLED_S + ALL_PROCESSES * (start_s + case_s)
    for count in range(len(CONTEXTS), 1, -1):
        if red + 2 * (SETTLED_S + PROCESSES * (start_s + count * case_s)) <= left_s:
            return count
    return 1


def slowed_copy(to: Path, us: Mapping[str, float], log: IO[str]) -> None:
    """A copy of this checkout with the wait planted."""
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    mhz = float(asked_of_gpu("clocks.max.sm"))  # of a kernel that waits for memory, where nobody locked it lower
    fixed, per_64k = plant.clocks({CONTEXTS[case]: took for case, took in us.items()}, SHARE, mhz)
    plant.plant(to / "csrc", fixed, per_64k)
    say(log, f"planted: {fixed} clocks and {per_64k} a 65,536 tokens, {SHARE:.0%} of {dict(us)} us at {mhz} MHz")


def compiling(tree: Path) -> "subprocess.Popen[bytes]":
    """The process that compiles the kernels of `tree` for this GPU, beside whatever else runs; it imports no torch."""
    arch = f"sm_{asked_of_gpu('compute_cap').replace('.', '')}a"
    code = f"import nvcc, pathlib; nvcc.build(pathlib.Path('csrc'), {arch!r})"
    path = str(tree / "src" / "treemla")
    return subprocess.Popen([sys.executable, "-c", code], cwd=tree, env=os.environ | {"PYTHONPATH": path})


def asked_of_gpu(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def prove(
    out: Path, scratch: Path, commit: str | None, budget_s: float, log: IO[str], execute: Execute = run
) -> list[str]:
    """What is wrong; empty where all three selfchecks said same and the gate was red."""
    began = time.monotonic()
    left = lambda: budget_s - (time.monotonic() - began)  # noqa: E731 - read between the steps
    named = ("--commit", commit) if commit else ()
    wrong, cases, slowed = [], list(CONTEXTS), scratch / "slowed"
    made = compiling(CHECKOUT)
    for number in (1, 2, 3):
        if number == 3:  # the red gate before it: of all steps the one to be left without time is the least telling
            wrong += red(slowed, out, named, made, log, left(), execute)
        chosen = [part for case in cases for part in ("--case", case)]
        kept = scratch / f"sessions-{number}"
        arguments = ["selfcheck", *chosen, *named, "--out", str(kept)]
        ran = execute(CHECKOUT, arguments, out / f"selfcheck-{number}.json", log, left())
        verdicts = {case: ran.verdicts.get(case, "none") for case in cases}
        if ran.code != 0 or set(verdicts.values()) != {"same"}:
            wrong.append(f"selfcheck {number}: exit code {ran.code}, {verdicts}")
        if (kept / "sessions.jsonl").exists():
            with (out / "sessions.jsonl").open("a") as held:
                held.write((kept / "sessions.jsonl").read_text())
        if number == 1:
            if made.wait() or set(ran.us()) != set(CONTEXTS):
                return wrong or ["the kernels do not compile"]  # no times to derive a wait from
            cases = cases[: cases_that_fit(ran, left())]
            say(log, f"{left():.0f} s left: selfchecks 2 and 3 on {len(cases)} cases")
            slowed_copy(slowed, ran.us(), log)
            made = compiling(slowed)
    return wrong


def red(
    tree: Path,
    out: Path,
    named: Sequence[str],
    made: "subprocess.Popen[bytes]",
    log: IO[str],
    left_s: float,
    execute: Execute,
) -> list[str]:
    """What is wrong with the gate's word on the planted slowdown."""
    if code := made.wait():
        return [f"the slowed kernel does not compile: exit code {code}"]
    chosen = ("--base", str(CHECKOUT), "--no-triton", "--case", SLOWED)
    left = tree.parent / "red"  # the gate writes nothing into its base, where `out` may be
    ran = execute(tree, ["gate", *chosen, *named, "--out", str(left)], left / "gate.json", log, left_s)
    if ran.findings:
        shutil.copy(left / "gate.json", out / "gate.json")
    found = next((f for f in ran.findings.get("found", ()) if f["name"] == SLOWED), {})
    say(log, f"planted {SHARE:+.1%}: exit code {ran.code}, {found.get('verdict')}, {found.get('text')}")
    named_it = any(line.startswith(f"FAILED: {SLOWED}") for _, line in ran.lines)
    right = ran.code == 1 and found.get("verdict") == "regression" and named_it
    return [] if right else [f"gate on a slowdown of {SHARE:.0%}: exit code {ran.code}, {found.get('verdict')}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the findings, the sessions and the log")
    parser.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    parser.add_argument("--budget", type=float, default=900.0, metavar="S", help="seconds in all; default: %(default)s")
    asked = parser.parse_args()
    if not shutil.which("nvidia-smi"):
        print("nvidia-smi: not on PATH; the proof needs a GPU and its driver")
        return INVALID_ENVIRONMENT
    out = asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "sessions.jsonl").unlink(missing_ok=True)
    with (out / "proof.log").open("w") as log, tempfile.TemporaryDirectory() as scratch:
        wrong = prove(out, Path(scratch), asked.commit, asked.budget, log)
        say(log, "\n".join(wrong) if wrong else f"proven: same three times, and {SHARE:.0%} slower is red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

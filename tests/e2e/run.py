"""Real Engines with dummy weights on a GPU: do they say the same with treemla as with Triton, and how fast?

    python tests/e2e/run.py --out build/e2e                            every stage, then the verdict
    python tests/e2e/run.py --out build/e2e correctness rates          some of them
    python tests/e2e/run.py --out build/e2e verdict                    from results.jsonl alone, on any machine

Every answer set and every timing goes into results.jsonl when it is there, and what is there is not done again;
--resume takes such a file from elsewhere. Needs SGLang whole enough to start its Engine; treemla may be a checkout.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN_S = time.monotonic()
REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from e2e import report  # noqa: E402
from e2e.child import Child, EngineFailed  # noqa: E402

# Small engines that start and answer side by side: run, backend, fault.
ANSWERS = {
    "correctness": (
        ("ngram", "triton", None),
        ("ngram", "treemla", None),
        ("decode", "triton", None),
        ("decode", "treemla", None),
        ("ngram", "treemla", "causal"),
        ("ngram", "treemla", "piece"),
        ("ngram", "treemla", "length"),
        ("standalone", "triton", None),
        ("standalone", "treemla", None),
    ),
    "more": (
        ("churn", "treemla", None),
        ("churn-compact", "treemla", None),
        ("churn-compact", "treemla", "holder"),
        ("shadow", "treemla-shadow", None),
        ("shadow", "treemla-shadow", "causal"),
    ),
}
STAGES = (*ANSWERS, "rates")
TOGETHER = 5  # small engines on the GPU
CONTEXTS = (65_536, 16_384, 4096)  # the longest first: its cache begins the others'
STARTS = 2
TURNS = 2  # of each backend in a start, at each context
# Tokens of the answers: one that warms up, and one that is timed from its first tokens on.
TIMED = (64, 1024)
SLOW = {65_536: (32, 96), 16_384: (32, 160)}  # ... of Triton, whose steps take up to 0.8 s
PROFILED = (CONTEXTS[-1], CONTEXTS[0])
PROFILED_TOKENS = 60
START_S, ANSWERS_S, PREFILL_S, TIMING_S, PROFILE_S = 300, 180, 120, 60, 60  # how long each may take ...
NEEDED_S = {"start": 100, "timing": 20, "profile": 35}  # ... and what must be left of --seconds to begin one
LOGGED = 400  # lines of an engine
FIRST_PORT = 31_000


class Book:
    """results.jsonl: one record a finished piece of work, by its key."""

    def __init__(self, path: Path, commit: str | None = None) -> None:
        self.path, self.commit, self.lock = path, commit, threading.Lock()
        self.held = {}
        if path.exists():
            whole, newline, half = path.read_bytes().rpartition(b"\n")
            if half:  # of a run that was killed
                path.write_bytes(whole + newline)
            self.held = {record["key"]: record for record in map(record_of, enumerate(whole.splitlines(), 1))}

    def add(self, key: str, record: dict[str, Any]) -> None:
        with self.lock:
            self.held[key] = {"key": key, "where": where(self.commit)} | record
            with self.path.open("a") as file:
                file.write(json.dumps(self.held[key]) + "\n")


def record_of(numbered: tuple[int, bytes]) -> dict[str, Any]:
    number, line = numbered
    try:
        record = json.loads(line)
        record["key"]
    except (ValueError, TypeError, KeyError):
        raise SystemExit(f"results.jsonl:{number}: expected a record with a key, got {line[:80]!r}") from None
    return dict(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}, verdict; default: all of them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a results.jsonl to go on from")
    parser.add_argument("--work", type=Path, default=Path("/tmp/treemla-e2e"), help="logs, models and traces")
    parser.add_argument("--seconds", type=float, default=3600, help="nothing begins that would take longer than these")
    parser.add_argument("--commit", help="of treemla, where the copy has no git history")
    given = parser.parse_args()
    stages = given.stages or [*STAGES, "verdict"]
    unknown = set(stages) - {*STAGES, "verdict"}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    if given.resume and not given.resume.is_file():
        parser.error(f"--resume: expected a results.jsonl, got {given.resume}")
    if given.resume and not results.exists():
        shutil.copyfile(given.resume, results)
    book = Book(results, given.commit)
    failures = []
    try:
        failures = perform(stages, book, given)
    finally:
        keep_logs(given.work, given.out / "logs.txt")
    if "verdict" in stages:
        failures += report.write(list(book.held.values()), given.out)
    return int(bool(failures))


def perform(stages: list[str], book: Book, given: argparse.Namespace) -> list[str]:
    """Everything that is missing. The first large engines load while the small ones answer. Returns what failed."""
    asked = [
        one for stage in ANSWERS if stage in stages for one in ANSWERS[stage] if answers_key(*one) not in book.held
    ]
    starts = [start for start in range(STARTS) if "rates" in stages and any(missing(book, start).values())]
    if asked or starts:
        build_kernels()
    failures = []
    with large_engines(book, given, starts[0]) if starts else contextlib.nullcontext({}) as children:
        failures += ask_all(book, given, asked)
        if starts:
            failures += measure(book, given, starts[0], children)
    for start in starts[1:]:
        if seconds_left(given) < NEEDED_S["start"]:
            say(f"start {start}: not begun, {seconds_left(given):.0f} s are left")
            continue
        with large_engines(book, given, start) as children:
            failures += measure(book, given, start, children)
    still = [key for start in starts for keys in missing(book, start).values() for key in keys]
    return failures + [f"{key}: not done" for key in still]


def ask_all(book: Book, given: argparse.Namespace, asked: list[tuple[str, str, str | None]]) -> list[str]:
    ports = range(FIRST_PORT, FIRST_PORT + 100 * len(asked), 100)
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        futures = [pool.submit(ask_answers, book, given, *one) for one in zip(asked, ports, strict=True)]
    failures = ["".join(traceback.format_exception_only(error)) for f in futures if (error := f.exception())]
    for failure in failures:
        say(failure)
    return failures


def answers_key(run: str, backend: str, fault: str | None) -> str:
    return "-".join(filter(None, ["answers", run, backend, fault]))


def ask_answers(book: Book, given: argparse.Namespace, which: tuple[str, str, str | None], port: int) -> None:
    run, backend, fault = which
    key = answers_key(*which)
    command: dict[str, Any] = {"do": "answers", "short": fault is not None or run == "shadow"}
    if run.startswith("churn"):
        command = {"do": "churn"}
    with Child(given.work / key, port, "small", run, backend, fault) as child:
        ready = child.wait_ready(START_S)
        say(f"{key}: ready after {ready['ready_s']:.0f} s")
        made = child.ask(command | {"folder": str(child.folder)}, ANSWERS_S)
        book.add(key, {"run": run, "backend": backend, "fault": fault, "ready": ready} | made)
        say(f"{key}: {len(made['answers'])} answers in {made['took_s']:.0f} s, {made['counts']}")


def in_turns(start: int) -> list[str]:
    """The backends as they are timed at a context, every other start the other way round."""
    order = ("triton", "treemla") if start % 2 == 0 else ("treemla", "triton")
    return [backend for turn in range(TURNS) for backend in (order if turn % 2 == 0 else reversed(order))]


def rates_keys(start: int, backend: str, context: int) -> list[str]:
    return [f"rates-{start}-{backend}-{context}-{turn}" for turn in range(TURNS)]


def missing(book: Book, start: int) -> dict[str, list[str]]:
    """Backend -> keys of what its engine of this start has still to be asked; the last start's are profiled too."""
    made = {}
    for backend in dict.fromkeys(in_turns(start)):
        keys = [key for context in CONTEXTS for key in rates_keys(start, backend, context)]
        keys += [f"profile-{backend}-{context}" for context in PROFILED] if start == STARTS - 1 else []
        made[backend] = [key for key in keys if key not in book.held]
    return made


@contextlib.contextmanager
def large_engines(book: Book, given: argparse.Namespace, start: int) -> Iterator[dict[str, Child]]:
    """Those of a start that have something to be asked, by backend: loading, not yet ready."""
    with contextlib.ExitStack() as stack:
        children = {}
        for nth, backend in enumerate(backend for backend, keys in missing(book, start).items() if keys):
            folder, port = given.work / f"rates-{start}-{backend}", FIRST_PORT + 5000 + 1000 * start + 100 * nth
            children[backend] = stack.enter_context(Child(folder, port, "slice", "ngram", backend))
        yield children


def measure(book: Book, given: argparse.Namespace, start: int, children: dict[str, Child]) -> list[str]:
    """Tokens a second of a start's engines, and where their time goes. Nothing else is on the GPU. Returns what failed."""
    try:
        ready = {backend: child.wait_ready(START_S) for backend, child in children.items()}
        say(f"start {start}: ready after {[round(held['ready_s']) for held in ready.values()]} s")
        for backend, child in children.items():  # the cache, then a request that finds it: nothing compiles later
            filled = child.ask({"do": "rate", "context": CONTEXTS[0], "tokens": [1, 20]}, PREFILL_S)
            say(f"start {start}: {backend} prefilled {CONTEXTS[0]} in {filled['timed'][0]['seconds']:.1f} s")
        for context in CONTEXTS:
            time_in_turns(book, given, start, children, context)
        if start == STARTS - 1:
            profile(book, given, children)
    except EngineFailed as error:
        say(str(error))
        return [str(error)]
    return []


def time_in_turns(book: Book, given: argparse.Namespace, start: int, children: dict[str, Child], context: int) -> None:
    keys = {backend: iter(rates_keys(start, backend, context)) for backend in in_turns(start)}
    for backend in in_turns(start):
        key = next(keys[backend])
        if key in book.held or backend not in children or not is_time_for("timing", key, given):
            continue
        tokens = SLOW.get(context, TIMED) if backend == "triton" else TIMED
        said = children[backend].ask({"do": "rate", "context": context, "tokens": [*tokens]}, TIMING_S)
        book.add(key, {"backend": backend, "start": start} | said)
        say(f"{key}: {report.rate_of(said['timed'][-1])[0]:.1f} tokens/s, took {said['took_s']:.0f} s")


def profile(book: Book, given: argparse.Namespace, children: dict[str, Child]) -> None:
    """What a step is made of, at a short and at a long context."""
    for context in PROFILED:
        for backend, child in children.items():
            key = f"profile-{backend}-{context}"
            if key in book.held or not is_time_for("profile", key, given):
                continue
            command = {"do": "profile", "context": context, "new_tokens": PROFILED_TOKENS, "folder": str(child.folder)}
            made = child.ask(command, PROFILE_S)
            book.add(key, {"backend": backend} | made)
            say(f"{key}: {report.step_line(made['steps'])}")


def seconds_left(given: argparse.Namespace) -> float:
    return BEGIN_S + given.seconds - time.monotonic()


def is_time_for(what: str, key: str, given: argparse.Namespace) -> bool:
    if seconds_left(given) >= NEEDED_S[what]:
        return True
    say(f"{key}: not begun, {seconds_left(given):.0f} s are left")
    return False


@functools.cache
def where(commit: str | None) -> dict[str, Any]:
    """This machine, as the result schema has it."""
    from treemla.gate import fingerprint

    return dataclasses.asdict(dataclasses.replace(fingerprint.collect(commit), command="python tests/e2e/run.py"))


def keep_logs(work: Path, path: Path) -> None:
    """The end of every engine's log in one file."""
    logs = sorted(work.glob("*/log.txt"))
    if not logs:
        return
    with path.open("w") as file:
        for log in logs:
            lines = log.read_text(errors="replace").splitlines()[-LOGGED:]
            print(f"=== {log.parent.name}", *lines, sep="\n", file=file)


def build_kernels() -> None:
    """Once, before engines ask for them side by side."""
    import torch

    from treemla import cubins

    device = torch.device("cuda", torch.cuda.current_device())
    say(f"kernels: {cubins.cubin_path(cubins.target_of(device).arch)}")


def say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')} {time.monotonic() - BEGIN_S:4.0f} s] {what}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

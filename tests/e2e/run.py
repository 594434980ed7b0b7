"""Real Engines with dummy weights on a GPU: do they say the same with treemla as with Triton, and how fast?

    python tests/e2e/run.py --out build/e2e                        every stage, then the verdict
    python tests/e2e/run.py --out build/e2e correctness            one stage
    python tests/e2e/run.py --out build/e2e verdict                from results.jsonl alone, on any machine

What is in results.jsonl is not done again; --resume takes such a file from elsewhere. Needs SGLang whole enough to start
its Engine; treemla may be a checkout.
"""

import argparse
import concurrent.futures
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from e2e import report  # noqa: E402
from e2e.child import Child, EngineFailed  # noqa: E402

# Reference first: if it does not start, nothing else is tried. Run, backend, fault.
ANSWERS = (
    ("ngram", "triton", None),
    ("ngram", "treemla", None),
    ("decode", "triton", None),
    ("decode", "treemla", None),
    ("ngram", "treemla", "causal"),
    ("ngram", "treemla", "piece"),
    ("ngram", "treemla", "length"),
    ("standalone", "triton", None),
    ("standalone", "treemla", None),
)
TOGETHER = 5  # small engines that start and answer side by side on one GPU
CONTEXTS = (65_536, 16_384, 4096)  # the longest first: its cache begins the others'
STARTS = 2
SHORT_LONG = {True: (32, 160), False: (64, 512)}  # tokens of the answers whose difference is timed; True: slow steps
PROFILED_TOKENS = 90
LOGGED = 400  # lines of an engine
FIRST_PORT = 31_000


class Book:
    """results.jsonl: one record a finished piece of work, by its key."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.held = {}
        if path.exists():
            self.held = {record["key"]: record for record in map(json.loads, path.read_text().splitlines())}

    def add(self, key: str, record: dict[str, Any]) -> None:
        with self.lock:
            self.held[key] = {"key": key} | record
            with self.path.open("a") as file:
                file.write(json.dumps(self.held[key]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}, verdict; default: all of them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a results.jsonl to go on from")
    parser.add_argument("--work", type=Path, default=Path("/tmp/treemla-e2e"), help="logs, models and traces")
    parser.add_argument("--one-at-a-time", action="store_true", help="no two large engines on the GPU together")
    parser.add_argument("--seconds", type=float, default=3600, help="no stage begins after so many")
    parser.add_argument("--commit", help="of treemla, where the copy has no git history")
    given = parser.parse_args()
    unknown = set(given.stages) - {*STAGES, "verdict"}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    if given.resume and not results.exists():
        shutil.copy(given.resume, results)
    book, begin, failed = Book(results), time.monotonic(), False
    for name in given.stages or [*STAGES, "verdict"]:
        if name not in STAGES:
            continue
        if time.monotonic() - begin > given.seconds:
            say(f"{name}: not begun, {given.seconds} s are over")
            failed = True
            continue
        try:
            STAGES[name](book, given)
        except EngineFailed as error:
            say(str(error))
            failed = True
    keep_logs(given.work, given.out / "logs.txt")
    if not given.stages or "verdict" in given.stages:
        failed |= report.write(list(book.held.values()), given.out, given.commit) > 0
    return int(failed)


def correctness(book: Book, given: argparse.Namespace) -> None:
    """Answers of every run, backend and fault: the first engine alone, then several at a time."""
    wanted = [one for one in ANSWERS if answers_key(*one) not in book.held]
    if not wanted:
        return
    build_kernels()
    started = threading.Event()
    ports = iter(range(FIRST_PORT, FIRST_PORT + 100 * len(wanted), 100))
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        first = pool.submit(ask_answers, book, given, wanted[0], next(ports), started.set)
        while not started.wait(1):
            if first.done():
                first.result()  # raises why
        others = [pool.submit(ask_answers, book, given, one, next(ports), bool) for one in wanted[1:]]
        failures = [error for done in (first, *others) if (error := done.exception())]
    if failures:
        raise EngineFailed("\n".join(map(str, failures)))


def answers_key(run: str, backend: str, fault: str | None) -> str:
    return "-".join(filter(None, ["answers", run, backend, fault]))


def ask_answers(
    book: Book, given: argparse.Namespace, which: tuple[str, str, str | None], port: int, on_ready: Callable[[], Any]
) -> None:
    run, backend, fault = which
    key = answers_key(*which)
    with Child(given.work / key, port, "small", run, backend, fault) as child:
        ready = child.wait_ready()
        on_ready()
        say(f"{key}: ready after {ready['ready_s']:.0f} s")
        made = child.ask({"do": "answers", "folder": str(child.folder), "short": fault is not None}, 240)
        book.add(key, {"run": run, "backend": backend, "fault": fault, "ready": ready} | made)
        say(f"{key}: {len(made['answers'])} answers in {made['took_s']:.0f} s, {made['counts']}")


def rates(start: int) -> Callable[[Book, argparse.Namespace], None]:
    """Tokens a second of both backends from one start of each, measured in turns."""

    def stage(book: Book, given: argparse.Namespace) -> None:
        backends = ("triton", "treemla") if start % 2 == 0 else ("treemla", "triton")
        groups = [(one,) for one in backends] if given.one_at_a_time else [backends]
        for group in groups:
            missing = [one for one in group if f"rates-{start}-{one}" not in book.held]
            if missing:
                measure_group(book, given, start, tuple(missing))

    return stage


def measure_group(book: Book, given: argparse.Namespace, start: int, backends: tuple[str, ...]) -> None:
    build_kernels()
    children: dict[str, Child] = {}
    made: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
    try:
        for nth, backend in enumerate(backends):
            folder = given.work / f"rates-{start}-{backend}"
            children[backend] = Child(folder, FIRST_PORT + 5000 + 100 * nth, "slice", "ngram", backend)
        ready = {backend: child.wait_ready() for backend, child in children.items()}
        say(f"rates {start}: ready after {[round(held['ready_s']) for held in ready.values()]} s")
        for backend in backends:  # the cache, one engine after the other
            filled = children[backend].ask({"do": "rate", "context": CONTEXTS[0], "tokens": [1]}, 200)
            say(f"rates {start}: {backend} prefilled {CONTEXTS[0]} in {filled['took_s']:.1f} s")
        for context in CONTEXTS:
            for backend in (*backends, *backends[::-1]):
                tokens = SHORT_LONG[backend == "triton" and context > 10_000]
                said = children[backend].ask({"do": "rate", "context": context, "tokens": [*tokens]}, 200)
                made[backend].append(said)
                say(f"rates {start}: {backend} at {context}: {report.rate_of(said['timed'])[0]:.1f} tokens/s")
        for backend in backends:
            record = {"backend": backend, "start": start, "ready": ready[backend], "rates": made[backend]}
            book.add(f"rates-{start}-{backend}", record)
        if start == 0:
            profile(book, children)
    finally:
        for child in children.values():
            child.__exit__(*sys.exc_info())


def profile(book: Book, children: dict[str, Child]) -> None:
    """What a step is made of, at a short and at a long context; Triton's long one takes a second a step."""
    for backend, child in children.items():
        for context in (CONTEXTS[-1], CONTEXTS[0]):
            command = {"do": "profile", "context": context, "new_tokens": PROFILED_TOKENS, "folder": str(child.folder)}
            try:
                made = child.ask(command, 150)
            except EngineFailed as error:  # the rates are in the book already
                say(str(error))
                return
            book.add(f"profile-{backend}-{context}", {"backend": backend} | made)
            say(f"profile: {backend} at {context}: {report.step_line(made['steps'])}")


def keep_logs(work: Path, path: Path) -> None:
    """The end of every engine's log in one file."""
    with path.open("w") as file:
        for log in sorted(work.glob("*/log.txt")):
            print(
                f"=== {log.parent.name}", *log.read_text(errors="replace").splitlines()[-LOGGED:], sep="\n", file=file
            )


def build_kernels() -> None:
    """Once, before engines ask for them side by side."""
    import torch

    from treemla import cubins

    device = torch.device("cuda", torch.cuda.current_device())
    say(f"kernels: {cubins.cubin_path(cubins.target_of(device).arch)}")


def say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


STAGES: dict[str, Callable[[Book, argparse.Namespace], None]] = {
    "correctness": correctness,
    **{f"rates-{start}": rates(start) for start in range(STARTS)},
}

if __name__ == "__main__":
    raise SystemExit(main())

"""What ran where, and passed: a line a layer in build/ran.jsonl, kept in docs/ran.jsonl, shown in docs/supported.md.

python -m treemla.gate.ran --add FILES..    keep what these files hold and write the page anew
"""

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from treemla.gate import fingerprint
from treemla.gate.fingerprint import REPO
from treemla.gate.records import made_of, parsed, text_of

HERE = REPO / "build/ran.jsonl"
KEPT = REPO / "docs/ran.jsonl"
PAGE = REPO / "docs/supported.md"
HEAD = """# Supported versions

What each layer passed with, the newest run of a kind; other versions were not tried. Written by
`python -m treemla.gate.ran --add FILES..` from the `ran.jsonl` that every run of a layer leaves in `build/`; CI keeps
those among its reports.
"""
COLUMNS = ("layer", "tests", "SGLang", "torch", "triton", "GPU", "driver", "Python", "commit", "date")


@dataclass(frozen=True)
class Ran:
    """A layer that passed. None: not there. gpu: "none" on a CPU. treemla: the commit."""

    layer: str
    tests: int
    python: str
    torch: str
    triton: str | None
    sglang: str | None
    gpu: str
    driver: str | None
    treemla: str
    date: str

    @property
    def kind(self) -> tuple[str | None, ...]:
        """Of these the newest is kept; a build of torch for another CUDA is no other kind."""
        return self.layer, self.python, self.torch.partition("+")[0], self.sglang, self.gpu, self.driver

    @property
    def cells(self) -> tuple[str, ...]:
        held = (self.layer, self.tests, self.sglang, self.torch, self.triton, self.gpu, self.driver, self.python)
        commit = self.treemla[:7] + ("-dirty" if self.treemla.endswith("-dirty") else "")
        return (*(str(text or "-").replace("none", "-") for text in held), commit, self.date[:10])


def record(layer: str, tests: int, on_gpu: bool, path: Path = HERE) -> None:
    """Add a line for a layer that has just passed here. A layer that leaves the GPU alone says nothing of it."""
    where = fingerprint.collect()
    made = Ran(
        layer, tests, ".".join(platform.python_version_tuple()[:2]), where.torch, where.triton, where.sglang,
        where.gpu if on_gpu else "none", where.driver if on_gpu else None, where.treemla, where.date,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as held:
        held.write(json.dumps(asdict(made), sort_keys=True) + "\n")


def load(path: Path) -> list[Ran]:
    """ValueError names the line that is no such record."""
    made = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            made.append(made_of(Ran, parsed(line)))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: expected a layer that ran, got {line[:80]!r}: {error}") from error
    return made


def newest(runs: Iterable[Ran]) -> list[Ran]:
    """One of each kind, in the order of the page."""
    held = {run.kind: run for run in sorted(runs, key=lambda run: run.date)}
    return sorted(held.values(), key=lambda run: (run.gpu != "none", run.layer, str(run.kind)))


def page(runs: Sequence[Ran]) -> str:
    rows = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in run.cells)} |" for run in newest(runs)]
    return "\n".join([HEAD, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[])
    parser.add_argument("--commit", help="of added runs whose copy had no git history")
    asked = parser.parse_args()
    added = [run for path in asked.add for run in load(path)]
    if asked.commit:
        added = [replace(run, treemla=asked.commit) if run.treemla == "unknown" else run for run in added]
    runs = newest([*(load(KEPT) if KEPT.exists() else []), *added])
    KEPT.write_text("".join(json.dumps(asdict(run), sort_keys=True) + "\n" for run in runs))
    PAGE.write_text(page(runs))


if __name__ == "__main__":
    main()

"""What trying the faults of catalogue.toml showed, kept in outcomes.json, and docs/mutants.md, which is made from both."""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).parents[2] / "docs/mutants.md"
GATES = ("kernel", "graph", "schedule", "input", "allocator", "perf", "static", "report")
MUST_BE_COMPLETE = ("perf", "static", "report")  # what decides whether a change may be merged
HEAD = """# Planted faults

Each is applied to a copy of the checkout, whose tests must then fail, and pass without it. Written by `nox -s mutants`
and, for those marked GPU, `nox -s gpu-mutants`; a fault whose entry in `tests/mutants/catalogue.toml` changed since
counts as not tried.
"""


def digest(mutant: Mapping[str, Any]) -> str:
    """Of what the outcome hangs on in the catalogue: an edited fault is another fault."""
    said = json.dumps([mutant[key] for key in ("file", "old", "new", "tests")])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def record(found: Iterable[tuple[Mapping[str, Any], bool, str]], commit: str, path: Path = OUTCOMES) -> None:
    """Add (mutant, whether it was noticed, the test that did) to those kept; the newest of a name counts."""
    held = load(path)
    for mutant, noticed, by in found:
        held[mutant["name"]] = {"by": by, "commit": commit, "digest": digest(mutant), "noticed": noticed}
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")


def load(path: Path = OUTCOMES) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def page(mutants: Sequence[Mapping[str, Any]], outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row a gate, then a row a fault."""
    word = {mutant["name"]: verdict(mutant, outcomes.get(mutant["name"])) for mutant in mutants}
    lines = [HEAD, "| gate | faults | noticed | survived | not tried |", "|---|---|---|---|---|"]
    for gate in (*GATES, None):
        words = [word[m["name"]] for m in mutants if gate in (None, m["gate"])]
        counts = [words.count(verdict) for verdict in ("noticed", "SURVIVED", "not tried")]
        lines.append(f"| {gate or 'all'} | {len(words)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| fault | gate | | noticed by | at |", "|---|---|---|---|---|"]
    for mutant in sorted(mutants, key=lambda m: GATES.index(m["gate"])):
        name = mutant["name"]
        held = outcomes[name] if word[name] != "not tried" else {"by": "-", "commit": "-"}
        by = f"`{held['by'].rpartition('::')[2] or held['by']}`" if word[name] == "noticed" else "-"
        where = " (GPU)" if mutant.get("device") == "cuda" else ""
        lines.append(
            f"| {name} | {mutant['gate']}{where} | {word[name]} | {by.replace('|', '&#124;')} | {held['commit'][:7]} |"
        )
    return "\n".join(lines) + "\n"


def verdict(mutant: Mapping[str, Any], outcome: Mapping[str, Any] | None) -> str:
    if outcome is None or outcome["digest"] != digest(mutant):
        return "not tried"
    return "noticed" if outcome["noticed"] else "SURVIVED"


def write() -> None:
    mutants = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())["mutant"]
    PAGE.write_text(page(mutants, load()))


if __name__ == "__main__":
    write()

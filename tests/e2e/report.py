"""What was measured, as tables and as measurements of the result schema. Pure but for the files it writes."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from e2e import judge

BARS = {4096: 1.8, 16_384: 3.5, 65_536: 12.0}  # treemla over Triton, tokens a second


def rate_of(long: dict[str, Any], short: dict[str, Any] | None = None) -> tuple[float, float, float]:
    """Tokens a second, milliseconds a step, tokens a step: of an answer from its first tokens on or, in records that lack
    their time, less a short answer, which is the same admission and fewer steps."""
    short = long.get("first") or short
    seconds, tokens = long["seconds"] - short["seconds"], long["tokens"] - short["tokens"]
    steps = long["steps"] - short["steps"]
    return tokens / seconds, 1000 * seconds / steps, tokens / steps


def samples(records: Iterable[dict[str, Any]]) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """(context, backend) -> rate of each long answer, over all starts. Where a short answer is taken off it is the one that
    speaks against treemla: admission of a 65k prompt takes 0.6 s or twice that, as long as many of its steps, so of
    treemla's the quickest and of Triton's the slowest."""
    timed: dict[tuple[int, str], list[list[dict[str, Any]]]] = {}
    for record in records:
        if record["key"].startswith("rates-"):
            timed.setdefault((record["context"], record["backend"]), []).append(record["timed"])
    made = {}
    for key, held in timed.items():
        shorts = sorted((one[-2] for one in held), key=lambda said: said["seconds"])
        made[key] = [rate_of(one[-1], shorts[0 if key[1] == "treemla" else -1]) for one in held]
    return made


def measurements(records: list[dict[str, Any]], where: Any) -> list[Any]:
    """As the result schema has them: `engine-b1-c65536-ngram9-61x48-treemla`, its tokens a second and step."""
    from treemla.gate.schema import Measurement

    made = []
    for (context, backend), held in sorted(samples(records).items()):
        case = f"engine-b1-c{context}-ngram9-61x48-{backend}"
        made.append(Measurement.of(case, "decode", "tokens/s", [rate for rate, _, _ in held], where))
        made.append(Measurement.of(case, "step", "ms", [step for _, step, _ in held], where))
    return made


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Medians of the rates, and the bar."""
    held = samples(records)
    yield "| context | Triton, tokens/s | treemla, tokens/s | faster | bar | Triton, ms a step | treemla, ms a step |"
    yield "|---|---|---|---|---|---|---|"
    for context, bar in BARS.items():
        both = [held.get((context, backend), []) for backend in ("triton", "treemla")]
        if not all(both):
            yield f"| {context} | not measured | | | {bar} | | |"
            continue
        (old, old_ms), (new, new_ms) = ([statistics.median(s[i] for s in one) for i in (0, 1)] for one in both)
        yield f"| {context} | {old:.1f} | {new:.1f} | {new / old:.1f} | {bar} | {old_ms:.1f} | {new_ms:.1f} |"


def step_line(steps: dict[str, Any]) -> str:
    groups = ", ".join(f"{name} {g['us'] / 1000:.2f} ms in {g['kernels']:.0f}" for name, g in steps["groups"].items())
    return f"{steps['step_us'] / 1000:.2f} ms a step, idle {steps['idle_us'] / 1000:.2f} ms; {groups}"


def write(records: list[dict[str, Any]], out: Path) -> list[str]:
    """Print the verdict and the tables, write out/e2e.jsonl, which says where and when the rates were measured. Returns
    what failed."""
    failed = []
    for what, found, wrong in judge.judge(records):
        failed += [what] if wrong else []
        print(f"{'FAILED' if wrong else 'ok'}  {what}: {found}", *(f"        {one}" for one in wrong), sep="\n")
    print(*table(records), sep="\n")
    for record in records:
        if record["key"].startswith("profile-"):
            print(f"{record['backend']} at {record['context']}: {step_line(record['steps'])}")
            for one in record["steps"]["longest"]:
                print(f"    {one['us']:9.1f} us in {one['count']:6.1f}  {one['group']}: {one['kernel']}")
    for context in missed(records):
        print(f"FAILED  {context} tokens: not measured, or not {BARS[context]} times as fast")
        failed.append(f"{context} tokens")
    wheres = {record["key"]: record.get("where") for record in records}
    commits = {held and held["treemla"] for held in wheres.values()}
    print(f"records of treemla {', '.join(sorted(map(str, commits)))}")
    timed = [held for key, held in wheres.items() if key.startswith("rates-")]
    machines = {held and (held["gpu"], held["driver"], held["treemla"]) for held in timed}
    if len(machines) > 1 or None in machines:
        print(f"FAILED  rates: expected records of one GPU, driver and commit, got {machines}")
        return [*failed, "rates"]
    if timed:
        from treemla.gate import schema

        schema.dump(out / "e2e.jsonl", measurements(records, schema.Where(**timed[0])))
    return failed


def missed(records: list[dict[str, Any]]) -> list[int]:
    """Contexts at which treemla was not measured to be BARS times as fast, by the medians."""
    held = samples(records)

    def median(context: int, backend: str) -> float:
        return statistics.median(rate for rate, _, _ in held.get((context, backend), [(0.0, 0.0, 0.0)]))

    return [n for n, bar in BARS.items() if not median(n, "treemla") >= bar * median(n, "triton") > 0]

"""The verdict over results.jsonl, and its figures as measurements. Pure but for the files it writes."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e import agree

MIN_LATER_CHILDREN = 50  # accepted tokens that were not a first child, an engine
MIN_TOKENS = 800  # compared, a run
CLEAR = 3  # complaints: a fault must show in more than one answer
BARS = {4096: 1.8, 16_384: 3.5, 65_536: 12.0}  # treemla over Triton, tokens a second
FAULTS = ("causal", "piece", "length")
RUNS = ("ngram", "decode", "standalone")


def answers_of(record: dict[str, Any]) -> dict[str, agree.Answer]:
    fields = ("tokens", "logprobs", "leads")
    named = {name: held for name, held in record["answers"].items() if "tokens" in held}
    return {name: agree.Answer(*(tuple(held[field]) for field in fields)) for name, held in named.items()}


def rounding_of(records: Iterable[dict[str, Any]]) -> agree.Spread:
    """Triton's own spread: every prompt's answers in all rounds of its runs with and without speculation."""
    by_prompt: dict[str, list[agree.Answer]] = {}
    for record in records:
        if record["backend"] == "triton" and record["run"] in ("ngram", "decode"):
            for name, answer in answers_of(record).items():
                by_prompt.setdefault(name.partition("/")[2], []).append(answer)
    return agree.own_spread(by_prompt)


def judge(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[str]]]:
    """(what was judged, what was found, what is wrong) of every comparison; missing answers are wrong."""
    held = {(r["run"], r["backend"], r["fault"]): r for r in records if r["key"].startswith("answers-")}
    rounding = rounding_of(held.values())
    yield "Triton against itself", line(rounding), []
    for run in RUNS:
        pair = [held.get((run, backend, None)) for backend in ("triton", "treemla")]
        if None in pair:
            yield run, "not run", ["answers are missing"]
            continue
        yield judge_run(run, *pair, rounding)
    for fault in FAULTS:
        pair = [held.get(("ngram", "triton", None)), held.get(("ngram", "treemla", fault))]
        if None in pair:
            yield f"fault {fault}", "not run", ["answers are missing"]
            continue
        yield judge_fault(fault, *pair, rounding)


def judge_run(
    run: str, triton: dict[str, Any], treemla: dict[str, Any], rounding: agree.Spread
) -> tuple[str, str, list[str]]:
    found = agree.compare(answers_of(triton), answers_of(treemla), rounding)
    wrong = list(found.faults)
    if found.spread.count < MIN_TOKENS:
        wrong.append(f"{found.spread.count} tokens compared, expected {MIN_TOKENS}")
    for record in (triton, treemla) if run != "decode" else ():
        later = (record["counts"] or {}).get("later_children", 0)
        if later < MIN_LATER_CHILDREN:
            wrong.append(f"{record['backend']}: {later} later children accepted, expected {MIN_LATER_CHILDREN}")
    for name, held in treemla["answers"].items():
        if name.startswith("cached/") and not held["cached"]:
            wrong.append(f"{name}: nothing came from the cache")
    victims = treemla["answers"].get("abort", {}).get("victims", [])
    if not victims or not all(8 < had < 480 for had in victims):
        wrong.append(f"aborted after {victims} tokens, expected two answers cut short")
    return run, f"{line(found.spread)}, {found.ties} ties, {treemla['counts']}", wrong


def judge_fault(
    fault: str, triton: dict[str, Any], faulty: dict[str, Any], rounding: agree.Spread
) -> tuple[str, str, list[str]]:
    """A fault is noticed where the same comparison fails, and not by one answer alone."""
    reference = answers_of(triton)
    answers = {name: answer for name, answer in answers_of(faulty).items() if name in reference}
    found = agree.compare({name: reference[name] for name in answers}, answers, rounding)
    wrong = [] if answers and len(found.faults) >= CLEAR else [f"noticed {len(found.faults)} times, expected {CLEAR}"]
    return f"fault {fault}", f"{line(found.spread)}, {len(found.faults)} complaints", wrong


def line(spread: agree.Spread) -> str:
    return f"{spread.count} tokens, log-probabilities apart {spread.rms:.4f} rms, {spread.worst:.4f} at worst"


def rate_of(timed: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Tokens a second, milliseconds a step, tokens a step: of the long answer less the short one."""
    short, long = timed[-2], timed[-1]
    seconds, tokens = long["seconds"] - short["seconds"], long["tokens"] - short["tokens"]
    steps = long["steps"] - short["steps"]
    return tokens / seconds, 1000 * seconds / steps, tokens / steps


def samples(records: Iterable[dict[str, Any]]) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """(context, backend) -> rate_of each time it was measured, over all starts."""
    made: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for record in records:
        if record["key"].startswith("rates-"):
            for said in record["rates"]:
                made.setdefault((said["context"], record["backend"]), []).append(rate_of(said["timed"]))
    return made


def median_rate(held: list[tuple[float, float, float]]) -> float:
    """Tokens a second; 0 where nothing was measured."""
    return statistics.median(rate for rate, _, _ in held) if held else 0.0


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


def write(records: list[dict[str, Any]], out: Path, commit: str | None) -> int:
    """Print the verdict and the tables, write out/e2e.jsonl. Returns how many judgements failed."""
    failed = 0
    for what, found, wrong in judge(records):
        failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok'}  {what}: {found}", *(f"        {one}" for one in wrong), sep="\n")
    print(*table(records), sep="\n")
    for record in records:
        if record["key"].startswith("profile-"):
            print(f"{record['backend']} at {record['context']}: {step_line(record['steps'])}")
            for one in record["steps"]["longest"]:
                print(f"    {one['us']:9.1f} us in {one['count']:6.1f}  {one['group']}: {one['kernel']}")
    if samples(records):
        from treemla.gate import fingerprint, schema

        where = replace(fingerprint.collect(commit), command="python tests/e2e/run.py")
        schema.dump(out / "e2e.jsonl", measurements(records, where))
    return failed

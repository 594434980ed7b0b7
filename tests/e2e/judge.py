"""The verdict over the answers in results.jsonl. Pure."""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from e2e import agree

MIN_LATER_CHILDREN = 50  # accepted tokens that were not a first child, an engine
MIN_TOKENS = 800  # compared, a run
CLEAR = 3  # complaints: a fault must show in more than one answer
MIN_COMPACTIONS = 5
MIN_MOVED = 500  # slots, over all compactions
MIN_HIT = 1000  # tokens that came from the cache after a compaction
MIN_COMPARED = 100  # layers, by a shadow
FAULTS = ("causal", "piece", "length")
RUNS = ("ngram", "decode", "standalone")
MORE = ("churn", "fault holder", "shadow", "shadow of fault causal")
JUDGED = ("Triton against itself", *RUNS, *(f"fault {fault}" for fault in FAULTS), *MORE)

MOVED = re.compile(r"treemla: moved (\d+) of .* mean run ([\d.]+) -> ([\d.]+)")
COMPARED = re.compile(r"treemla: compared step \d+, (\d+) layers")
BEYOND = "treemla: beyond the tolerance"

Verdict = tuple[str, list[str]]  # what was found, what is wrong


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

    def judged(what: str, by: Callable[..., Verdict], *keys: tuple[str, str, str | None]) -> tuple[str, str, list[str]]:
        found = [held.get(key) for key in keys]
        return (what, "not run", ["answers are missing"]) if None in found else (what, *by(*found, rounding))

    yield "Triton against itself", line(rounding), []
    for run in RUNS:
        yield judged(run, judge_run, (run, "triton", None), (run, "treemla", None))
    triton, stock = ("ngram", "triton", None), ("churn", "treemla", None)
    for fault in FAULTS:
        yield judged(f"fault {fault}", judge_fault, triton, ("ngram", "treemla", fault))
    yield judged("churn", judge_churn, stock, ("churn-compact", "treemla", None))
    yield judged("fault holder", judge_fault, stock, ("churn-compact", "treemla", "holder"))
    yield judged("shadow", judge_shadow, triton, ("shadow", "treemla-shadow", None))
    yield judged("shadow of fault causal", judge_alarm, ("shadow", "treemla-shadow", "causal"))


def judge_run(triton: dict[str, Any], treemla: dict[str, Any], rounding: agree.Spread) -> Verdict:
    found = agree.compare(answers_of(triton), answers_of(treemla), rounding)
    wrong = list(found.faults)
    if found.spread.count < MIN_TOKENS:
        wrong.append(f"{found.spread.count} tokens compared, expected {MIN_TOKENS}")
    for record in (triton, treemla) if triton["run"] != "decode" else ():
        later = (record["counts"] or {}).get("later_children", 0)
        if later < MIN_LATER_CHILDREN:
            wrong.append(f"{record['backend']}: {later} later children accepted, expected {MIN_LATER_CHILDREN}")
    for name, held in treemla["answers"].items():
        if name.startswith("cached/") and not held["cached"]:
            wrong.append(f"{name}: nothing came from the cache")
    victims = treemla["answers"].get("abort", {}).get("victims", [])
    if not victims or not all(8 < had < 480 for had in victims):
        wrong.append(f"aborted after {victims} tokens, expected two answers cut short")
    return f"{line(found.spread)}, {found.ties} ties, {treemla['counts']}", wrong


def judge_fault(reference: dict[str, Any], faulty: dict[str, Any], rounding: agree.Spread) -> Verdict:
    """A fault is noticed where the same comparison fails, and not by one answer alone."""
    found = compare_common(reference, faulty, rounding)
    wrong = [] if len(found.faults) >= CLEAR else [f"noticed {len(found.faults)} times, expected {CLEAR}"]
    return f"{line(found.spread)}, {len(found.faults)} complaints", wrong


def compare_common(a: dict[str, Any], b: dict[str, Any], rounding: agree.Spread) -> agree.Agreement:
    """Of records with answers to other prompts too."""
    left, right = answers_of(a), answers_of(b)
    common = left.keys() & right.keys()
    return agree.compare({name: left[name] for name in common}, {name: right[name] for name in common}, rounding)


def judge_churn(stock: dict[str, Any], compact: dict[str, Any], rounding: agree.Spread) -> Verdict:
    """The same requests with stock slots and with compaction, which must have moved what was read afterwards. Figures
    of held slots are logged where the allocator is the ordered one alone: see treemla.sglang.slots."""
    found = agree.compare(answers_of(stock), answers_of(compact), rounding)
    wrong = list(found.faults)
    moves = [tuple(map(float, said)) for text in compact["log"] for said in MOVED.findall(text)]
    moved = sum(int(slots) for slots, _, _ in moves)
    hit = sum(held["cached"] for held in compact["answers"].values() if held.get("compactions"))
    evidence = {
        "tokens compared": (found.spread.count, MIN_TOKENS),
        "compactions": (len(moves), MIN_COMPACTIONS),
        "slots moved": (moved, MIN_MOVED),
        "tokens from the cache after a compaction": (hit, MIN_HIT),
        "figures of ordered slots": (logged(compact, "held slots: "), 1),
        "requests aborted": (len(compact["answers"]["abort"]["victims"]), 2),
    }
    wrong += [f"{count} {what}, expected {least}" for what, (count, least) in evidence.items() if count < least]
    odd = logged(compact, "nothing moved") + logged(compact, "left as they are")
    wrong += [f"{odd} lines of slots that nobody was known to hold"] if odd else []
    wrong += ["the reference has no stock slots"] if logged(stock, "held slots") else []
    runs = " -> ".join(f"{statistics.median(run):.1f}" for run in zip(*(m[1:] for m in moves), strict=True))
    counted = ", ".join(f"{count} {what}" for what, (count, _) in evidence.items())
    return f"{line(found.spread)}, {found.ties} ties; {counted}; median of mean runs {runs}", wrong


def judge_shadow(triton: dict[str, Any], shadow: dict[str, Any], rounding: agree.Spread) -> Verdict:
    """Its answers are right, and it says so of enough layers."""
    found = compare_common(triton, shadow, rounding)
    layers = sum(int(n) for text in shadow["log"] for n in COMPARED.findall(text))
    wrong = list(found.faults)
    wrong += [f"{layers} layers compared, expected {MIN_COMPARED}"] if layers < MIN_COMPARED else []
    wrong += [text for text in shadow["log"] if BEYOND in text]
    return f"{line(found.spread)}, {layers} layers compared", wrong


def judge_alarm(shadow: dict[str, Any], _: agree.Spread) -> Verdict:
    """A shadow over a tree that was misread says that Triton, which reads SGLang's mask, differs."""
    alarms = [text for text in shadow["log"] if BEYOND in text and "Triton in " in text]
    return f"{len(alarms)} alarms", [] if alarms else ["no alarm"]


def logged(record: dict[str, Any], what: str) -> int:
    return sum(what in text for text in record["log"])


def line(spread: agree.Spread) -> str:
    return f"{spread.count} tokens, log-probabilities apart {spread.rms:.4f} rms, {spread.worst:.4f} at worst"

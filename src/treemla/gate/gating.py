"""`treemla gate` and `treemla selfcheck`: from a base and a GPU to findings."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from treemla.gate import baseline, fingerprint, hygiene, machine, nvml, pairs, quarantine, roofline, schema, trees
from treemla.gate.cases import PlanCase, VerifyCase
from treemla.gate.doctor import gpu_problem
from treemla.gate.exits import Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.fingerprint import REPO
from treemla.gate.judge import ADVISED, BASE, PEER, Known, judge, percent, smallest_detectable, unsettled
from treemla.gate.side import Side
from treemla.gate.worker import Worker, WorkerFailed

METRICS = {pairs.HEAD: "verify", BASE: "verify", PEER: "triton"}  # the kernel that each side times
Case = VerifyCase | PlanCase


@dataclass(frozen=True)
class Here:
    """This machine, and what the driver tells of its GPU."""

    where: schema.Where
    gauge: nvml.Gauge | None = None
    uuid: str = "GPU-none"


def gate(
    cases: Sequence[Case],
    base: str | None,
    commit: str | None,
    out: Path,
    wait_s: float = 600.0,
    *,
    triton: bool = True,
) -> Findings:
    """This checkout beside the tree or commit `base`, and beside Triton unless that is left out, on this GPU alone.

    base: by default where this checkout left origin/main; where it did not, itself: then stored figures alone decide.
    Writes into the folder `out`: sessions.jsonl, what `bless` and `history` read. BaselineMissing, InvalidEnvironment.
    """
    base = base or trees.fork_point()
    excused = quarantine.load()  # a file that is broken stops this before anything is measured
    here = this_machine(commit)
    with tempfile.TemporaryDirectory() as scratch:
        base_tree = trees.find(base, Path(scratch)) if base else REPO
        removed = [
            Finding(path, "removed", Exit.BASELINE_MISSING, "the base has this baseline, the head removed it")
            for path in trees.removed_baselines(base_tree, REPO)
        ]
        sides = (pairs.HEAD, BASE, PEER) if triton else (pairs.HEAD, BASE)
        measured, _ = beside(cases, sides, base_tree, Path(scratch), here, wait_s, out / "sessions.jsonl")
    found = measured.found if base else tuple(map(expect_stored, measured.found))
    today = baseline.today()
    applied, overdue = quarantine.apply(found, today, excused), quarantine.overdue(today, excused)
    advice = [f"Advised: {f.name}: {f.text}" for f in found if f.verdict == ADVISED]
    notes = (*measured.notes, *left_out(found, base, triton=triton), *advice)
    return replace(measured, found=(*removed, *applied, *overdue), notes=notes)


def expect_stored(found: Finding) -> Finding:
    """A case that was measured beside itself passes by stored figures that can fail it, or not at all."""
    parts = found.data.get("parts", {})
    if found.exit is not Exit.PASS or any(
        column in parts and not parts[column]["advises"] for column in ("vs Triton", "vs stored")
    ):
        return found
    text = "no base, and nothing stored for this machine blocks: give --base, or python -m treemla bless"
    texts = [found.text, text] if found.text else [text]  # what advises is still said
    return replace(found, verdict="no baseline", exit=Exit.BASELINE_MISSING, text="; ".join(texts))


def left_out(found: Sequence[Finding], base: str | None, *, triton: bool) -> list[str]:
    """A sentence for each comparison that was not made."""
    told = ["" if base else "No base: this checkout stood beside itself, and what is stored decides."]
    told.append("" if triton else "Triton was left out: no case was judged by its ratio.")
    with_stored = any("vs stored" in f.data.get("parts", ()) for f in found)
    told.append("" if with_stored else "No stored times are of this class of machine: none were compared.")
    return [text for text in told if text]


def selfcheck(cases: Sequence[Case], commit: str | None, out: Path, wait_s: float = 600.0) -> Findings:
    """This checkout beside itself: anything but "same" is a fault of the gate or of the machine.

    Writes into the folder `out`: sessions.jsonl, unless the machine showed that its times cannot be trusted.
    """
    here = this_machine(commit)
    with tempfile.TemporaryDirectory() as scratch:
        measured, sessions = beside(cases, (pairs.HEAD, BASE), REPO, Path(scratch), here, wait_s)
    wrong = "the same program beside itself: the machine or the gate cannot be trusted today"
    found = tuple(
        replace(f, exit=Exit.FAILED, text=f"{wrong}; {f.text}") if f.verdict == "faster" else f for f in measured.found
    )
    made = replace(measured, title="selfcheck", found=found)
    if made.exit is Exit.PASS:
        schema.dump(out / "sessions.jsonl", sessions)
    return made


def beside(
    cases: Sequence[Case],
    sides: Sequence[str],
    base_tree: Path,
    scratch: Path,
    here: Here,
    wait_s: float,
    kept: Path | None = None,
) -> tuple[Findings, list[schema.Measurement]]:
    """Measure and judge; the findings, and this run as sessions that a baseline can be made of, which go to `kept` as
    soon as there are enough processes of each case.
    """
    plan = {case: [side for side in sides if takes(side, case)] for case in cases}
    known = {case.id: known_of(case, mine, here) for case, mine in plan.items()}
    by_id = {case.id: mine for case, mine in plan.items()}
    sources = {side: trees.join(base_tree if side == BASE else REPO, scratch / "joined" / side) for side in sides}

    def start(side: str) -> pairs.Process:
        return Worker(Side, METRICS[side], source=sources[side])

    def keep(taken: Mapping[str, pairs.Taken]) -> None:
        if kept is not None and (sessions := sessions_of(taken, plan, here)):
            schema.dump(kept, sessions)

    with hygiene.lease(here.uuid, wait_s), hygiene.alone(here.gauge):
        taken = pairs.run(plan, start, lambda case, held: unsettled(held, by_id[case], known[case]), keep=keep)
    found = tuple(judge(case, taken[case], mine, known[case]) for case, mine in by_id.items())
    return Findings("gate", found, notes(taken, here)), sessions_of(taken, plan, here)


def takes(side: str, case: Case) -> bool:
    """Over fp8 rows SGLang's kernel rounds queries and weights too, which is another result; it has no plan."""
    return side != PEER or (isinstance(case, VerifyCase) and not case.fp8_kv)


def this_machine(commit: str | None) -> Here:
    """InvalidEnvironment where the kernels cannot run, or run on a slice of a GPU.

    A process of its own looks, so that this one never is on the GPU: whoever is there while none of ours runs is foreign.
    """
    worker = Worker(Look)
    try:
        worker.answer()
        uuid, where = worker.ask("around", commit)
    except WorkerFailed as error:
        raise InvalidEnvironment(str(error)) from error
    finally:
        worker.stop()
    gauge = nvml.attach(uuid)
    hygiene.expect_whole(gauge)
    return Here(where, gauge, uuid)


@contextmanager
def alone_on_gpu(wait_s: float) -> Iterator[None]:
    """Hold the current GPU's lease, as the gate does, while this process measures. InvalidEnvironment without a GPU that
    runs the kernels, or where another holds or shares it for longer than `wait_s`.
    """
    if problem := gpu_problem():
        raise InvalidEnvironment(problem)
    with hygiene.lease(machine.gpu_uuid(), wait_s):
        yield


class Look:
    """What a process that uses the GPU knows of the machine."""

    def around(self, commit: str | None) -> tuple[str, schema.Where]:
        """(UUID, where)"""
        if problem := gpu_problem():
            raise InvalidEnvironment(problem)
        uuid = machine.gpu_uuid()
        facts = machine.facts(nvml.attach(uuid))
        digits, arch = machine.fingerprint(facts), machine.arch(facts)
        where = replace(fingerprint.collect(commit), fingerprint=digits, arch=arch, start=machine.start())
        return uuid, where


def known_of(case: Case, sides: Sequence[str], here: Here) -> Known:
    """What is stored for a case on this machine. BrokenBaseline where it cannot be trusted."""
    return Known(
        ratio=baseline.find("triton_ratio", str(here.where.arch), case.id) if PEER in sides else None,
        stored=baseline.find(case.metric, str(here.where.fingerprint), case.id),
        floor_us=roofline.floors_us(here.where.gpu, [case]).get(case.id) if isinstance(case, VerifyCase) else None,
        today=baseline.today(),
    )


def notes(taken: Mapping[str, pairs.Taken], here: Here) -> tuple[str, ...]:
    least = smallest_detectable(list(taken.values()))
    dropped = sum(launch.dropped for held in taken.values() for launch in held.launches)
    rounds = sum(pairs.ROUNDS for held in taken.values() for _ in held.launches)
    watched = f"{dropped} of {rounds} rounds dropped" if here.gauge else f"clocks were not watched: {nvml.REMEDY}"
    where = here.where
    machine_said = f"machine class {where.fingerprint}, start {where.start}"
    return (
        f"Detectable today: {percent(least)} in the noisiest case." if least is not None else "Nothing was measured.",
        f"{where.gpu}, driver {where.driver}, torch {where.torch}, {machine_said}; {watched}.",
    )


def sessions_of(
    taken: Mapping[str, pairs.Taken], plan: Mapping[Case, Sequence[str]], here: Here
) -> list[schema.Measurement]:
    """What was measured of the head, a value a process, as data."""
    made = []
    for case, sides in plan.items():
        held = taken[case.id]
        if held.problem is None and held.launches:
            measurement = partial(schema.Measurement.of, case.id, where=here.where)
            made.append(measurement(case.metric, "us", held.us(pairs.HEAD)))
            if PEER in sides:
                ratios = [launch.us[pairs.HEAD] / launch.us[PEER] for launch in held.launches]
                made.append(measurement("triton_ratio", "ratio", ratios))
    return made

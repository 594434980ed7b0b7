"""Head beside base beside the peer: blocks in turns, a few processes first, all where these do not settle it."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treemla.gate import hygiene
from treemla.gate.cases import PlanCase, VerifyCase
from treemla.gate.decide import RULE, Rule
from treemla.gate.side import Block
from treemla.gate.worker import WorkerFailed

HEAD = "head"
ROUNDS = 6  # of two blocks a side
REPLAYS = 15  # a block
WARM_BLOCKS = 10  # at most, until two in a row agree
AGREE = 0.01


class Process(Protocol):
    """A `Worker` that holds a `Side`."""

    def send(self, method: str, *arguments: object) -> None: ...
    def answer(self) -> Any: ...
    def ask(self, method: str, *arguments: object) -> Any: ...
    def stop(self) -> None: ...


Start = Callable[[str], Process]  # from the name of a side
Plan = Mapping[VerifyCase | PlanCase, Sequence[str]]  # the sides of each case


@dataclass(frozen=True)
class Problem:
    """Why a case has no times: `side` failed, or "machine"."""

    side: str
    text: str


@dataclass(frozen=True)
class Launch:
    """What one launch of all processes says on a case. us: {side: median block}; rounds: {side: those of each round}."""

    us: Mapping[str, float]
    rounds: Mapping[str, tuple[float, ...]]
    dropped: int

    def log_ratio(self, other: str) -> float:
        """Natural logarithm of head / other: of each round, their median."""
        both = zip(self.rounds[HEAD], self.rounds[other], strict=True)
        return statistics.median(math.log(head / theirs) for head, theirs in both)


@dataclass
class Taken:
    """All launches of a case, and what ended it early."""

    launches: list[Launch] = field(default_factory=list)
    problem: Problem | None = None

    def log_ratios(self, other: str) -> list[float]:
        return [launch.log_ratio(other) for launch in self.launches]

    def us(self, side: str) -> list[float]:
        """The median block of each process."""
        return [launch.us[side] for launch in self.launches]


def run(
    plan: Plan,
    start: Start,
    unsettled: Callable[[str, Taken], bool],
    rule: Rule = RULE,
    seed: int | None = None,
    keep: Callable[[Mapping[str, Taken]], None] = lambda _: None,
) -> dict[str, Taken]:
    """{case id: what was measured}: `rule.first` launches of all cases, the others of those that are `unsettled`.

    keep: takes what there is from launch `rule.first` on, after each: a run that is cut short then leaves it.
    """
    chance = random.Random(seed)
    taken = {case.id: Taken() for case in plan}
    for number in range(rule.most):
        left = {case: sides for case, sides in plan.items() if taken[case.id].problem is None}
        if number >= rule.first:
            left = {case: sides for case, sides in left.items() if unsettled(case.id, taken[case.id])}
        if not left:
            break
        print(
            f"process {number + 1} of {rule.first if number < rule.first else rule.most}: {len(left)} cases", flush=True
        )
        launch(left, start, chance, taken)
        if number + 1 >= rule.first:
            keep(taken)
    return taken


def launch(plan: Plan, start: Start, chance: random.Random, taken: Mapping[str, Taken]) -> None:
    """New processes, one a side; each case in those of its sides. Adds to `taken`."""
    workers = {side: start(side) for side in dict.fromkeys(side for sides in plan.values() for side in sides)}
    try:
        problem = _first_problem(workers)  # none where all could be made
        for case, sides in plan.items():
            held, mine = taken[case.id], {side: workers[side] for side in sides}
            held.problem = problem or _prepare(mine, case)
            if held.problem is None:
                made = _measure(mine, chance)
                if isinstance(made, Launch):
                    held.launches.append(made)
                else:
                    held.problem = made
            print(f"  {case.id}: {_said(held)}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()


def _said(taken: Taken) -> str:
    if taken.problem:
        return f"{taken.problem.side}: {taken.problem.text}"
    return ", ".join(f"{side} {us:.1f} us" for side, us in taken.launches[-1].us.items())


def _first_problem(workers: Mapping[str, Process]) -> Problem | None:
    """Waits for every worker's answer, so that none is left unread."""
    found = []
    for side, worker in workers.items():
        try:
            if said := worker.answer():
                found.append(Problem(side, said))
        except WorkerFailed as error:
            found.append(Problem(side, str(error)))
    return found[0] if found else None


def _prepare(workers: Mapping[str, Process], case: VerifyCase | PlanCase) -> Problem | None:
    for worker in workers.values():
        worker.send("prepare", case)
    return _first_problem(workers)


def _measure(workers: Mapping[str, Process], chance: random.Random) -> Launch | Problem:
    """Rounds of one block a side in random order and one in the reverse, so that drift meets all sides alike."""
    blocks: dict[str, list[Block]] = {side: [] for side in workers}
    try:
        for side in workers:
            _warm_up(workers, side, chance)
        for _ in range(ROUNDS):
            order = chance.sample(list(workers), len(workers))
            for side in (*order, *reversed(order)):
                blocks[side].append(_block(workers, side, chance))
    except _SideFailed as failed:
        return failed.problem
    return summarise(blocks)


class _SideFailed(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def _block(workers: Mapping[str, Process], side: str, chance: random.Random) -> Block:
    try:
        block: Block = workers[side].ask("block", REPLAYS, chance.getrandbits(32))
    except WorkerFailed as error:
        raise _SideFailed(Problem(side, str(error))) from error
    if not all(math.isfinite(us) and us > 0 for us in block.samples_us):
        raise _SideFailed(Problem(side, f"its times are not all positive numbers: {block.samples_us}"))
    return block


def _warm_up(workers: Mapping[str, Process], side: str, chance: random.Random) -> None:
    """Until two blocks in a row agree, WARM_BLOCKS at most."""
    before = math.inf
    for _ in range(WARM_BLOCKS):
        now = statistics.median(_block(workers, side, chance).samples_us)
        if abs(now / before - 1) <= AGREE:
            return
        before = now


def summarise(blocks: Mapping[str, Sequence[Block]]) -> Launch | Problem:
    """Two blocks a round and side; a round counts where no block of any side was `hygiene.unsound`."""
    bad = {side: hygiene.unsound([block.readings for block in held]) for side, held in blocks.items()}
    kept = [n for n in range(ROUNDS) if not any(held[2 * n] or held[2 * n + 1] for held in bad.values())]
    dropped = ROUNDS - len(kept)
    if dropped > hygiene.MAX_DROPPED * ROUNDS:
        return Problem(
            "machine", f"clocks or temperature spoilt {dropped} of {ROUNDS} rounds; let it cool, lock its clocks"
        )
    medians = {side: [statistics.median(block.samples_us) for block in held] for side, held in blocks.items()}
    rounds = {side: tuple(math.sqrt(held[2 * n] * held[2 * n + 1]) for n in kept) for side, held in medians.items()}
    return Launch({side: statistics.median(held) for side, held in rounds.items()}, rounds, dropped)

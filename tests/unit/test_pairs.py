"""Blocks in turns: what drift, noise, trouble of the GPU and failing processes do to the ratios."""

import math
import random
from dataclasses import replace

import pytest
from fake_sides import COOL, CRASH, Machine

from treemla.gate import hygiene, nvml, pairs
from treemla.gate.cases import GATED_CASES
from treemla.gate.side import Block

SIDES = ("head", "base", "triton")
SAME = {"head": 50.0, "base": 50.0, "triton": 12000.0}
CASE = GATED_CASES[0]


def run(machine, cases=(CASE,), unsettled=lambda *_: False, sides=SIDES, seed=1):
    return pairs.run(dict.fromkeys(cases, sides), machine.start, unsettled, seed=seed)


def test_drift_of_the_machine_is_no_ratio():
    """2% a block would be 4% between neighbours; forwards and backwards it cancels."""
    taken = run(Machine(SAME, spread=0, jitter=0, drift=0.02))[CASE.id]
    assert all(abs(ratio) < 0.004 for ratio in taken.log_ratios("base"))


def test_a_ratio_is_that_of_the_two_sides():
    taken = run(Machine({**SAME, "head": 55.0}, spread=0, jitter=0))[CASE.id]
    assert taken.log_ratios("base") == pytest.approx([math.log(1.1)] * 3)
    assert taken.us("head") == pytest.approx([55.0] * 3)


def test_each_launch_has_new_processes_and_all_are_ended(monkeypatch):
    machine, made = Machine(SAME), []
    monkeypatch.setattr(machine, "start", lambda side: made.append(Machine.start(machine, side)) or made[-1])
    run(machine, GATED_CASES[:2])
    assert machine.started == list(SIDES) * 3
    assert all(side.stopped for side in made)


def test_a_case_is_measured_by_its_sides_alone():
    two, three = GATED_CASES[:2]
    taken = pairs.run({two: SIDES[:2], three: SIDES}, Machine(SAME).start, lambda *_: False)
    assert set(taken[two.id].launches[0].us) == {"head", "base"}
    assert set(taken[three.id].launches[0].us) == set(SIDES)


def test_only_unsettled_cases_are_measured_in_all_processes():
    settled, unsettled = GATED_CASES[:2]
    taken = run(Machine(SAME), (settled, unsettled), lambda case, _: case == unsettled.id)
    assert [len(taken[case.id].launches) for case in (settled, unsettled)] == [3, 8]


def test_a_run_that_is_cut_short_has_given_up_what_the_first_processes_measured():
    machine, kept = Machine(SAME), []

    def start(side):
        if len(machine.started) == 4 * len(SIDES):
            raise KeyboardInterrupt
        return machine.start(side)

    def keep(taken):
        kept.append(len(taken[CASE.id].launches))

    with pytest.raises(KeyboardInterrupt):
        pairs.run({CASE: SIDES}, start, lambda *_: True, keep=keep)
    assert kept == [3, 4]


def test_processes_end_where_a_case_settles():
    taken = run(Machine(SAME), unsettled=lambda _, held: len(held.launches) < 5)
    assert len(taken[CASE.id].launches) == 5


def test_every_round_meets_all_sides_twice_in_mirrored_order():
    machine, order = Machine(SAME), []
    workers = {side: machine.start(side) for side in SIDES}
    for side, worker in workers.items():
        worker.answer()
        worker.do_block = lambda replays, seed, side=side: order.append(side) or Block((1.0,) * replays)
    pairs._measure(workers, random.Random(3))
    rounds = order[-6 * pairs.ROUNDS :]
    rounds = [rounds[n : n + 6] for n in range(0, len(rounds), 6)]
    assert all(r == r[::-1] and set(r) == set(SIDES) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_no_two_blocks_have_the_same_inputs():
    machine, seeds = Machine(SAME), []
    worker = machine.start("head")
    worker.answer()
    worker.do_block = lambda replays, seed: seeds.append(seed) or Block((1.0,) * replays)
    pairs._measure({"head": worker, "base": worker}, random.Random(3))
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("method", ["make", "prepare", "block"])
def test_a_side_that_fails_is_named_and_ends_the_case(side, method):
    taken = run(Machine(SAME, faults={side: (method, CRASH)}))[CASE.id]
    assert taken.problem == pairs.Problem(side, "its process ended with exit code -11")
    assert not taken.launches


def test_a_wrong_result_ends_the_case_before_anything_is_timed():
    machine = Machine(SAME, faults={"head": ("prepare", "relative error 3e-1")})
    assert run(machine)[CASE.id].problem == pairs.Problem("head", "relative error 3e-1")
    assert machine.clock == 0


@pytest.mark.parametrize("us", [math.nan, math.inf, 0.0, -1.0])
def test_times_that_are_no_times_end_the_case(us):
    taken = run(Machine(SAME, faults={"base": ("block", Block((1.0, us, 1.0)))}))[CASE.id]
    assert taken.problem.side == "base" and "positive" in taken.problem.text


HOT = replace(COOL, slowdowns=("HwThermalSlowdown",))


def blocks(*bad, reading=HOT):
    """Two sides of even times; `bad` are the base's blocks in trouble."""
    even = [Block((10.0, 10.0), (COOL, COOL)) for _ in range(2 * pairs.ROUNDS)]
    base = [Block((90.0, 90.0), (COOL, reading)) if n in bad else block for n, block in enumerate(even)]
    return {"head": even, "base": base}


@pytest.mark.parametrize("reading", [HOT, replace(COOL, sm_mhz=1700)])
def test_a_round_in_trouble_does_not_count(reading):
    made = pairs.summarise(blocks(5, reading=reading))
    assert made.dropped == 1 and len(made.rounds["head"]) == pairs.ROUNDS - 1
    assert made.log_ratio("base") == 0.0


def test_a_machine_in_trouble_gives_no_ratio_at_all():
    made = pairs.summarise(blocks(2, 5))
    assert isinstance(made, pairs.Problem) and made.side == "machine"


def test_a_gpu_that_tells_no_clock_drops_nothing():
    silent = nvml.Reading(None, None, None, None, ())
    assert hygiene.unsound([(silent, silent), (None, None)]) == [False, False]


def test_a_clock_slightly_below_the_others_is_no_trouble():
    slow = replace(COOL, sm_mhz=1900)
    assert hygiene.unsound([(COOL, COOL), (slow, slow), (COOL, COOL)]) == [False] * 3

"""`python -m treemla VERB`: what nox sessions, CI and people run. Exit codes: `treemla.gate.exits`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from treemla import tiles
from treemla.gate import doctor, layers, nvml, verbs
from treemla.gate.cases import CASES, PEER_CASES, WARM_CASES, VerifyCase, chosen
from treemla.gate.check import check
from treemla.gate.exits import Exit, InvalidEnvironment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; the exit code is its verdict."""
    given = parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except InvalidEnvironment as error:
        print(f"invalid environment: {error}", file=sys.stderr)
        return int(Exit.INVALID_ENVIRONMENT)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m treemla", description="Tree-verify MLA attention: its regression suite."
    )
    added = made.add_subparsers(metavar="VERB", dest="verb", required=True)

    verb = added.add_parser("check", help="run every layer this machine can run, then one summary")
    verb.set_defaults(run=lambda _: check())

    verb = added.add_parser("test", help="run one layer; what follows its name goes to pytest")
    verb.add_argument("layer", choices=[name for name, layer in layers.LAYERS.items() if layer.is_pytest])
    verb.add_argument("extra", nargs=argparse.REMAINDER, metavar="...")
    verb.set_defaults(run=run_test)

    verb = added.add_parser(
        "bench", help="time the kernels on this GPU, beside SGLang's Triton kernel where it is installed"
    )
    add_measuring_arguments(verb, "build/gpu-perf.jsonl")
    verb.add_argument("--path", choices=list(tiles.PATHS), help="this verify kernel alone")
    verb.add_argument(
        "--warm", action="store_true", help="the verify kernel alone, its KV in L2: clocks a token and SM"
    )
    verb.set_defaults(run=run_bench)

    verb = added.add_parser("peers", help="time every MLA kernel on this machine beside treemla's, in turns")
    add_measuring_arguments(verb, "build/gpu-peers.jsonl")
    verb.set_defaults(run=run_peers)

    verb = added.add_parser("tune", help="measure the cost model's constants on this GPU; plans then use them")
    add_measuring_arguments(verb, "build/tune.jsonl")
    verb.add_argument("--path", choices=list(tiles.PATHS), help="this verify kernel; default: the GPU's first")
    verb.set_defaults(run=run_tune)

    verb = added.add_parser("bench-slots", help="what ordering SGLang's free list costs and brings, on the CPU")
    verb.add_argument("--picture", type=Path, default=Path("build/slots.png"), help="default: %(default)s")
    verb.add_argument("--steps", type=int, default=6000, help="decode steps of churn; default: %(default)s")
    verb.set_defaults(run=run_bench_slots)

    verb = added.add_parser("bench-moves", help="time moving rows in all layers, beside torch and a plain copy")
    verb.add_argument("--out", type=Path, default=Path("build/moves.jsonl"), help="default: %(default)s")
    verb.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    verb.set_defaults(run=run_bench_moves)

    verb = added.add_parser("bench-layouts", help="time verify with its slots in longer and shorter runs")
    verb.add_argument("--out", type=Path, default=Path("build/layouts.jsonl"), help="default: %(default)s")
    verb.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    verb.set_defaults(run=run_bench_layouts)

    verb = added.add_parser("doctor", help="what this machine has, what is wrong with it, what to do")
    verb.add_argument(
        "--wait", type=float, metavar="S", help="first wait so many seconds at most until nobody uses the GPU"
    )
    verb.set_defaults(run=run_doctor)

    verbs.add(added)
    return made


def add_measuring_arguments(verb: argparse.ArgumentParser, out: str) -> None:
    verb.add_argument("--case", action="append", metavar="TEXT", help="only cases whose id contains TEXT; repeatable")
    verb.add_argument("--out", type=Path, default=Path(out), help="default: %(default)s")
    verb.add_argument("--commit", help="treemla's commit, where this copy has no git history")


def run_test(given: argparse.Namespace) -> Exit:
    layer = layers.LAYERS[given.layer]
    outcome = layers.run(layer, given.extra)
    if outcome.exit is not Exit.PASS:
        print(f"{layer.name}: {outcome.exit.name}: {outcome.why}", file=sys.stderr)
    return outcome.exit


def run_bench(given: argparse.Namespace) -> Exit:
    from treemla.gate.bench import bench

    cases = chosen_cases(WARM_CASES if given.warm else CASES, given.case)
    return bench(cases, given.out, given.commit, path=given.path, warm=given.warm) if cases else Exit.USAGE


def run_peers(given: argparse.Namespace) -> Exit:
    from treemla.gate.peers_bench import bench_peers

    cases = chosen_cases(PEER_CASES, given.case)
    return bench_peers(cases, given.out, given.commit) if cases else Exit.USAGE


def run_tune(given: argparse.Namespace) -> Exit:
    from treemla.gate.tune import ROWS
    from treemla.gate.tune_gpu import tune

    cases = chosen_cases(ROWS, given.case)
    return tune(cases, given.out, given.commit, given.path) if cases else Exit.USAGE


def chosen_cases(cases: Sequence[VerifyCase], texts: Sequence[str] | None) -> list[VerifyCase]:
    """Those whose id contains one of the texts, all without texts; where there is none, say so."""
    found = chosen(cases, texts)
    if not found:
        print(f"--case: expected part of one of {', '.join(case.id for case in cases)}, got {texts}", file=sys.stderr)
    return found


def run_bench_slots(given: argparse.Namespace) -> Exit:
    from treemla.gate import slots

    slots.run(given.picture, given.steps)
    return Exit.PASS


def run_bench_moves(given: argparse.Namespace) -> Exit:
    from treemla.gate import moves

    return moves.bench_moves(moves.CASES, given.out, given.commit)


def run_bench_layouts(given: argparse.Namespace) -> Exit:
    from treemla.gate import layouts

    return layouts.bench_layouts(given.out, given.commit)


def run_doctor(given: argparse.Namespace) -> Exit:
    """Always a full list. Fails where what a CPU needs is wrong; a missing GPU is a fact, not a fault, unless it is
    waited for.
    """
    if given.wait is not None:
        from treemla.gate import gating, hygiene

        here = gating.this_machine(None)
        hygiene.wait_until_free(here.uuid, here.gauge, given.wait)
        watched = "nothing computes on it" if here.gauge else f"processes were not looked at: {nvml.REMEDY}"
        print(f"free: {here.uuid} {here.where.gpu}, nobody holds its lease, {watched}")
    found = doctor.facts()
    for fact in found:
        line = f"{fact.name:18} {fact.value}"
        print(f"{line}  <- {fact.problem}; {fact.remedy}" if fact.problem else line)
    return Exit.INVALID_ENVIRONMENT if any(fact.problem and fact.name == "torch" for fact in found) else Exit.PASS

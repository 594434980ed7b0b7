"""`python -m treemla VERB`: what nox sessions, CI and people run. Exit codes: `treemla.gate.exits`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treemla import tiles
from treemla.gate import doctor, layers, nvml, verbs
from treemla.gate.cases import CASES, PEER_CASES, WARM_CASES
from treemla.gate.check import check, finding
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.fingerprint import REPO
from treemla.gate.showing import Made, Verbs, add_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; the exit code is its verdict."""
    given = parser().parse_args(arguments)
    return int(given.run(given))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m treemla", description="Tree-verify MLA attention: its regression suite."
    )
    added = made.add_subparsers(metavar="VERB", dest="verb", required=True)

    add_verb(added, "check", lambda _: check(), "run every layer this machine can run, then one summary and one page")

    words = "run one layer; what follows its name goes to pytest"
    verb = add_verb(added, "test", run_test, words, writes=results, tells=True)
    verb.add_argument("layer", choices=[name for name, layer in layers.LAYERS.items() if layer.is_pytest])
    verb.add_argument("extra", nargs=argparse.REMAINDER, metavar="...")

    words = "time the kernels on this GPU, beside SGLang's Triton kernel where it is installed"
    verb = add_measuring(added, "bench", run_bench, words, "build/gpu-perf.jsonl", pictures=(".svg",))
    verbs.add_cases(verb)
    verb.add_argument("--path", choices=list(tiles.PATHS), help="this verify kernel alone")
    verb.add_argument(
        "--warm", action="store_true", help="the verify kernel alone, its KV in L2: clocks a token and SM"
    )

    words = "time every MLA kernel on this machine beside treemla's, in turns"
    verbs.add_cases(add_measuring(added, "peers", run_peers, words, "build/gpu-peers.jsonl", pictures=(".png", ".svg")))

    words = "measure the cost model's constants on this GPU; plans then use them"
    verb = add_measuring(added, "tune", run_tune, words, "build/tune.jsonl")
    verbs.add_cases(verb)
    verb.add_argument("--path", choices=list(tiles.PATHS), help="this verify kernel; default: the GPU's first")

    words = "what ordering SGLang's free list costs and brings, on the CPU"
    verb = add_verb(
        added, "bench-slots", run_bench_slots, words, writes=lambda given: {"--picture": given.picture}, tells=True
    )
    verb.add_argument("--picture", type=Path, default=Path("build/slots.png"), help="default: %(default)s")
    verb.add_argument("--steps", type=int, default=6000, help="decode steps of churn; default: %(default)s")

    words = "time moving rows in all layers, beside torch and a plain copy"
    add_measuring(added, "bench-moves", run_bench_moves, words, "build/moves.jsonl")
    words = "time verify with its slots in longer and shorter runs"
    add_measuring(added, "bench-layouts", run_bench_layouts, words, "build/layouts.jsonl")

    verb = add_verb(added, "doctor", run_doctor, "what this machine has, what is wrong with it, what to do", tells=True)
    verb.add_argument(
        "--wait", type=float, metavar="S", help="first wait so many seconds at most until nobody uses the GPU"
    )

    verbs.add(added)
    return made


def add_measuring(
    added: Verbs, name: str, made: Made, words: str, out: str, pictures: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A verb that has the GPU alone and writes what it measured to --out. pictures: suffixes of those that it draws
    beside that.
    """

    def writes(given: argparse.Namespace) -> dict[str, Path]:
        return {"--out": given.out, **{f"--out's {end}": given.out.with_suffix(end) for end in pictures}}

    verb = add_verb(added, name, made, words, writes=writes, tells=True)
    verb.add_argument("--out", type=Path, default=Path(out), help="default: %(default)s")
    verbs.add_measuring(verb)
    return verb


def results(given: argparse.Namespace) -> dict[str, Path]:
    return {"the layer's report": REPO / layers.LAYERS[given.layer].results}


def run_test(given: argparse.Namespace) -> Findings:
    layer = layers.LAYERS[given.layer]
    return Findings("test", (finding(layer.name, layers.run(layer, given.extra)),))


def run_bench(given: argparse.Namespace) -> Findings:
    from treemla.gate.bench import bench
    from treemla.gate.gating import alone_on_gpu

    cases = verbs.chosen_of(WARM_CASES if given.warm else CASES, given.case)
    with alone_on_gpu(given.wait):
        return bench(cases, given.out, given.commit, path=given.path, warm=given.warm)


def run_peers(given: argparse.Namespace) -> Findings:
    from treemla.gate.gating import alone_on_gpu
    from treemla.gate.peers_bench import bench_peers

    cases = verbs.chosen_of(PEER_CASES, given.case)
    with alone_on_gpu(given.wait):
        return bench_peers(cases, given.out, given.commit)


def run_tune(given: argparse.Namespace) -> Findings:
    from treemla.gate.gating import alone_on_gpu
    from treemla.gate.tune import ROWS
    from treemla.gate.tune_gpu import tune

    cases = verbs.chosen_of(ROWS, given.case)
    with alone_on_gpu(given.wait):
        return tune(cases, given.out, given.commit, given.path)


def run_bench_slots(given: argparse.Namespace) -> Findings:
    from treemla.gate import slots

    return slots.run(given.picture, given.steps)


def run_bench_moves(given: argparse.Namespace) -> Findings:
    from treemla.gate import moves
    from treemla.gate.gating import alone_on_gpu

    with alone_on_gpu(given.wait):
        return moves.bench_moves(moves.CASES, given.out, given.commit)


def run_bench_layouts(given: argparse.Namespace) -> Findings:
    from treemla.gate import layouts
    from treemla.gate.gating import alone_on_gpu

    with alone_on_gpu(given.wait):
        return layouts.bench_layouts(given.out, given.commit)


def run_doctor(given: argparse.Namespace) -> Findings:
    """Always a full list. Fails where something keeps this machine from what it is there for (`doctor.needed`); a missing
    GPU is a fact, not a fault, unless it is waited for.
    """
    if given.wait is not None:
        from treemla.gate import gating, hygiene

        here = gating.this_machine(None)
        hygiene.wait_until_free(here.uuid, here.gauge, given.wait)
        watched = "nothing computes on it" if here.gauge else f"processes were not looked at: {nvml.REMEDY}"
        print(f"free: {here.uuid} {here.where.gpu}, nobody holds its lease, {watched}")
    found, needed = [], doctor.needed()
    for fact in doctor.facts():
        line = f"{fact.name:18} {fact.value}"
        print(f"{line}  <- {fact.problem}; {fact.remedy}" if fact.problem else line)
        code = Exit.INVALID_ENVIRONMENT if fact.problem and fact.name in needed else Exit.PASS
        cells = {"value": fact.value, "problem": fact.problem, "remedy": fact.remedy}
        found.append(Finding(fact.name, "lacking" if fact.problem else "good", code, fact.problem, cells))
    return Findings("doctor", tuple(found))

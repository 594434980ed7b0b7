"""The performance layer: times treemla's verify and plan and SGLang's Triton kernel, as data and as a table."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from treemla import verify_attention
from treemla.gate import fingerprint, measure, plot, roofline, schema, triton_peer
from treemla.gate.cases import VerifyCase
from treemla.gate.doctor import gpu_problem
from treemla.gate.exits import Exit, InvalidEnvironment
from treemla.gate.inputs import SM_SCALE, Inputs, make_inputs
from treemla.gate.report import table

PEER_LAYERS = 2  # it takes up to 10 ms a layer
PLAN_LAYERS = 16  # plans in one graph, so that the launch of the graph does not count


class WrongResult(RuntimeError):
    """A kernel whose output differs from the oracle is not timed."""


def bench(cases: Sequence[VerifyCase], out: Path, commit: str | None) -> Exit:
    """Measure the cases, write them to `out` as JSON lines, print the table. A case whose result is wrong fails."""
    if problem := gpu_problem():
        raise InvalidEnvironment(problem)
    where = fingerprint.collect(commit)
    extend = _peer()
    made: list[schema.Measurement] = []
    wrong = []
    for case in cases:
        print(f"{case.id} ...", flush=True)
        try:
            made += measure_case(case, extend, where)
        except WrongResult as error:
            wrong.append(str(error))
            print(f"WRONG: {error}", flush=True)
        if made:
            schema.dump(out, made)  # after each case: a run that is cut short leaves what it has
        torch.cuda.empty_cache()
    if made:
        print(
            f"\n{show(made)}\n\n{where.gpu}, driver {where.driver}, torch {where.torch}, treemla {where.treemla}; raw data: {out}"
        )
        plot.draw_if_possible(made, out.with_suffix(".svg"))
    for problem in wrong:
        print(f"FAILED: {problem}")
    return Exit.FAILED if wrong else Exit.PASS if made else Exit.NOTHING_MEASURED


def measure_case(case: VerifyCase, extend: triton_peer.Extend | None, where: schema.Where) -> list[schema.Measurement]:
    """Metrics verify, plan and, with the peer, triton: microseconds a layer. WrongResult before anything is timed."""
    inputs = make_inputs(case, torch.device("cuda", torch.cuda.current_device()))
    rows = case.batch * case.tree_tokens
    out = inputs.q.new_full((rows, case.heads, 512), torch.nan)
    lse = torch.full((rows, case.heads), torch.nan, device=out.device)
    layers = [
        partial(
            verify_attention, inputs.q, kv, inputs.slots, inputs.words, inputs.plan, sm_scale=SM_SCALE, out=out, lse=lse
        )
        for kv in inputs.kv_layers
    ]
    layers[-1]()
    _expect_right("treemla", inputs, out, lse)
    samples = {"verify": measure.time_layers(layers), "plan": measure.time_layers([inputs.plan_step] * PLAN_LAYERS)}
    if extend is not None:
        out.fill_(torch.nan)
        taken = inputs.owned, case.contexts, inputs.mask
        peers = [
            triton_peer.verify(extend, inputs.q, kv, *taken, sm_scale=SM_SCALE, out=out)
            for kv in inputs.kv_layers[-PEER_LAYERS:]
        ]
        peers[-1]()
        _expect_right("triton", inputs, out, None)
        samples["triton"] = measure.time_layers(peers)
    return [schema.Measurement.of(case.id, metric, "us", taken, where) for metric, taken in samples.items()]


def show(made: Sequence[schema.Measurement]) -> str:
    """One row a case: times, how many times faster than Triton, how near to the roofline."""
    by_case: dict[str, dict[str, schema.Measurement]] = {}
    for measurement in made:
        by_case.setdefault(measurement.case, {})[measurement.metric] = measurement
    floors = roofline.floors_us(made[0].where.gpu)
    rows = []
    for name, metrics in by_case.items():
        verify, plan, triton = metrics["verify"], metrics["plan"], metrics.get("triton")
        floor = floors.get(name)
        peer = [f"{triton.value:.1f}", f"{triton.value / verify.value:.1f}x"] if triton else ["-", "-"]
        roof = [f"{floor:.1f}", f"{100 * floor / verify.value:.0f}%"] if floor else ["-", "-"]
        rows.append([name, f"{verify.value:.1f}", f"{verify.mad:.2f}", f"{plan.value:.1f}", *peer, *roof])
    return table(["case", "verify us", "mad", "plan us", "triton us", "faster", "floor us", "of roofline"], rows)


def _peer() -> triton_peer.Extend | None:
    try:
        return triton_peer.load()
    except ImportError as error:
        print(f"SGLang's Triton kernel is not measured: {error}")
        return None


def _expect_right(who: str, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    if problem := inputs.error_of(out, lse):
        raise WrongResult(f"{who}: {problem}")

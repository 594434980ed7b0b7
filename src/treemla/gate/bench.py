"""The performance layer: times treemla's verify and plan and SGLang's Triton kernel, as data and as a table."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from treemla import cubins, verify_attention
from treemla.gate import fingerprint, measure, plot, roofline, schema, triton_peer
from treemla.gate import warm as warm_times
from treemla.gate.cases import VerifyCase
from treemla.gate.exits import InvalidEnvironment
from treemla.gate.findings import Findings
from treemla.gate.inputs import SM_SCALE, Inputs, make_inputs
from treemla.gate.measured import measured
from treemla.gate.report import table

PEER_LAYERS = 2  # it takes up to 10 ms a layer
PLAN_LAYERS = 16  # plans in one graph, so that the launch of the graph does not count


class WrongResult(RuntimeError):
    """A kernel whose output differs from the oracle is not timed."""


def bench(
    cases: Sequence[VerifyCase], out: Path, commit: str | None, *, path: str | None = None, warm: bool = False
) -> Findings:
    """Measure the cases, write them to `out` as JSON lines, print the table. A case whose result is wrong fails.

    path: a verify kernel by name, alone. warm: KV stays in L2 (`treemla.gate.warm`), the verify kernel alone.
    """
    if problem := path_problem(path):
        raise InvalidEnvironment(problem)
    where = fingerprint.collect(commit)
    extend = None if path or warm else _peer()
    made: list[schema.Measurement] = []
    wrong = []
    for case in cases:
        print(f"{case.id} ...", flush=True)
        try:
            made += warm_case(case, where, path) if warm else measure_case(case, extend, where, path)
        except WrongResult as error:
            wrong.append(str(error))
            print(f"WRONG: {error}", flush=True)
        if made:
            schema.dump(out, made)  # after each case: a run that is cut short leaves what it has
        torch.cuda.empty_cache()
    if made:
        shown = warm_times.show(made) if warm else show(made)
        print(
            f"\n{shown}\n\n{where.gpu}, driver {where.driver}, torch {where.torch}, treemla {where.treemla}; raw data: {out}"
        )
        if not warm:
            plot.draw_if_possible(plot.draw_bars, made, out.with_suffix(".svg"))
    return measured("bench", made, wrong)


def path_problem(path: str | None) -> str:
    """Why this GPU does not run the kernel of that name; empty where it does."""
    held = [held.name for held in cubins.target_of(_device()).paths]
    return "" if path is None or path in held else f"--path: expected one of {held} on this GPU, got {path}"


def measure_case(
    case: VerifyCase, extend: triton_peer.Extend | None, where: schema.Where, path: str | None = None
) -> list[schema.Measurement]:
    """Metrics verify, plan and, with the peer, triton: microseconds a layer. WrongResult before anything is timed.

    A kernel chosen by `path` is in the metric's name: verify_mma. Over fp8 rows the peer is not timed: it rounds
    queries and weights to fp8 and computes something else.
    """
    inputs = make_inputs(case, _device(), path=path)
    samples = {
        _metric("verify", path): measure.time_layers(verify_layers(inputs, inputs.kv_layers)),
        _metric("plan", path): measure.time_layers([inputs.plan_step] * PLAN_LAYERS),
    }
    if extend is not None and not case.fp8_kv:
        out = inputs.empty_out()
        taken = inputs.owned, case.contexts, inputs.mask
        peers = [
            triton_peer.verify(extend, inputs.q, kv, *taken, sm_scale=SM_SCALE, out=out)
            for kv in inputs.kv_layers[-PEER_LAYERS:]
        ]
        _expect_right("triton", inputs, peers[-1](), None)
        samples["triton"] = measure.time_layers(peers)
    return [schema.Measurement.of(case.id, metric, "us", taken, where) for metric, taken in samples.items()]


def warm_case(case: VerifyCase, where: schema.Where, path: str | None) -> list[schema.Measurement]:
    """Metrics verify_warm, microseconds a layer, and verify_warm_clocks, SM clocks a token. WrongResult as above."""
    properties = torch.cuda.get_device_properties(_device())
    if not warm_times.fits(case, properties.L2_cache_size):
        raise InvalidEnvironment(
            f"--warm: expected an L2 that holds {case.id} twice, got {properties.L2_cache_size} bytes"
        )
    inputs = make_inputs(case, _device(), cold_bytes=0, path=path)
    taken = measure.time_layers(verify_layers(inputs, [inputs.kv_layers[-1]] * warm_times.LAYERS), cold=False)
    mhz = measure.sm_clock_mhz()
    print(f"    SM clock {mhz:.0f} MHz", flush=True)
    clocks = [warm_times.clocks_a_token(case, us, mhz, properties.multi_processor_count) for us in taken]
    name = _metric("verify", path) + "_warm"
    return [
        schema.Measurement.of(case.id, name, "us", taken, where),
        schema.Measurement.of(case.id, f"{name}_clocks", "clocks", clocks, where),
    ]


def verify_layers(inputs: Inputs, kv_layers: Sequence[torch.Tensor]) -> Sequence[Callable[[], object]]:
    """A callable a layer, enqueuing treemla's verify. WrongResult where the last layer's is not float64's."""
    out = inputs.empty_out()
    lse = torch.full(out.shape[:2], torch.nan, device=out.device)
    taken = inputs.slots, inputs.words, inputs.plan
    layers = [partial(verify_attention, inputs.q, kv, *taken, sm_scale=SM_SCALE, out=out, lse=lse) for kv in kv_layers]
    layers[-1]()
    _expect_right("treemla", inputs, out, lse)
    return layers


def show(made: Sequence[schema.Measurement]) -> str:
    """One row a case: times, how many times faster than Triton, how near to the roofline."""
    by_case: dict[str, dict[str, schema.Measurement]] = {}
    for measurement in made:
        by_case.setdefault(measurement.case, {})[measurement.metric] = measurement
    floors = roofline.floors_us(made[0].where.gpu)
    rows = []
    for name, metrics in by_case.items():
        verify, plan = (next(m for key, m in metrics.items() if key.startswith(kind)) for kind in ("verify", "plan"))
        triton = metrics.get("triton")
        floor = floors.get(name)
        peer = [f"{triton.value:.1f}", f"{triton.value / verify.value:.1f}x"] if triton else ["-", "-"]
        roof = [f"{floor:.1f}", f"{100 * floor / verify.value:.0f}%"] if floor else ["-", "-"]
        rows.append([name, f"{verify.value:.1f}", f"{verify.mad:.2f}", f"{plan.value:.1f}", *peer, *roof])
    return table(["case", "verify us", "mad", "plan us", "triton us", "faster", "floor us", "of roofline"], rows)


def _metric(kind: str, path: str | None) -> str:
    return f"{kind}_{path}" if path else kind


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _peer() -> triton_peer.Extend | None:
    try:
        return triton_peer.load()
    except ImportError as error:
        print(f"SGLang's Triton kernel is not measured: {error}")
        return None


def _expect_right(who: str, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    if problem := inputs.error_of(out, lse):
        raise WrongResult(f"{who}: {problem}")

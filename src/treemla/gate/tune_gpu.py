"""`python -m treemla tune`: measures this GPU, shows what follows, keeps the constants unless they choose worse."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from treemla import VerifyPlan, cost, cubins, tuned
from treemla.gate import fingerprint, measure, schema
from treemla.gate.bench import WrongResult, path_problem, verify_layers
from treemla.gate.cases import VerifyCase
from treemla.gate.exits import InvalidEnvironment
from treemla.gate.findings import Findings
from treemla.gate.inputs import Inputs, make_inputs
from treemla.gate.measured import measured
from treemla.gate.tune import (
    MOST_OFF,
    ROWS,
    Gpu,
    Timer,
    fit,
    probes,
    shape_of,
    show_fit,
    show_rows,
    sweep,
    worst_off,
)
from treemla.tiles import PATHS


def tune(cases: Sequence[VerifyCase], out: Path, commit: str | None, path: str | None = None) -> Findings:
    """Tune the kernel `path`, by default this GPU's first. Every time that is measured goes to `out` at once."""
    if problem := path_problem(path):
        raise InvalidEnvironment(problem)
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = PATHS[path] if path else cubins.target_of(device).paths[0]
    gpu = Gpu(kernel, torch.cuda.get_device_properties(device).multi_processor_count)
    out.unlink(missing_ok=True)
    timer = GpuTimer(device, kernel.name, fingerprint.collect(commit), out)
    try:
        failures = run(gpu, cases, timer, tuned.fingerprint(device, kernel), timer.where)
    except WrongResult as error:
        failures = [str(error)]
    return measured("tune", timer.made, failures)


def run(gpu: Gpu, cases: Sequence[VerifyCase], timer: Timer, of: tuned.Fingerprint, where: schema.Where) -> list[str]:
    """What is wrong: nothing where the constants that plans use from now on choose within MOST_OFF of the best on every
    row. New ones are stored where all rows of the table were timed.
    """
    before = tuned.load(of) or cost.DEFAULTS[gpu.kernel.name]
    measured = [(probe, timer(*probe)) for probe in probes(gpu)]
    made = fit(gpu, measured)
    print(f"{show_fit(gpu, made, measured)}\n\n{made}\n", flush=True)
    rows = []
    for case in cases:
        rows.append(sweep(gpu, case, timer, (made, before)))
        print(f"{case.id}: {len(rows[-1].us)} tilings", flush=True)
    off, before_off = worst_off(gpu, made, rows), worst_off(gpu, before, rows)
    keep = off <= max(before_off, MOST_OFF)
    print(f"\n{show_rows(gpu, made if keep else before, rows)}\n")
    print(
        f"farthest from the best of a row: {100 * off:.1f}% by these constants, {100 * before_off:.1f}% by those before"
    )
    if not keep:
        print("not stored: the constants before choose better")
    elif not set(ROWS) <= set(cases):
        print(f"not stored: {len(cases)} of the table's {len(ROWS)} rows were timed")
    else:
        print(f"stored for {of.gpu}: {tuned.store(of, made, where.date, where.command)}")
    return [] if min(off, before_off) <= MOST_OFF else [f"a choice is more than {100 * MOST_OFF:.0f}% from the best"]


class GpuTimer:
    """Times a case cut by a tiling, its result checked against float64; keeps the inputs of the last case.

    made: what was timed, in the file `out` too, metric verify_wgmma_r72_p132_o6 and the like: block rows, parts, overhead, `_half` or `_third` where blocks are shared so.
    """

    def __init__(self, device: torch.device, path: str, where: schema.Where, out: Path) -> None:
        self.device, self.path, self.where, self.out = device, path, where, out
        self.inputs: Inputs | None = None
        self.made: list[schema.Measurement] = []

    def __call__(self, case: VerifyCase, tiling: cost.Tiling) -> float:
        if self.inputs is None or self.inputs.case != case:
            self.inputs = None  # before the next are made
            torch.cuda.empty_cache()
            self.inputs = make_inputs(case, self.device, path=self.path)
        plan = VerifyPlan(
            shape_of(case),
            case.batch,
            self.device,
            block_rows=tiling.block_rows,
            parts=tiling.parts,
            overhead_tiles=tiling.overhead_tiles,
            halved_tiles=tiling.halved_tiles,
            third_tiles=tiling.third_tiles,
            path=self.path,
        )
        inputs = replace(self.inputs, plan=plan)
        inputs.plan_step()
        samples = measure.time_layers(verify_layers(inputs, inputs.kv_layers))
        shares = "_third" if tiling.third_tiles else "_half" if tiling.halved_tiles else ""
        metric = f"verify_{self.path}_r{tiling.block_rows}_p{tiling.parts}_o{tiling.overhead_tiles}{shares}"
        self.made.append(schema.Measurement.of(case.id, metric, "us", samples, self.where))
        schema.append(self.out, self.made[-1])
        print(f"{case.id}, {tiling}: {self.made[-1].value:.1f} us", flush=True)
        return self.made[-1].value

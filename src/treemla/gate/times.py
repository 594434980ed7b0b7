"""The page's times: every kernel that was measured against the context, beside treemla's and beside the roofline."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from treemla import tiles
from treemla.gate import bound, chart, roofline, schema
from treemla.gate.cases import VerifyCase, case_of
from treemla.gate.chart import Series
from treemla.gate.markup import grid, node
from treemla.gate.peers import BY_METRIC, OURS, PEERS
from treemla.gate.plot import FLOOR

PLAN = "treemla's plan, once a step"
SWEPT = re.compile(r"verify_\w+_r[0-9]+_p[0-9]+_o[0-9]+")  # tilings that `tune` tried: hundreds of them
PAGES = {peer.heading: peer.page_size for peer in PEERS if peer.page_size}
DRAWN_US = (1e-3, 1e9)
Figure = Callable[[str, VerifyCase], float | None]


@dataclass(frozen=True)
class Times:
    """One GPU's newest time of each kernel in each case. held: {(kernel, case id): measurement in microseconds}; warm:
    with the KV in L2, where the roofline is another one.
    """

    gpu: str
    warm: bool
    held: Mapping[tuple[str, str], schema.Measurement]

    @property
    def kernels(self) -> list[str]:
        """Ours first, the others as they came."""
        return sorted(dict.fromkeys(kernel for kernel, _ in self.held), key=lambda kernel: kernel != OURS.label)

    @property
    def cases(self) -> list[VerifyCase]:
        """Those measured of a kernel that takes any page size: another stands beside them with the pages it takes."""
        ids = dict.fromkeys(case for kernel, case in self.held if kernel not in PAGES)
        return [case for name in ids if (case := case_of(name))]

    def us(self, kernel: str, case: VerifyCase) -> float | None:
        ids = case.id, replace(case, page_size=PAGES.get(kernel, case.page_size)).id
        return next((self.held[kernel, name].value for name in ids if (kernel, name) in self.held), None)

    def faster(self, kernel: str, case: VerifyCase) -> float | None:
        """How many times ours is faster than a kernel that does the same; None where either was not measured."""
        ours, theirs = self.us(OURS.label, case), self.us(kernel, case)
        return theirs / ours if ours and theirs and kernel not in {OURS.label, PLAN} else None

    def share(self, kernel: str, case: VerifyCase) -> float | None:
        """Percent of the roofline."""
        us, floor = self.us(kernel, case), self.floor(case)
        return 100 * floor / us if us and floor and kernel != PLAN else None

    def floor(self, case: VerifyCase) -> float | None:
        made = None if self.warm else roofline.ceiling(self.gpu)
        return roofline.floor_us(case, made) if made else None


def times(runs: Sequence[schema.Measurement]) -> tuple[list[Times], list[schema.Measurement]]:
    """(those of each GPU, what is no kernel's time in a case: other units, moves of rows, tilings that were tried)"""
    found: dict[tuple[str, bool], dict[tuple[str, str], schema.Measurement]] = {}
    others: dict[tuple[str, str, str], schema.Measurement] = {}
    for run in sorted(runs, key=lambda run: run.where.date):
        drawn = run.unit == "us" and case_of(run.case) and DRAWN_US[0] <= run.value <= DRAWN_US[1]
        if not drawn or SWEPT.fullmatch(run.metric):
            others[run.where.gpu, run.case, run.metric] = run
        else:
            held = found.setdefault((run.where.gpu, run.metric.endswith("_warm")), {})
            held[kernel_of(run), run.case] = run
    return [Times(*key, held) for key, held in found.items()], list(others.values())


def kernel_of(run: schema.Measurement) -> str:
    """What a metric is called; the kernel that the GPU takes unasked is treemla, whether it was asked for or not."""
    name = run.metric.removesuffix("_warm")
    arch = next((gpu.arch for gpu in bound.GPUS if gpu.name in run.where.gpu), None)
    default = {"verify", f"verify_{tiles.TARGETS[arch].paths[0].name}"} if arch else {"verify"}
    if name in default:
        return OURS.label
    if name.split("_")[0] == "plan":
        return PLAN
    return BY_METRIC[name].heading if name in BY_METRIC else f"treemla, {name.removeprefix('verify_')}"


def groups(taken: Times) -> list[list[VerifyCase]]:
    """Cases that differ in context alone, by it: those of several contexts, and what shows the kernels not in these."""
    alike: dict[VerifyCase, list[VerifyCase]] = {}
    for case in taken.cases:
        if len(set(case.contexts)) == 1:
            alike.setdefault(replace(case, contexts=(0,) * case.batch), []).append(case)
    found = sorted(alike.values(), key=len, reverse=True)
    shown: set[str] = set()
    made = []
    for cases in found:
        kernels = {kernel for kernel in taken.kernels for case in cases if taken.us(kernel, case)}
        if len(cases) > 1 or kernels - shown:
            made.append(sorted(cases, key=lambda case: case.contexts))
            shown |= kernels
    return made


def section(runs: Sequence[schema.Measurement]) -> list[Element]:
    """For each GPU charts by context, charts of every case, and a table of all figures; then what is no such time."""
    made, others = times(runs)
    parts = [part for taken in made for part in _of_gpu(taken)]
    swept = sum(bool(SWEPT.fullmatch(run.metric)) for run in others)
    rows = [
        [run.case, run.metric, f"{run.value:,.5g}", f"{run.mad:.2g}", run.unit, *_origin(run.where)]
        for run in others
        if not SWEPT.fullmatch(run.metric)
    ]
    if rows:
        headers = ["case", "metric", "median", "spread", "unit", "commit", "date"]
        parts += [node("h3", "Other measurements"), grid(headers, rows)]
    if swept:
        parts.append(node("p", f"{swept} times of tilings that tune tried are not shown.", class_="soft"))
    return parts


def _of_gpu(taken: Times) -> list[Element]:
    said = "The newest figure of each kernel and case; a kernel that needs pages of its own size has them."
    title = f"Times on {taken.gpu}" + (", the KV in L2" if taken.warm else "")
    parts = [node("h2", title), node("p", said, class_="soft"), _legend(taken)]
    for cases in groups(taken):
        case = cases[0]
        kind = "fp8 KV" if case.fp8_kv else "bf16"
        alike = f"batch {case.batch}, T = {case.tree_tokens}, H = {case.heads}, pages of {case.page_size}, {kind}"
        parts += [node("h3", alike), node("div", *_against_context(taken, cases), class_="charts")]
    parts += [node("h3", "Every case"), node("div", *_every_case(taken), class_="charts"), _table(taken)]
    return parts


def _against_context(taken: Times, cases: Sequence[VerifyCase]) -> list[Element]:
    x = chart.point_axis("committed tokens", [case.contexts[0] for case in cases])
    floor = [(float(case.contexts[0]), us) for case in cases if (us := taken.floor(case))]
    all_us = [*_series(taken, cases, taken.us), *([Series(FLOOR, floor, None)] if floor else [])]
    made = [chart.lines("Time a layer, us", all_us, x, chart.log_axis("us", _values(all_us)))]
    if faster := _series(taken, cases, taken.faster):
        y = chart.log_axis("times", [1.0, *_values(faster)])
        made.append(chart.lines("How many times treemla is faster", faster, x, y))
    if shares := _series(taken, cases, taken.share):
        y = chart.linear_axis("percent", [100.0, *_values(shares)], zero=True)
        made.append(chart.lines("Share of the roofline, percent", shares, x, y))
    return made


def _every_case(taken: Times) -> list[Element]:
    us: dict[str, list[Series]] = {}
    shares: dict[str, list[Series]] = {}
    for case in taken.cases:
        name = case.id.removeprefix("verify-")
        for style, kernel in enumerate(taken.kernels):
            for rows, figure in ((us, taken.us(kernel, case)), (shares, taken.share(kernel, case))):
                if figure:
                    rows.setdefault(name, []).append(Series(kernel, [(figure, 0.0)], style))
        if floor := taken.floor(case):
            us[name].append(Series(FLOOR, [(floor, 0.0)], None))
    made = [chart.dots("Time a layer, us", us, chart.log_axis("us", _across(us)))]
    if shares:
        axis = chart.linear_axis("percent", [100.0, *_across(shares)], zero=True)
        made.append(chart.dots("Share of the roofline, percent", shares, axis))
    return made


def _table(taken: Times) -> Element:
    rows = []
    for case in taken.cases:
        cells = []
        for kernel in taken.kernels:
            us, faster = taken.us(kernel, case), taken.faster(kernel, case)
            cells.append("-" if us is None else f"{us:,.1f}" + (f" ({faster:.1f}x)" if faster else ""))
        floor, share = taken.floor(case), taken.share(OURS.label, case)
        of = [run.where for (_, name), run in taken.held.items() if name == case.id]
        last = max(of, key=lambda where: where.date)
        cells += [f"{floor:.1f}" if floor else "-", f"{share:.0f}%" if share else "-", *_origin(last)]
        rows.append([case.id, *cells])
    return grid(["us a layer (treemla is faster by)", *taken.kernels, FLOOR, "of roofline", "commit", "date"], rows)


def _legend(taken: Times) -> Element:
    floor = [Series(FLOOR, [], None)] if any(map(taken.floor, taken.cases)) else []
    return chart.legend([*(Series(kernel, [], style) for style, kernel in enumerate(taken.kernels)), *floor])


def _origin(where: schema.Where) -> tuple[str, str]:
    """(commit, date)"""
    return where.treemla[:12], where.date[:10]


def _series(taken: Times, cases: Sequence[VerifyCase], figure: Figure) -> list[Series]:
    made = []
    for style, kernel in enumerate(taken.kernels):
        points = [(float(case.contexts[0]), y) for case in cases if (y := figure(kernel, case))]
        if points:
            made.append(Series(kernel, points, style))
    return made


def _values(series: Sequence[Series]) -> list[float]:
    return [y for held in series for _, y in held.points]


def _across(rows: Mapping[str, Sequence[Series]]) -> list[float]:
    return [held.points[0][0] for row in rows.values() for held in row]

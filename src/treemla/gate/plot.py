"""Pictures of a set of measurements."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treemla.gate import roofline, schema
from treemla.gate.cases import VerifyCase

FLOOR = "roofline floor"
MARKERS = "osD^v<>"


def draw_if_possible(draw: Callable[..., None], *arguments: object) -> None:
    """Call `draw` where matplotlib is installed, and say so where it is not."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    mpl.use("Agg")
    draw(*arguments)


def draw_bars(made: Sequence[schema.Measurement], path: Path) -> None:
    """Microseconds a layer by case on a logarithmic axis: treemla, Triton, and the roofline's floor as a tick."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(measurement.case for measurement in made))
    place = {case: len(cases) - i for i, case in enumerate(cases)}
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    for metric, label, shift in (("verify", "treemla", 0.18), ("triton", "SGLang Triton", -0.18)):
        taken = [m for m in made if m.metric.startswith(metric)]  # verify_mma too
        if not taken:  # a legend names what is drawn
            continue
        bars = axes.barh([place[m.case] + shift for m in taken], [m.value for m in taken], height=0.34, label=label)
        axes.bar_label(
            bars, [f"{m.value:,.0f}" if m.value >= 100 else f"{m.value:.1f}" for m in taken], padding=3, fontsize=8
        )
    floors = {case: floor for case, floor in roofline.floors_us(made[0].where.gpu).items() if case in place}
    heights = [place[case] + 0.18 for case in floors]
    axes.plot(list(floors.values()), heights, "k|", markersize=12, label=FLOOR)
    axes.set(xscale="log", xlabel="microseconds a layer", title=f"{made[0].where.gpu}, {made[0].where.date[:10]}")
    axes.set_yticks(list(place.values()), list(place))
    axes.set_xlim(right=4 * axes.get_xlim()[1])  # room for the longest bar's label
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.savefig(path)
    print(f"picture: {path}")


def draw_peers(
    times_us: Mapping[str, Mapping[str, float]],
    floors_us: Mapping[str, float],
    rows: Sequence[VerifyCase],
    where: schema.Where,
    paths: Sequence[Path],
) -> None:
    """Left, time against context for the rows that differ in it alone; right, every row's share of the roofline.

    times_us: {peer: {row's id: microseconds a layer}}. floors_us: {row's id: floor}; without it there is no right side.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    left, *right = figure.subplots(1, 2 if floors_us else 1, squeeze=False)[0]
    by_context = same_but_context(rows)
    for (peer, times), marker in zip(times_us.items(), itertools.cycle(MARKERS), strict=False):
        shown = [row for row in by_context if row.id in times]
        left.plot([row.contexts[0] for row in shown], [times[row.id] for row in shown], marker=marker, label=peer)
    contexts = [row.contexts[0] for row in by_context]
    if floors_us:
        left.plot(contexts, [floors_us[row.id] for row in by_context], "k--", label=FLOOR)
    left.set(xscale="log", yscale="log", xlabel="committed tokens", ylabel="microseconds a layer")
    left.set(title=f"batch {by_context[0].batch}, T = {by_context[0].tree_tokens}, H = {by_context[0].heads}")
    left.set_xticks(contexts, [f"{context:,}" for context in contexts])
    left.set_xticks([], minor=True)
    left.grid(alpha=0.3)
    for axes in right:
        _draw_shares(axes, times_us, floors_us, rows)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{where.gpu}, {where.date[:10]}, treemla {where.treemla[:12]}")
    for path in paths:
        figure.savefig(path, dpi=150)
        print(f"picture: {path}")


def _draw_shares(
    axes: Any,
    times_us: Mapping[str, Mapping[str, float]],
    floors_us: Mapping[str, float],
    rows: Sequence[VerifyCase],
) -> None:
    place = {row.id: len(rows) - i for i, row in enumerate(rows)}
    for (peer, times), marker in zip(times_us.items(), itertools.cycle(MARKERS), strict=False):
        shares = {name: 100 * floors_us[name] / us for name, us in times.items()}
        axes.plot(list(shares.values()), [place[name] for name in shares], marker, label=peer)
    axes.set(xlabel="percent of the roofline", xlim=(0, 100), title="share of the roofline")
    axes.set_yticks(list(place.values()), [row.id.removeprefix("verify-").removesuffix("-bf16") for row in rows])
    axes.grid(alpha=0.3)


def same_but_context(rows: Sequence[VerifyCase]) -> list[VerifyCase]:
    """The largest group of rows that are alike but for the length of their requests, shortest first."""
    groups: dict[VerifyCase, list[VerifyCase]] = {}
    for row in rows:
        groups.setdefault(replace(row, contexts=(0,) * row.batch), []).append(row)
    alike = max(groups, key=lambda key: len(groups[key]))  # the first of equals
    return sorted(groups[alike], key=lambda row: row.contexts)

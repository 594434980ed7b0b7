"""A picture of a set of measurements."""

from collections.abc import Sequence
from pathlib import Path

from treemla.gate import roofline, schema


def draw_if_possible(made: Sequence[schema.Measurement], path: Path) -> None:
    """Write `path` where matplotlib is installed; say so either way."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    mpl.use("Agg")
    draw(made, path)
    print(f"picture: {path}")


def draw(made: Sequence[schema.Measurement], path: Path) -> None:
    """Microseconds a layer by case on a logarithmic axis: treemla, Triton, and the roofline's floor as a tick."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(measurement.case for measurement in made))
    place = {case: len(cases) - i for i, case in enumerate(cases)}
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    for metric, label, shift in (("verify", "treemla", 0.18), ("triton", "SGLang Triton", -0.18)):
        taken = [m for m in made if m.metric == metric]
        bars = axes.barh([place[m.case] + shift for m in taken], [m.value for m in taken], height=0.34, label=label)
        axes.bar_label(
            bars, [f"{m.value:,.0f}" if m.value >= 100 else f"{m.value:.1f}" for m in taken], padding=3, fontsize=8
        )
    floors = {case: floor for case, floor in roofline.floors_us(made[0].where.gpu).items() if case in place}
    heights = [place[case] + 0.18 for case in floors]
    axes.plot(list(floors.values()), heights, "k|", markersize=12, label="roofline floor")
    axes.set(xscale="log", xlabel="microseconds a layer", title=f"{made[0].where.gpu}, {made[0].where.date[:10]}")
    axes.set_yticks(list(place.values()), list(place))
    axes.set_xlim(right=4 * axes.get_xlim()[1])  # room for the longest bar's label
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.savefig(path)

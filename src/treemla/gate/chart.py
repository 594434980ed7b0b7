"""Charts as inline SVG: colours come from the page's style, figures are in the tooltips of their markers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from treemla.gate.markup import node

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 402, 12, 206
ROW = 34  # height of a case among `dots`: its name above its markers
COLOURS = 8  # of page.css
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.5 -3.5h7v7h-7Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 -4.5L4.5 3.5H-4.5Z",
    "M0 4.5L4.5 -3.5H-4.5Z",
    "M-4.5 0L3.5 -4.5V4.5Z",
    "M4.5 0L-3.5 -4.5V4.5Z",
)


@dataclass(frozen=True)
class Series:
    """points: (x, y), by x. style: which colour and marker; None: a dashed line that is no measurement."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int | None


@dataclass(frozen=True)
class Axis:
    """ticks: {value: what stands there}, all between low and high."""

    label: str
    low: float
    high: float
    ticks: Mapping[float, str]
    log: bool = False

    def share(self, value: float) -> float:
        """Of the way from low to high."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)


@dataclass(frozen=True)
class Mark:
    """An upright line: something happened between two points."""

    x: float
    text: str
    kind: str


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """From a round number below the values to one above; at most eight ticks."""
    first, last = (math.floor(math.log10(edge)) for edge in (min(values), max(values)))
    steps = [float(f"{digit}e{power}") for power in range(first - 1, last + 2) for digit in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values))
    high = min(step for step in steps if step >= max(values) and step > low)
    inside = [step for step in steps if low <= step <= high]
    if len(inside) > 8:
        inside = [step for step in inside if math.log10(step).is_integer()]
    return Axis(label, low, high, {step: f"{step:,.6g}" for step in inside}, log=True)


def linear_axis(label: str, values: Sequence[float], *, zero: bool) -> Axis:
    """From zero, or from below the values with room for a change of some percent to be seen as small."""
    low, high = (0.0 if zero else min(values)), max(values)
    if not zero:
        room = max(0.1 * (high - low), 0.02 * high)
        low, high = low - room, high + room
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= 0.999 * rough)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return Axis(label, first * step, last * step, {n * step: f"{n * step:,.6g}" for n in range(first, last + 1)})


def point_axis(label: str, values: Sequence[float]) -> Axis:
    """Logarithmic, a tick at each value that has room for its name."""
    ticks: dict[float, str] = {}
    held = sorted(set(values))
    low, high = held[0] / 1.15, held[-1] * 1.15
    axis = Axis(label, low, high, {}, log=True)
    for value in held:
        if not ticks or (axis.share(value) - axis.share(max(ticks))) * (RIGHT - LEFT) > 50:
            ticks[value] = f"{value:,.0f}"
    return Axis(label, low, high, ticks, log=True)


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> Element:
    """A figure: lines with a marker at each point."""
    drawn = [*_upright(x, TOP, BOTTOM), *_level(y)]
    for mark in marks:
        at = _across(x, mark.x)
        said = node("title", mark.text)
        drawn.append(node("line", said, x1=at, x2=at, y1=TOP, y2=BOTTOM, class_=f"mark {mark.kind}"))
    for held in series:
        places = [(_across(x, px), BOTTOM - y.share(py) * (BOTTOM - TOP)) for px, py in held.points]
        line = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        drawn.append(node("path", d=line, class_=f"line {_colour(held)}"))
        if held.style is not None:
            drawn += [
                marker(held, at, f"{held.label}: {py:,.4g} {y.label} at {px:,.6g} {x.label}")
                for at, (px, py) in zip(places, held.points, strict=True)
            ]
    drawn.append(node("text", x.label, x=(LEFT + RIGHT) // 2, y=HEIGHT - 6, class_="name"))
    return _figure(title, HEIGHT, drawn)


def dots(title: str, rows: Mapping[str, Sequence[Series]], x: Axis) -> Element:
    """A figure: a row a case with the marker of each series at its one point's x; a dashed series is a tick."""
    bottom = TOP + ROW * len(rows)
    left = 10
    drawn = _upright(x, TOP, bottom, left)
    for number, (name, series) in enumerate(rows.items()):
        y = TOP + ROW * number + 24
        drawn.append(node("text", name, x=left, y=y - 11, class_="row"))
        drawn.append(node("line", x1=left, x2=RIGHT, y1=y, y2=y, class_="rule"))
        for held in series:
            value = held.points[0][0]
            at, said = _across(x, value, left), f"{held.label}: {value:,.4g} {x.label}"
            if held.style is None:
                drawn.append(node("line", node("title", said), x1=at, x2=at, y1=y - 7, y2=y + 7, class_="tick"))
            else:
                drawn.append(marker(held, (at, y), said))
    drawn.append(node("text", x.label, x=(left + RIGHT) // 2, y=bottom + 36, class_="name"))
    return _figure(title, bottom + 44, drawn)


def legend(series: Sequence[Series]) -> Element:
    """One for all charts in which the series have these styles."""
    items = []
    for held in series:
        sign = marker(held, (12, 8), "") if held.style is not None else node("g")
        line = node("path", d="M1 8H23", class_=f"line {_colour(held)}")
        items.append(node("li", node("svg", line, sign, viewBox="0 0 24 16", aria_hidden="true"), held.label))
    return node("ul", *items, class_="legend")


def marker(series: Series, at: tuple[float, float], said: str) -> Element:
    shape = MARKERS[(series.style or 0) % len(MARKERS)]
    place = f"translate({at[0]:.1f} {at[1]:.1f})"
    tip = [node("title", said)] if said else []
    return node("path", *tip, d=shape, transform=place, class_=f"dot {_colour(series)}")


def _colour(series: Series) -> str:
    return "dashed" if series.style is None else f"c{series.style % COLOURS}"


def _across(x: Axis, value: float, left: int = LEFT) -> float:
    return left + x.share(value) * (RIGHT - left)


def _upright(x: Axis, top: int, bottom: int, left: int = LEFT) -> list[Element]:
    drawn = []
    for value, text in x.ticks.items():
        at = _across(x, value, left)
        end = "start" if at < left + 8 else "end" if at > RIGHT - 8 else "middle"
        drawn.append(node("line", x1=at, x2=at, y1=top, y2=bottom, class_="rule"))
        drawn.append(node("text", text, x=at, y=bottom + 16, text_anchor=end))
    return drawn


def _level(y: Axis) -> list[Element]:
    drawn = []
    for value, text in y.ticks.items():
        at = BOTTOM - y.share(value) * (BOTTOM - TOP)
        drawn.append(node("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="rule"))
        drawn.append(node("text", text, x=LEFT - 6, y=at + 4, text_anchor="end"))
    return drawn


def _figure(title: str, height: int, drawn: Sequence[Element]) -> Element:
    shown = node("svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)
    return node("figure", node("figcaption", title), shown)

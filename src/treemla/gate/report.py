"""Tables for people."""

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns under `headers`: numbers to the right, words to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) or _is_number(str(row[i])) for row in rows)
        for i in range(len(headers))
    ]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *map(line, cells)])


def _is_number(text: str) -> bool:
    """Digits with a unit sign or none at all (`112.3x`, `48%`, `-` where there is no figure)."""
    return text == "-" or text.rstrip("x%").replace(".", "", 1).isdigit()

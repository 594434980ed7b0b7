"""HTML and SVG as a tree of elements: no text in it can become a tag or an attribute, whatever it holds."""

import re
from collections.abc import Iterable, Sequence
from unicodedata import category
from xml.etree.ElementTree import Element, tostring

Part = Element | str


def node(tag: str, *parts: Part, **attributes: object) -> Element:
    """An element with texts and elements in it. class_ is class, stroke_width is stroke-width; None leaves one out."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            said = f"{value:.5g}" if isinstance(value, float) else plain(str(value))
            made.set(name.rstrip("_").replace("_", "-"), said)
    for part in parts:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + plain(part)
        else:
            made.text = (made.text or "") + plain(part)
    return made


def plain(text: str) -> str:
    """Without what is no text or turns around what follows it: controls, halves of surrogate pairs, bidi overrides."""
    return "".join("\ufffd" if category(c) in {"Cc", "Cf", "Cs"} and c not in "\n\t" else c for c in text)


def grid(headers: Sequence[str], rows: Iterable[Iterable[Part]]) -> Element:
    """A table in a box that scrolls by itself where the page is narrower; the first cell of a row is its heading."""
    cells = [list(row) for row in rows]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i, _ in enumerate(headers)]
    ends = ["n" if numbers else None for numbers in right]
    head = node("tr", *(node("th", text, scope="col", class_=end) for text, end in zip(headers, ends, strict=True)))
    body = [node("tr", *(_cell(i, part, ends[i]) for i, part in enumerate(row))) for row in cells]
    return node("div", node("table", node("thead", head), node("tbody", *body)), class_="wide", tabindex=0)


def listed(texts: Iterable[str]) -> Element:
    return node("ul", *(node("li", text) for text in texts))


def document(title: str, style: str, parts: Iterable[Element]) -> str:
    """A page that loads nothing and runs nothing: its own policy forbids both."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=policy),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", name="color-scheme", content="light dark"),
        node("title", title),
        node("style", style),
    )
    page = node("html", head, node("body", node("main", *parts)), lang="en")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _cell(column: int, part: Part, end: str | None) -> Element:
    return node("td", part, class_=end) if column else node("th", part, scope="row")


def _is_number(part: Part) -> bool:
    """A figure, one that became another or has another in brackets, or what stands for none."""
    figure = r"[-+]?[0-9][0-9,.]*[x%]?"
    return isinstance(part, str) and re.fullmatch(rf"-|{figure}( -> {figure}| \({figure}\))?", part) is not None

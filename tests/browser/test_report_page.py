"""The report's page as a browser shows it: whole, readable, in light and dark, on a phone and on a desk.

No picture is compared with another: fonts differ by machine. What must hold of every picture is checked in it.
"""

import io

from PIL import Image

CHARTS = 20  # at least, of the sample
OVERLAPPING = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([one, a], i) => texts.slice(i + 1)
        .filter(([_, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
        .map(([other]) => `${svg.ariaLabel}: ${one} / ${other}`));
})"""
CUT_OFF = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text, path, line')].filter(part => {
        const held = part.getBoundingClientRect();
        return held.left < box.left - 2 || held.right > box.right + 2 || held.top < box.top - 2 || held.bottom > box.bottom + 2;
    }).map(part => `${svg.ariaLabel}: ${part.outerHTML}`);
})"""
FAINT = """() => {
    const parts = colour => colour.match(/[0-9.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = parts(colour).map(c => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = node => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (parts(colour)[3] !== 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const far = (one, other) => {
        const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    };
    const dots = [...document.querySelectorAll('.dot')].filter(dot => far(getComputedStyle(dot).fill, behind(dot)) < 3);
    const texts = [...document.querySelectorAll('main *')]
        .filter(node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) && node.tagName !== 'title')
        .filter(node => {
            const style = getComputedStyle(node);
            return far(node.tagName === 'text' ? style.fill : style.color, behind(node)) < 4.5;
        });
    return [...dots, ...texts].map(node => node.outerHTML.slice(0, 120));
}"""
SMALL = """() => [...document.querySelectorAll('figure svg text')]
    .map(text => [text.textContent, text.getBoundingClientRect().height])
    .filter(([text, height]) => text.trim() && height < 10)"""
COLOURS = """svg => Object.fromEntries([...svg.querySelectorAll('.dot')]
    .map(dot => [dot.classList[1], getComputedStyle(dot).fill.match(/[0-9]+/g).map(Number)]))"""


def test_nothing_but_the_file_is_asked_for_and_nothing_fails(view):
    assert (view.asked, view.failed, view.said) == ([view.uri], [], [])


def test_what_is_hostile_is_shown_and_does_nothing(view):
    assert view.page.evaluate("() => [window.hit, document.images.length, document.scripts.length]") == [None, 0, 0]
    if "hostile" in view.uri:
        assert view.page.get_by_text("<img src=x onerror=").count() >= 4


def test_the_verdict_is_seen_without_scrolling(view):
    box = view.page.locator(".verdict").bounding_box()
    assert view.page.locator(".verdict").inner_text().startswith("report: FAILED")
    assert box["y"] + box["height"] < 400


def test_every_chart_has_a_size(view):
    boxes = [chart.bounding_box() for chart in view.page.locator("figure svg").all()]
    assert len(boxes) >= CHARTS
    assert all(box["width"] > 300 and box["height"] > 100 for box in boxes)


def test_the_page_never_scrolls_sideways(view):
    asked, given = view.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert asked <= given


def test_no_two_texts_of_a_chart_overlap_and_none_is_cut_off_or_tiny(view):
    assert view.page.evaluate(OVERLAPPING) == []
    assert view.page.evaluate(CUT_OFF) == []
    assert view.page.evaluate(SMALL) == []


def test_every_text_and_marker_stands_out_from_what_is_behind_it(view):
    assert view.page.evaluate(FAINT) == []


def test_every_chart_is_drawn_in_the_colours_of_its_series(view):
    """Most of them: markers may lie on each other."""
    for chart in view.page.locator("figure svg").all():
        picture = Image.open(io.BytesIO(chart.screenshot())).convert("RGB")
        pixels = {colour for _, colour in picture.getcolors(picture.width * picture.height)}
        by_series = chart.evaluate(COLOURS)
        colours = {tuple(colour[:3]) for colour in by_series.values()}
        assert len(colours) == len(by_series)
        assert len(colours & pixels) > len(colours) / 2, chart.get_attribute("aria-label")

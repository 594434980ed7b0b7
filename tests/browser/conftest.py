"""A real browser, headless, with the pages of tests/sample_report.py open in each width and colour scheme."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

BUILD = Path(__file__).parents[2] / "build/browser"
PAGES = ("report", "hostile")
VIEWS = [(width, scheme) for width in (400, 1280) for scheme in ("light", "dark")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chromium", help="an installed one; default: playwright's own")


@dataclass
class View:
    """A page as it is shown. said: of the console, and errors. asked: addresses; failed: those that gave nothing."""

    page: Page
    uri: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser(request):
    with sync_playwright() as started:
        chromium = request.config.getoption("--chromium")
        opened = started.chromium.launch(executable_path=chromium, chromium_sandbox=False)  # CI's user may be root
        yield opened
        opened.close()


@pytest.fixture(
    scope="session", params=[(name, *view) for name in PAGES for view in VIEWS], ids=lambda p: "-".join(map(str, p))
)
def view(request, browser: Browser):
    """Every page in every view, without a network; a picture of each is left in build/browser/."""
    name, width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 950}, color_scheme=scheme, offline=True)
    made = View(context.new_page(), (BUILD / f"{name}.html").as_uri())
    made.page.on("console", lambda message: made.said.append(message.text))
    made.page.on("pageerror", lambda error: made.said.append(str(error)))
    made.page.on("request", lambda asked: made.asked.append(asked.url))
    made.page.on("requestfailed", lambda asked: made.failed.append(asked.url))
    made.page.goto(made.uri)
    made.page.screenshot(path=BUILD / f"{name}-{width}-{scheme}.png")
    yield made
    context.close()

"""A real browser, headless: Chromium or Chrome of the system, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-quic"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]


def found() -> str:
    """The browser's path; the test is skipped where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser on PATH ({', '.join(NAMES)}): install Debian's chromium, or Chrome")


@dataclass
class Opened:
    """A page that was opened, and what it did."""

    page: Any
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Errors that were thrown, and whatever the console was told but notes."""

    def column(self, source: str, name: str) -> list[Any]:
        """A column of a data source of bokeh, by its name; what is no number is None."""
        got = self.page.evaluate(
            "([source, name]) => Array.from(Bokeh.documents[0].get_model_by_name(source).data.get?.(name)"
            " ?? Bokeh.documents[0].get_model_by_name(source).data[name])"
            ".map((one) => typeof one == 'number' && isNaN(one) ? null : one)",
            [source, name],
        )
        assert isinstance(got, list)
        return got

    def table(self, caption: str) -> list[list[str]]:
        """The rows of the table whose caption begins so."""
        rows = self.page.evaluate(
            "(caption) => [...document.querySelectorAll('details')]"
            ".filter((one) => one.querySelector('summary').textContent.startsWith('as a table: ' + caption))"
            ".flatMap((one) => [...one.querySelectorAll('tbody tr')])"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))",
            caption,
        )
        assert isinstance(rows, list)
        return rows


@contextmanager
def opened(path: Path, scheme: str = "light") -> Iterator[Opened]:
    """A file, open in a browser of that colour scheme, once all its pictures are drawn."""
    program = found()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=QUIET, timeout=120_000)
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1180, "height": 900})
        page.set_default_timeout(120_000)
        made = Opened(page)
        page.on("request", lambda request: made.requests.append(request.url))
        page.on("pageerror", lambda error: made.problems.append(str(error)))
        page.on("console", lambda said: said.type == "log" or made.problems.append(f"{said.type}: {said.text}"))
        try:
            page.goto(path.as_uri())
            page.wait_for_function("document.documentElement.dataset.drawn == 'yes'")
            yield made
        finally:
            browser.close()

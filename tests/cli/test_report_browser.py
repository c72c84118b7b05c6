"""report, in a real browser: it draws, asks for nothing, and its numbers are those of the log."""

import json
from pathlib import Path
from typing import Any

import pytest

import weightvc
from tests.cli.conftest import Shell
from tests.kit import browser, history
from tests.kit.browser import Opened
from tests.kit.weights import Bits

HOSTILE = "</script><img src=x onerror='window.hurt = 1'>"
PICTURES = ("graph", "density", "stored", "smaller", "depth", "cold", "layers", "ulp", "patches", "storage")


def compared(shell: Shell, page: Opened, log: list[dict[str, Any]]) -> None:
    """Each version of the log is drawn, with its numbers."""
    fields = ("id", "step", "branch", "message", "generation", "changed", "density", "patch", "base", "stored")
    found = list(zip(*(page.column("versions", name) for name in (*fields, "smaller", "state")), strict=True))
    wanted = []
    for one in reversed(log):
        edges = {bool(edge["from"]): edge["bytes"] for edge in one["edges"]}
        stored = one["bytes"] or None
        row = (
            one["id"][:12],
            "none" if one["step"] is None else str(one["step"]),
            one["branch"],
            one["message"][:80],
        )
        row += (one["generation"], one["changed"], one["density"], edges.get(True), edges.get(False), stored)
        row += (one["full_bytes"] / stored if stored else None, "expired" if one["expired"] else "kept")
        wanted.append(row)
    assert found == wanted


def looked_at(page: Opened, path: Path, pictures: tuple[str, ...]) -> None:
    """Nothing was asked for but the file, nothing went wrong, and there is something in each picture."""
    assert page.requests == [path.as_uri()]
    assert page.problems == []
    names = page.page.evaluate("[...Bokeh.documents[0].roots()].map((root) => root.name)")
    assert set(names) == set(pictures)
    for i in range(len(names)):
        canvas = page.page.locator(".bk-Figure").nth(i)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box["width"] > 600
        assert box["height"] > 100


def inked(page: Opened) -> list[int]:
    """How many colours each canvas of the page has."""
    counts = page.page.evaluate(
        """() => {
          const found = [];
          const look = (root) => {
            for (const one of root.querySelectorAll("*")) {
              if (one.shadowRoot) look(one.shadowRoot);
              if (one.tagName == "CANVAS" && one.width > 600) {
                const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
                found.push(new Set(new Uint32Array(data.buffer)).size);
              }
            }
          };
          look(document);
          return found;
        }"""
    )
    return [int(count) for count in counts]


@pytest.fixture
def told(shell: Shell, history: dict[str, str]) -> list[dict[str, Any]]:
    """The log of a history with branches, tags, a merge, a revert, a base, a version that changes nothing, and a
    hostile message."""
    shell.run("commit", "2.safetensors", "-m", HOSTILE)
    shell.run("commit", "2.safetensors", "-m", "the same again", "--step", "5", "--base")
    shell.run("revert", "main~2")
    shell.run("compact")
    log: list[dict[str, Any]] = shell.json("log", "--all")
    assert len(log) == 7
    return log


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_what_the_log_says(shell: Shell, told: list[dict[str, Any]], scheme: str) -> None:
    browser.found()
    shell.run("report")
    path = shell.cwd / "report.html"
    with browser.opened(path, scheme) as page:
        looked_at(page, path, PICTURES)
        compared(shell, page, told)
        drawn = [colours for colours in inked(page) if colours > 1]  # over each lies another, for what is dragged
        assert len(drawn) == len(PICTURES)
        assert min(drawn) > 10
        # The same numbers in words.
        newest = list(reversed(told))[::-1]
        assert [row[:2] for row in page.table("versions")] == [
            [one["id"][:12], "none" if one["step"] is None else str(one["step"])] for one in newest
        ]
        assert [row[3:5] for row in page.table("density")] == [
            [str(one["changed"]), str(one["elements"])] for one in newest
        ]
        assert [row[4] for row in page.table("times smaller")] == [str(one["bytes"]) for one in newest]
        plans = [shell.json("plan", "nothing", one["id"]) for one in newest]
        assert [row[3:] for row in page.table("cold pulls")] == [
            [str(plan["patches"]), str(plan["bytes"]), str(plan["requests"])] for plan in plans
        ]
        # What stands in the repository is text.
        assert page.page.evaluate("window.hurt") is None
        assert any(HOSTILE in row[-1] for row in page.table("versions"))
        assert page.problems == []


def test_the_button_turns_the_colours(shell: Shell, told: list[dict[str, Any]]) -> None:
    browser.found()
    shell.run("report")
    paper = "getComputedStyle(document.body).backgroundColor"
    axis = "Bokeh.documents[0].get_model_by_name('density').below[0].major_label_text_color"
    with browser.opened(shell.cwd / "report.html", "dark") as page:
        dark = page.page.evaluate(paper), json.dumps(page.page.evaluate(axis))
        page.page.click("#theme")
        light = page.page.evaluate(paper), json.dumps(page.page.evaluate(axis))
        assert dark[0] == "rgb(13, 17, 23)"
        assert light[0] == "rgb(255, 255, 255)"
        assert dark[1] != light[1]
        page.page.emulate_media(color_scheme="light")
        page.page.click("#theme")
        assert (page.page.evaluate(paper), json.dumps(page.page.evaluate(axis))) == dark
        assert page.problems == []


def test_what_is_pointed_at_is_told(shell: Shell, told: list[dict[str, Any]]) -> None:
    browser.found()
    shell.run("report")
    with browser.opened(shell.cwd / "report.html") as page:
        # Where the marker of a version of main lies on the screen, by its generation.
        place = """(version) => {
              const view = Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name("graph").id);
              const box = view.canvas_view.el.getBoundingClientRect();
              return [box.left + view.frame.x_scale.compute(version), box.top + view.frame.y_scale.compute(0)];
            }"""
        for number, message in ((0, "message 0"), (3, HOSTILE)):
            at = page.page.evaluate(place, number)
            page.page.mouse.move(at[0] - 30, at[1])
            page.page.mouse.move(at[0], at[1], steps=5)
            tooltip = page.page.locator(".bk-Tooltip").first
            tooltip.wait_for()
            text = tooltip.evaluate("(one) => one.shadowRoot.textContent")
            (one,) = [one for one in told if one["message"] == message]
            assert one["generation"] == number
            assert one["id"][:12] in text
            assert message in text
        assert page.page.evaluate("window.hurt") is None
        assert page.problems == []


def test_ten_thousand_versions(shell: Shell, tmp_path: Path) -> None:
    browser.found()
    with weightvc.init(shell.cwd / ".weightvc", cache=None) as repository:
        repository.commit(Bits(history.weights(0)), step=0)
        history.lay(repository.store, 9_999)
    done = shell.run("report", "--stats", "--no-cache")
    path = shell.cwd / "report.html"
    assert done.stdout.startswith("report.html: 10000 versions, ")
    assert path.stat().st_size < 2_000_000
    # The root, segments, the manifests of 64 versions, and of those that lead to the newest.
    assert int(done.stderr.split()[1]) < 200
    with browser.opened(path) as page:
        looked_at(page, path, PICTURES)
        compared(shell, page, shell.json("log", "--all"))

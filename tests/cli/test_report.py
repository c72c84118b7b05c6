"""report: the file, and what stands in the way of it. What a browser makes of it is in test_report_browser.py."""

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from weightvc_cli import pictures

HOSTILE = "</script><img src=x onerror=alert(1)><b>&amp;"


def drawn(shell: Shell, *args: str) -> str:
    """The page that a report wrote."""
    shell.run("report", "-o", "out.html", *args)
    return (shell.cwd / "out.html").read_text()


def unpacked(page: str, name: str) -> str:
    """A packed text of a page."""
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(found)).decode()


def test_it_says_what_it_wrote(shell: Shell, history: dict[str, str]) -> None:
    said = shell.out("report", "-o", "out.html")
    assert re.fullmatch(r"out\.html: 4 versions, \d+ KB\n", said)
    assert shell.out("report").startswith("report.html: ")
    assert shell.out("report", ".weightvc", "-n", "2").startswith("report.html: 2 versions")
    assert sorted(path.name for path in shell.cwd.glob("*.html*")) == ["out.html", "report.html"]


def test_it_is_one_small_file_that_names_no_other(shell: Shell, history: dict[str, str]) -> None:
    page = drawn(shell)
    assert len(page) < 1_000_000
    assert not re.search(r"(?:src|href)=", page)
    assert "default-src 'none'" in page


def test_nothing_is_written_to_the_repository(shell: Shell, history: dict[str, str]) -> None:
    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in (shell.cwd / ".weightvc").rglob("*") if p.is_file()}

    before = files()
    drawn(shell)
    assert files() == before


def test_what_stands_in_the_repository_is_text(shell: Shell, history: dict[str, str]) -> None:
    shell.run("commit", "0.safetensors", "-m", HOSTILE, "--run", HOSTILE)
    page = drawn(shell)
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&lt;b&gt;&amp;amp;" in page
    assert "onerror" in unpacked(page, "drawing")
    assert page.count("</script>") == 4


def test_an_empty_repository(shell: Shell) -> None:
    shell.run("init")
    page = drawn(shell)
    assert "What is stored" in page
    assert "How much changed" not in page


def test_versions_that_have_expired(shell: Shell, history: dict[str, str]) -> None:
    shell.run("tag", "-d", "v1")
    shell.run("branch", "-d", "exp")
    shell.run("commit", "2.safetensors", "-m", "whole", "--base")
    shell.run("expire", "--keep-last", "1")
    shell.run("gc", "--grace", "0s")
    log = shell.json("log")
    assert [one["expired"] for one in log] == [False, True, True, True, True]
    page = drawn(shell)
    assert page.count("(expired)") == 4


def test_weights_that_cannot_be_read_are_missing_and_the_rest_is_there(shell: Shell, history: dict[str, str]) -> None:
    for manifest in (shell.cwd / ".weightvc" / "manifest").iterdir():
        manifest.write_bytes(b"nonsense")
    done = shell.run("report", "--no-cache")
    assert "note: what the newest versions changed is not shown: manifest/" in done.stderr
    page = (shell.cwd / "report.html").read_text()
    assert "What is missing here" in page
    assert "How much changed" in page


def test_without_the_extra(shell: Shell, history: dict[str, str], tmp_path: Path) -> None:
    # As if bokeh were not installed: nobody finds it.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Lacking:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'bokeh':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Lacking())\n"
    )
    path = f"{tmp_path}:{shell.env.get('PYTHONPATH', '')}"
    said = shell.fails(8, "report", env={"PYTHONPATH": path})
    assert said == "bokeh, which draws the report, is not installed: pip install 'weightvc[report]'"
    assert not (shell.cwd / "report.html").exists()


def test_nothing_loads_bokeh_but_the_report() -> None:
    code = "import sys, weightvc, weightvc.report, weightvc_cli.main, weightvc_cli.report, weightvc_cli.page\n"
    code += "assert not {'bokeh', 'numpy', 'torch'} & {*sys.modules}, sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("code", "args", "says"),
    [
        (8, ("-o", "no/such/folder.html"), "there is no directory no/such"),
        (3, ("--metrics", "nothing.jsonl"), "there is no file nothing.jsonl"),
        (8, ("--metrics", "0.safetensors"), "tells of no run and no pull"),
        (3, ("elsewhere",), "holds no weightvc repository"),
        (2, ("",), "the URL is empty"),
        (2, ("--sample", "65"), "--sample"),
        (2, ("-o", "."), "is a directory"),
    ],
)
def test_what_cannot_be_done(
    shell: Shell, history: dict[str, str], code: int, args: tuple[str, ...], says: str
) -> None:
    assert says in shell.fails(code, "report", *args)
    assert not list(shell.cwd.glob("*.html"))


def test_metrics_of_hosts_and_jobs(shell: Shell, history: dict[str, str]) -> None:
    host = shell.out("follow", "--into", "slots", "--updates", "1", "--json", "--no-cache")
    (shell.cwd / "host.jsonl").write_text('{"note": "waiting"}\n' + host + '{"cut')
    shell.run("maintain", "--metrics", "jobs.jsonl", "--prometheus", "jobs.prom")
    (shell.cwd / "jobs.prom").rename(shell.cwd / "jobs <b>.prom")
    page = drawn(shell, "--metrics", "host.jsonl", "--metrics", "jobs.jsonl", "--metrics", "jobs <b>.prom")
    (pull,) = [json.loads(line) for line in host.splitlines()]
    assert f"<td>{pull['age']:.2f}</td>" in page
    assert f"<td>{pull['bytes']}</td>" in page
    (run,) = [json.loads(line) for line in (shell.cwd / "jobs.jsonl").read_text().splitlines()]
    assert page.count(f"bytes/live {run['bytes/live']:g}, ") == 2
    assert "jobs &lt;b&gt;.prom" in page


# Colours


def lightness(colour: str) -> float:
    """Relative luminance, 0 to 1, as the web's rules on contrast define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1, none, to 21."""
    low, high = sorted([lightness(one), lightness(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [pictures.LIGHT, pictures.DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_the_paper(theme: dict[str, object]) -> None:
    paper = str(theme["paper"])
    for text in ("ink", "faint"):
        assert contrast(str(theme[text]), paper) >= 4.5
    series = theme["series"]
    assert isinstance(series, list)
    assert len(series) == len(pictures.MARKERS) == len(set(series))
    for colour in series:
        assert contrast(colour, paper) >= 4.5  # the first is that of links, too
    heat = theme["heat"]
    assert isinstance(heat, list)
    steps = [lightness(colour) for colour in heat]
    # More is further from the paper, seen without hues as well.
    assert steps == sorted(steps, reverse=paper == "#ffffff")

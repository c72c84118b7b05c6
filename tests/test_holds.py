"""The benchmark of docs/when-it-holds.md runs, and writes what the document has a place for."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "holds.py"
DOCUMENT = SCRIPT.parents[1] / "docs" / "when-it-holds.md"
SECTION = re.compile(r"<!-- ([a-z]+) -->\n(.*?)<!-- /[a-z]+ -->", re.DOTALL)
PICTURES = ("holds-distance", "holds-pretraining", "holds-rates")


def test_one_command_makes_all_runs(tmp_path: Path) -> None:
    written, figures = tmp_path / "when-it-holds.md", tmp_path / "figures"
    written.write_text(DOCUMENT.read_text())
    flags = ["--quick", "--write", written, "--json", figures, "--pictures", tmp_path]
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    before, after = (SECTION.split(path.read_text()) for path in (DOCUMENT, written))
    # What is not between marks stays: every third part is a section's text, after its name.
    assert [part for i, part in enumerate(before) if i % 3 != 2] == [
        part for i, part in enumerate(after) if i % 3 != 2
    ]
    sections = dict(zip(after[1::3], after[2::3]))
    assert set(sections) == {"machine", "borders", "rates", "kinds"}
    stages = [run["stage"] for run in found["runs"]]
    assert sorted(set(stages)) == ["GRPO", "SFT", "onward", "pretraining"]
    assert len(sections["rates"].strip().splitlines()) - 2 == stages.count("onward")
    assert len(sections["kinds"].strip().splitlines()) - 2 == len(stages) - stages.count("onward")
    slow, fast = (run["exports"]["bf16"] for run in found["runs"] if run["stage"] == "onward")
    assert slow["distances"][0]["density"] < fast["distances"][0]["density"]
    assert slow["times"] > fast["times"] > 1
    for name in PICTURES:
        text = (tmp_path / f"{name}.svg").read_text()
        assert ET.fromstring(text).tag.endswith("svg")
        assert "prefers-color-scheme:dark" in text


def test_the_document_shows_its_pictures() -> None:
    shown = re.findall(r"\]\(pictures/([\w-]+)\.svg\)", DOCUMENT.read_text())
    assert sorted(shown) == list(PICTURES)
    for name in shown:
        assert (DOCUMENT.parent / "pictures" / f"{name}.svg").stat().st_size < 150_000

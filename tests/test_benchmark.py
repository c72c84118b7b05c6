"""The benchmark of codecs runs, and its bound and its sizes are what they are said to be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "codec.py"
SCHEMES = ["small", "first", "xor+zstd", "gap+xor+zstd", "gap+new+zstd", "gap+raw", "coo", "patch-from"]

SECTION = re.compile(r"<!-- ([a-z]+) -->\n(.*?)<!-- /[a-z]+ -->", re.DOTALL)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), end]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def bits(counts: Any) -> float:
    share = np.asarray(counts, float) / np.sum(counts)
    return -float(np.sum(counts * np.log2(share, where=share > 0, out=np.zeros_like(share))))


def bound(old: np.ndarray, new: np.ndarray) -> float:
    """Bits by exponent, as patch.md has it: positions, then steps in the order of representable numbers."""
    total = 0.0
    rank = np.where(old >> 15, 0x7FFF - old.astype(int), old)
    step = np.where(new >> 15, 0x7FFF - new.astype(int), new) - rank
    for exponent in range(256):
        inside = (old >> 7 & 255) == exponent
        moved = inside & (step != 0)
        if moved.any():
            total += bits([moved.sum(), inside.sum() - moved.sum()])
            total += bits(np.unique(step[moved], return_counts=True)[1])
    return total


def test_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.02, (2, 1 << 17)).astype("f4")
    states = [(values.view("u4") >> 16).astype("u2")]
    states.append((values * (1 + 1e-4 * rng.choice([-1, 1], values.shape).astype("f4"))).view("u4") >> 16)
    old, new = (np.asarray(state, "u2") for state in states)
    for name, state in (("old", old), ("new", new)):
        write(tmp_path / name, {"a": ("BF16", state[0]), "b": ("BF16", state[1][:1001])})
    flags = ["--repeat", "1", "--pair-size", "1", "--schemes", ",".join(SCHEMES), "--json", tmp_path / "figures"]
    command = [sys.executable, SCRIPT, tmp_path / "old", tmp_path / "new", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads((tmp_path / "figures").read_text())["pairs"]
    changed = np.count_nonzero(old[0] != new[0]) + np.count_nonzero(old[1][:1001] != new[1][:1001])
    least = bound(old[0], new[0]) + bound(old[1][:1001], new[1][:1001])
    copies = pair["copies"]
    assert copies == 4
    assert pair["changed"] == copies * changed > 1000
    assert abs(pair["bound"] - copies * least / 8) < 1
    stored = {name: row["stored"] for name, row in pair["schemes"].items()}
    assert list(stored) == SCHEMES
    assert stored["coo"] == 6 * copies * changed
    assert stored["gap+raw"] == 4 * copies * changed
    assert pair["bound"] < stored["small"] < stored["first"] < stored["gap+xor+zstd"] < stored["coo"]
    for row in pair["schemes"].values():
        assert row["encode"] > 0
        assert row["decode"] > 0
        assert 0 < row["hashing"] <= 1
        assert row["unit"] == 2 * 2 * (1 << 17)


def test_one_command_measures_what_the_document_has_a_place_for(tmp_path: Path) -> None:
    document = SCRIPT.parents[1] / "docs" / "benchmarks.md"
    written, figures = tmp_path / "benchmarks.md", tmp_path / "figures"
    written.write_text(document.read_text())
    flags = ["--quick", "--inputs", tmp_path / "inputs", "--write", written, "--json", figures]
    command = [sys.executable, SCRIPT, *flags, "--schemes", "small,fast,xor+zstd"]
    environment = {name: value for name, value in os.environ.items() if name != "WEIGHTVC_CHAIN"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    before, after = (SECTION.split(path.read_text()) for path in (document, written))
    # What is not between marks stays: every third part is a section's text, after its name.
    assert [part for i, part in enumerate(before) if i % 3 != 2] == [
        part for i, part in enumerate(after) if i % 3 != 2
    ]
    sections = dict(zip(after[1::3], after[2::3]))
    assert list(found) == ["machine", *(name for name in found if name not in ("machine", "goals")), "goals"]
    assert set(sections) == set(found)
    assert all(sections.values())
    assert found["machine"]["processor"] in sections["machine"]
    for one in found["patches"]:
        assert f"| {one['schemes']['small']['stored']:,} |" in sections["patches"]
    for goal in found["goals"]:
        state = {True: "held", False: "**missed**", None: "not measured"}[goal["held"]]
        assert f"{state} |" in next(
            row for row in sections["goals"].splitlines() if row.startswith(f"| {goal['what']} |")
        )
    chain = [goal["held"] for goal in found["goals"] if "chain" in goal["what"]]
    assert chain == [None] * 4
    measured = next(goal for goal in found["goals"] if goal["what"] == "small: bytes, × the bound; made inputs")
    ratios = [one["schemes"]["small"]["stored"] / one["bound"] for one in found["patches"] if one["bound"]]
    assert max(value for value, _ in measured["seen"]) == max(ratios)
    assert measured["held"] == (max(ratios) <= 1.04)

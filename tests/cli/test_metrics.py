"""--metrics and --prometheus: what the files say of runs that end well, and of those that do not."""

import itertools
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Shell, on_s3
from tests.kit.stub import Status, Stub

JOBS = {
    "expire": ("--keep-last", "1"),
    "compact": (),
    "gc": (),
    "maintain": (),
    "fsck": (),
}
WATCHED = (Path(__file__).parents[2] / "docs" / "operations.md").read_text().partition("## Numbers to watch")[2]
SERIES = re.compile(
    r'weightvc_([a-z_]+)\{repository="((?:[^"\\]|\\.)*)",command="([a-z]+)"(?:,what="([a-z]+)")?\} (\S+)'
)


class Files:
    """The two files, and the options that name them."""

    def __init__(self, directory: Path) -> None:
        self.lines = directory / "metrics.jsonl"
        self.prometheus = directory / "weightvc.prom"
        self.options = ("--metrics", str(self.lines), "--prometheus", str(self.prometheus))

    def runs(self) -> list[dict[str, Any]]:
        """What is said of each run."""
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def series(self) -> dict[str, float]:
        """Values by `name` or `name/what`; the text has to be as Prometheus wants it."""
        found: dict[str, float] = {}
        order = []
        for line in self.prometheus.read_text().splitlines():
            if line.startswith("# TYPE "):
                assert line.endswith(" gauge")
                order.append(line.split()[2].removeprefix("weightvc_"))
                continue
            match = SERIES.fullmatch(line)
            assert match is not None, line
            name = match[1] + (f"/{match[4]}" if match[4] else "")
            assert name not in found
            assert match[1] == order[-1]  # all of a metric stand below its type
            found[name] = float(match[5])
        assert len(set(order)) == len(order)
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Files in a directory of their own."""
    (tmp_path / "watched").mkdir()
    return Files(tmp_path / "watched")


def fill(shell: Shell, count: int = 3) -> None:
    shell.run("init")
    for i in range(count):
        shell.commit(i, "--base")


@pytest.mark.parametrize("job", JOBS)
def test_a_run_that_ends_well(shell: Shell, files: Files, job: str) -> None:
    fill(shell)
    began = time.time()
    shell.out(job, *JOBS[job], *files.options)
    (line,), series = files.runs(), files.series()
    assert (line["ok"], line["command"], line["repository"]) == (True, job, str(shell.cwd / ".weightvc"))
    assert line.keys().isdisjoint({"error", "message"})
    assert began <= series["time"] == series["ended"] <= line["time"] <= time.time()
    assert series["ok"] == 1
    assert f'command="{job}"' in files.prometheus.read_text()
    # Both have the same numbers.
    numbers = {name: value for name, value in line.items() if name not in ("time", "repository", "command", "ok")}
    for part in {part for name in series for part in name.split("/")}:
        assert f"`{part}`" in WATCHED
    assert numbers == {name: value for name, value in series.items() if name not in ("time", "ended", "ok")}
    assert all(value > 0 for name, value in numbers.items() if name.startswith("seconds/"))
    assert f"seconds/{'gc' if job == 'maintain' else job}" in numbers
    assert [path.name for path in files.lines.parent.iterdir() if path.name.endswith(".tmp")] == []
    shell.out(job, *JOBS[job], *files.options)
    assert [run["ok"] for run in files.runs()] == [True, True]
    assert files.series()["time"] > series["time"]


def test_the_numbers_are_those_of_the_report(shell: Shell, files: Files) -> None:
    fill(shell, 4)
    shell.commit(5)
    made = shell.json("expire", "--keep-last", "2", "--save", *files.options)
    series = files.series()
    states = [one["state"] for one in made["versions"]]
    assert {state: states.count(state) for state in ("kept", "stone", "expired")} == {
        "kept": series["versions/kept"],
        "stone": series["versions/stone"],
        "expired": series["versions/expired"],
    }
    assert series["versions/expired"] == 3
    assert series["released_bytes"] == made["released"] > 0
    made = shell.json("compact", "--base-every", "4", *files.options)
    series = files.series()
    names = {"patches": "ways/patches", "reverse": "ways/back", "bases": "ways/bases", "bytes": "ways_bytes"}
    assert {name: made[name] for name in names} == {name: series[metric] for name, metric in names.items()}
    assert series["ways_skipped"] == len(made["skipped"])
    made = shell.json("fsck", "--read-data", *files.options)
    series = files.series()
    assert (series["damaged"], series["lost"], series["repaired"]) == (0, 0, 0)
    assert (series["objects/kept"], series["bytes/kept"]) == (made["objects"], made["bytes"])
    assert series["objects/unreferenced"] == made["unreferenced"] > 0
    assert series["objects/read"] == made["objects_read"] > 0
    assert series["sequence"] == made["sequence"]
    made = shell.json("gc", *files.options)
    series = files.series()
    assert (series["failed"], series["sequence"], series["horizon"]) == (0, made["sequence"], made["horizon"])
    assert series["objects/live"] == made["live"]["objects"] > 0
    done = shell.json("maintain", *files.options)
    series = files.series()
    assert series["objects/live"] == done["gc"]["live"]["objects"]
    assert (series["versions/kept"], series["ways/bases"]) == (2, done["compact"]["bases"])
    assert {name.partition("/")[2] for name in series if name.startswith("seconds/")} == done["seconds"].keys()


def test_fsck_that_finds_damage(shell: Shell, files: Files) -> None:
    fill(shell)
    shell.out("fsck", *files.options)
    good = files.series()
    next((shell.cwd / ".weightvc" / "manifest").iterdir()).unlink()
    said = shell.run("fsck", "--no-cache", *files.options, code=7).stderr
    bad, line = files.series(), files.runs()[-1]
    assert (bad["ok"], bad["damaged"], bad["lost"]) == (0, 1, 1)
    assert (line["ok"], line["error"], line["damaged"]) == (False, "Corrupt", 1)
    assert f"weightvc: {line['message']}\n" == said
    assert bad["time"] == good["time"] < bad["ended"] <= line["time"]
    (shell.cwd / ".weightvc" / "root").unlink()
    shell.run("fsck", "--no-cache", *files.options, code=7)
    assert "sequence" not in files.series()
    assert "objects/kept" not in files.series()  # nobody knows what lives


def test_gc_that_is_refused_for_what_looks_like_a_mistake(shell: Shell, files: Files) -> None:
    fill(shell, 1)
    root = shell.cwd / ".weightvc" / "root"
    old = root.read_bytes()
    for i in range(1, 4):
        shell.commit(i, "--base")
    shell.out("gc", *files.options)
    good = files.series()
    root.write_bytes(old)  # it has lost what came since
    said = shell.fails(8, "gc", "--grace", "0s", *files.options)
    assert "are named by nothing" in said
    line, bad = files.runs()[-1], files.series()
    assert (line["ok"], line["error"], line["message"]) == (False, "Refused", said)
    # The numbers of the run before are not shown beside the failure, but when it was is.
    assert bad.keys() == {"ok", "ended", "time"}
    assert bad["ok"] == 0
    assert bad["time"] == good["time"] < bad["ended"]
    shell.fails(8, "gc", "--grace", "0s", *files.options)
    assert files.series()["time"] == good["time"]
    assert files.series()["ended"] > bad["ended"]


@pytest.mark.parametrize("job", JOBS)
def test_a_store_that_is_away(shell: Shell, files: Files, stub: Stub, job: str) -> None:
    place = stub.place()
    shell.env |= on_s3(place)
    shell.run("init")
    stub.fault(Status(403), times=None)
    said = shell.fails(9, job, *JOBS[job], *files.options)
    (line,), series = files.runs(), files.series()
    assert (line["ok"], line["error"]) == (False, "AccessDenied")
    assert said.startswith(line["message"])
    assert line["repository"].rstrip("/") == place.url.rstrip("/")
    # Never yet: an alert by the time of the last success has something to compare.
    assert (series["ok"], series["time"]) == (0, 0)


def test_no_repository(shell: Shell, files: Files) -> None:
    shell.fails(3, "gc", *files.options)
    assert [run["error"] for run in files.runs()] == ["NotFound"]
    assert files.series()["ok"] == 0
    shell.fails(3, "gc", "-r", "nowhere", *files.options)
    assert files.runs()[-1]["repository"].endswith("nowhere")


def test_objects_that_could_not_be_deleted(shell: Shell, files: Files, stub: Stub) -> None:
    shell.env |= on_s3(stub.place())
    fill(shell)
    shell.run("expire", "--keep-last", "1")
    stub.fault(Status(403), operation="DeleteObject", times=None)
    stub.fault(Status(403), operation="DeleteObjects", times=None)
    shell.run("gc", "--grace", "0s", *files.options, code=9)
    (line,), series = files.runs(), files.series()
    assert (line["ok"], series["ok"]) == (False, 0)
    assert line["failed"] == series["failed"] > 0
    assert "error" not in line


def test_a_service_tells_of_each_run(shell: Shell, files: Files, stub: Stub) -> None:
    shell.env |= on_s3(stub.place())
    fill(shell, 1)
    stub.fault(Status(403), operation="ListObjectsV2", times=2)
    with shell.running("gc", "--every", "1s", "--json", *files.options) as (child, out, _):
        run, _ = (json.loads(out.readline()) for _ in range(2))  # by then the metrics of the first are written
        child.send_signal(signal.SIGINT)
        child.wait(60)
    lines = files.runs()
    assert [line["ok"] for line in lines[:3]] == [False, False, True]
    assert lines[0]["error"] == "AccessDenied"
    assert lines[2]["objects/live"] == run["live"]["objects"] > 0
    assert files.series()["ok"] == 1


def test_a_service_that_ends_in_an_error_says_so(shell: Shell, files: Files) -> None:
    fill(shell, 1)
    (shell.cwd / ".weightvc" / "root").write_bytes(b"")
    shell.fails(7, "maintain", "--every", "1s", *files.options)
    assert [run["error"] for run in files.runs()] == ["Corrupt"]
    assert files.series()["ok"] == 0


def test_what_is_no_run_has_no_metrics(shell: Shell, files: Files) -> None:
    fill(shell, 1)
    for option in (files.options[:2], files.options[2:]):
        assert "a dry run has no metrics" in shell.fails(2, "gc", "--dry-run", *option)
        assert "a dry run has no metrics" in shell.fails(2, "expire", "--keep-last", "1", "-n", *option)
        assert "--show has no metrics" in shell.fails(2, "expire", "--show", *option)
        assert "--forget has no metrics" in shell.fails(2, "expire", "--forget", *option)
    assert list(files.lines.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_found_before_the_run(shell: Shell, tmp_path: Path) -> None:
    fill(shell, 1)
    before = sorted((shell.cwd / ".weightvc").rglob("*"))
    path = tmp_path / "nowhere" / "m"
    for job, option in itertools.product(JOBS, ("--metrics", "--prometheus")):
        said = shell.fails(8, job, *JOBS[job], option, path)
        assert said.startswith(f"{path} cannot be written")
        assert "no directory" in said
        assert sorted((shell.cwd / ".weightvc").rglob("*")) == before
    assert shell.fails(9, "maintain", "--prometheus", shell.cwd / "0.safetensors" / "m")
    assert sorted((shell.cwd / ".weightvc").rglob("*")) == before


def test_metrics_that_cannot_be_written_do_not_hide_the_error(shell: Shell, files: Files) -> None:
    fill(shell, 1)
    next((shell.cwd / ".weightvc" / "manifest").iterdir()).unlink()
    full = Path("/dev/full")
    if full.exists():
        done = shell.run("fsck", "--no-cache", "--metrics", full, "--prometheus", files.lines, code=7)
        notes = [line for line in done.stderr.splitlines() if line.startswith("weightvc: note: ")]
        assert ["No space left" in note for note in notes] == [True]
        assert "is not whole" in done.stderr.splitlines()[-1]
        # The other file is written all the same.
        assert "weightvc_damaged" in files.lines.read_text()
        # And a run whose line is not written is none that went well, though all else did.
        done = shell.run("expire", "--keep-last", "1", "--metrics", full, "--prometheus", files.lines, code=9)
        assert "No space left" in done.stderr.splitlines()[-1]
        files.prometheus = files.lines
        assert (files.series()["ok"], files.series()["time"]) == (0, 0)


def test_a_repository_whose_name_has_quotes(shell: Shell, files: Files) -> None:
    name = 'a "b"\\c\td'
    shell.run("init", name)
    shell.run("gc", "-r", name, *files.options)
    (line,) = files.runs()
    assert line["repository"] == str(shell.cwd / name)
    files.series()
    quoted = str(shell.cwd / name).replace("\\", "\\\\").replace('"', '\\"')
    assert f'weightvc_ok{{repository="{quoted}",command="gc"}} 1\n' in files.prometheus.read_text()

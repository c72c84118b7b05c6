"""weightvc import and export: end to end by command."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.exchange.conftest import line
from tests.kit.servers import Place
from tests.kit.slime import INDEX, Engine, Plain, checkpoint, publish, read
from tests.kit.weights import files_below

__all__ = ["line"]


def on_s3(shell: Shell, place: Place) -> None:
    shell.env |= {
        "WEIGHTVC_REPO": place.url,
        "AWS_ACCESS_KEY_ID": str(place.options["access_key"]),
        "AWS_SECRET_ACCESS_KEY": str(place.options["secret_key"]),
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": str(place.options["endpoint_url"]),
    }


@pytest.fixture(params=["local", "s3"])
def home(request: pytest.FixtureRequest, shell: Shell) -> Shell:
    """A shell with an empty repository, in a directory and on S3."""
    if request.param == "s3":
        on_s3(shell, request.getfixturevalue("s3_place"))
    shell.run("init")
    return shell


def test_from_a_trainer_to_an_engine_and_back(home: Shell, line: list[Plain]) -> None:
    trained, served = home.cwd / "trained", home.cwd / "served"
    for i, weights in enumerate(line):
        checkpoint(trained / f"checkpoint-{10 * i}", weights, shards=2)
        (trained / f"checkpoint-{10 * i}" / "optimizer.pt").write_bytes(b"state")
    said = home.out("import", "trained", "--exclude", "optimizer.*", "--run", "r7")
    assert [row.split(" ", 1)[1] for row in said.splitlines()] == [
        f"step {10 * i}, run r7: checkpoint-{10 * i}" for i in range(5)
    ]
    assert home.out("import", "trained", "--exclude", "optimizer.*") == "nothing to import: all of it is in\n"
    rows = home.out("export", "main~1", "served", "--format", "slime").splitlines()
    log = home.json("log")
    assert rows[0].startswith(f"weight_v000001 is {log[-1]['id'][:12]} (step 0, run r7): whole, ")
    assert rows[3].startswith(f"weight_v000004 is {log[1]['id'][:12]} (step 30, run r7): ")
    assert "changed, " in rows[3]
    done = home.json("export", "main", "served")
    assert {name: done[name] for name in ("number", "id", "step", "full")} == {
        "number": 5,
        "id": log[0]["id"],
        "step": 40,
        "full": False,
    }
    assert (done["path"], done["why"]) == ("served/weight_v000005", None)
    assert home.out("export", "main", "served") == "nothing to export: all of it is there\n"
    engine = Engine(home.cwd / "local")
    for number in (2, 5):
        engine.pull(served, number)
        assert read(engine.local) == line[number - 1]
    home.run("import", "served", "-b", "back")
    assert [(one["step"], one["tree"]) for one in home.json("log", "back")] == [
        (5 - i, one["tree"]) for i, one in enumerate(log)
    ]
    home.run("checkout", "back~1", "out")
    (trained / "checkpoint-30" / "optimizer.pt").unlink()
    assert files_below(home.cwd / "out") == files_below(trained / "checkpoint-30")


def test_each_way_of_encoding(shell: Shell, line: list[Plain]) -> None:
    shell.run("init")
    for i, weights in enumerate(line[:3]):
        checkpoint(shell.cwd / "in" / str(i), weights)
    shell.run("import", "in")
    options = ("--encoding", "overwrite", "--checksum", "adler32", "--full-every", "3", "--last", "2")
    shell.run("export", "main", "served", *options)
    index = json.loads((shell.cwd / "served" / "weight_v000002" / "config.json").read_text())
    assert index == {"model_type": "tiny"}
    assert sorted(path.name for path in (shell.cwd / "served").iterdir()) == ["weight_v000002", "weight_v000003"]
    assert not (shell.cwd / "served" / "weight_v000003" / INDEX).exists()
    assert "is not one of" in shell.fails(2, "export", "main", "served", "--encoding", "zip")
    assert "is not 'slime'" in shell.fails(2, "export", "main", "served", "--format", "arc")


def test_why_one_is_written_whole_is_noted(shell: Shell, line: list[Plain]) -> None:
    shell.run("init")
    for i, weights in enumerate(line[:3]):
        (checkpoint(shell.cwd / "in" / f"{i}", weights) / "trainer_state.json").write_text(f"{i}")
    shell.run("import", "in")
    done = shell.run("export", "main", "served", "--json")
    whys = [json.loads(row)["why"] for row in done.stdout.splitlines()]
    assert whys[0] == "it is the first one here"
    assert whys[1] == whys[2]
    assert whys[1].startswith("the side file 'trainer_state.json' changed")
    (note,) = done.stderr.splitlines()
    assert json.loads(note)["note"].endswith(whys[1])


def test_what_is_refused_is_said_on_one_line(shell: Shell, line: list[Plain]) -> None:
    shell.run("init")
    publish(shell.cwd / "in", 1, line[0], line[1])
    assert "weight_v000001 is a delta on version 0" in shell.fails(8, "import", "in")
    checkpoint(shell.cwd / "model", line[0])
    checkpoint(shell.cwd / "wrong", line[4])
    assert "weight_v000001 does not fit wrong (--base)" in shell.fails(8, "import", "in", "--base", "wrong")
    shell.run("import", "in", "--base", "model")
    assert "wrong (--base) has other weights" in shell.fails(8, "import", "in", "--base", "wrong")
    shutil.rmtree(shell.cwd / "in" / "weight_v000001")
    publish(shell.cwd / "in", 1, line[0], line[2])
    assert "weight_v000001 has other weights" in shell.fails(8, "import", "in")
    shutil.rmtree(shell.cwd / "in" / "weight_v000001")
    publish(shell.cwd / "in", 2, line[0], line[2])
    assert "damaged, or was made on another base" in shell.fails(8, "import", "in")
    assert "cannot be listed" in shell.fails(8, "import", "nowhere")
    assert "is a URL" in shell.fails(8, "import", "s3://bucket/in")
    shell.fails(3, "export", "nowhere", "served")
    assert "only a branch" in shell.fails(8, "export", shell.json("log")[0]["id"], "served", "--follow")


def test_follows_a_trainer_and_feeds_engines_until_it_is_ended(home: Shell, line: list[Plain]) -> None:
    trained, served = home.cwd / "trained", home.cwd / "served"
    engine = Engine(home.cwd / "local")
    checkpoint(trained / "step_000001", line[0], shards=2)
    importing = ("import", "trained", "--follow", "--every", "0.05", "--json", "--base", "unused")
    exporting = ("export", "main", "served", "--follow", "--every", "0.05", "--json")
    with home.running(*importing) as (one, out, err), home.running(*exporting) as (two, said, noted):
        for number, weights in enumerate(line, 1):
            if number > 1:
                # Written aside and renamed, or in its place: both are taken once they are whole.
                aside = checkpoint(home.cwd / f"aside{number}", weights, shards=2)
                place = trained / f"step_{number:06d}"
                if number % 2:
                    aside.rename(place)
                else:
                    place.mkdir()
                    for path in sorted(aside.iterdir(), reverse=True):
                        shutil.copy(path, place)
                shutil.rmtree(trained / f"step_{number - 1:06d}")
            assert json.loads(out.readline())["step"] == number
            assert json.loads(said.readline())["number"] == number
            engine.pull(served, number)
            assert read(engine.local) == weights
        one.send_signal(signal.SIGTERM)
        two.send_signal(signal.SIGINT)
        assert (one.wait(60), two.wait(60)) == (0, 130)
        told = [json.loads(row)["note"] for row in (err.read() + noted.read()).splitlines() if row]
    assert all("is not whole" in text or "waiting for" in text or "not exported" in text for text in told)
    # Started again, each goes on where it was.
    checkpoint(trained / "step_000006", line[0], shards=2)
    with home.running(*importing) as (one, out, _):
        assert json.loads(out.readline())["step"] == 6
        one.send_signal(signal.SIGTERM)
        assert one.wait(60) == 0
    with home.running(*exporting) as (two, said, _):
        assert json.loads(said.readline())["number"] == 6
        two.send_signal(signal.SIGTERM)
        assert two.wait(60) == 0
    engine.pull(served, 6)
    assert read(engine.local) == line[0]


def test_what_never_becomes_whole_is_noted_once(shell: Shell, line: list[Plain]) -> None:
    shell.run("init")
    checkpoint(shell.cwd / "in" / "step_1", line[0], shards=2)
    (shell.cwd / "in" / "step_1" / INDEX).unlink()
    with shell.running("import", "in", "--follow", "--every", "0.05") as (process, out, err):
        assert "note: step_1 is not whole: in/step_1: has the shards model-" in err.readline()
        for number in (2, 3):
            checkpoint(shell.cwd / "in" / f"step_{number}", line[number])
            assert f"step {number}: step_{number}\n" in out.readline()
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), err.read()) == (0, "")


def test_killed_in_the_middle_it_goes_on(home: Shell, tmp_path: Path, line: list[Plain]) -> None:
    for i in range(12):
        checkpoint(home.cwd / "in" / f"step_{i}", line[i % 5])
    with home.running("import", "in") as (process, out, _):
        out.readline()
        process.kill()
        process.wait(60)
    home.run("import", "in")
    assert [one["step"] for one in home.json("log")] == list(range(11, -1, -1))
    with home.running("export", "main", "served") as (process, out, _):
        out.readline()
        process.kill()
        process.wait(60)
    home.run("export", "main", "served")
    engine = Engine(tmp_path / "local")
    engine.pull(home.cwd / "served", 12)
    assert read(engine.local) == line[11 % 5]
    assert len(list((home.cwd / "served").iterdir())) == 12

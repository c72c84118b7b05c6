import json
import os
import subprocess

import pytest

from tests.cli.conftest import Shell, checkpoint, command, weights


def test_log_shows_versions_newest_first(shell: Shell, history: dict[str, str]) -> None:
    lines = shell.out("log").splitlines()
    assert lines[0] == f"version {history['merge']} (HEAD -> main)"
    assert lines[1] == f"Merge:  {history['main1'][:12]} {history['exp1'][:12]}"
    assert lines[2] == "Author: tester@host"
    assert "Labels: step 3" in lines
    assert any(line.startswith("Stored: patch ") and "% changed" in line for line in lines)
    assert "    message 3" in lines
    assert lines[-1] == ""
    shown = [line.split()[1] for line in lines if line.startswith("version ")]
    assert shown[0] == history["merge"]
    assert shown[-1] == history["base"]
    assert set(shown) == set(history.values())


def test_log_oneline_and_n(shell: Shell, history: dict[str, str]) -> None:
    assert shell.out("log", "--oneline", "-n", "1") == f"{history['merge'][:12]} (HEAD -> main) [step 3] message 3\n"
    assert shell.out("log", "-n", "0") == ""
    assert shell.out("log", "--oneline", "v1").splitlines() == [
        f"{history['exp1'][:12]} (exp, tag: v1) [step 2] message 2",
        f"{history['base'][:12]} [step 0] message 0",
    ]


def test_log_graph_draws_the_merge(shell: Shell, history: dict[str, str]) -> None:
    ids = {ident[:12]: name for name, ident in history.items()}
    drawn = []
    for line in shell.out("log", "--graph", "--oneline").splitlines():
        graph, _, rest = line.partition("* ")
        words = rest.lstrip(" |").split()
        drawn.append(line if not rest else f"{graph}* {ids[words[0]]}")
    assert drawn == ["* merge", "|\\", "| * exp1", "* main1", "|/", "* base"]


def test_log_of_several_branches_shows_what_they_share_once(shell: Shell, history: dict[str, str]) -> None:
    newest = shell.commit(4, "-b", "exp")
    found = [entry["id"] for entry in shell.json("log", "--all")]
    assert sorted(found) == sorted([*history.values(), newest])
    assert [entry["id"] for entry in shell.json("log", "main", "exp", "-n", "2")] == found[:2]


def test_log_json(shell: Shell, history: dict[str, str]) -> None:
    entries = shell.json("log")
    assert len(entries) == 4
    first = entries[0]
    assert first["id"] == history["merge"]
    assert first["parents"] == [history["main1"], history["exp1"]]
    assert first["branches"] == ["main"]
    assert first["tags"] == []
    assert (first["step"], first["run"], first["message"]) == (3, None, "message 3")
    assert first["author"] == "tester@host"
    assert first["elements"] == 68
    assert first["changed"] == 2
    assert first["density"] == 2 / 68
    assert first["full_bytes"] == 136
    assert first["edges"][0]["from"] == history["main1"]
    assert first["time"].endswith("Z")
    assert {e["id"]: e["tags"] for e in entries}[history["exp1"]] == ["v1"]


def test_log_of_an_empty_repository(shell: Shell) -> None:
    shell.run("init")
    assert "has no version yet" in shell.fails(3, "log")
    assert "has no version yet" in shell.fails(3, "log", "--all")


def test_log_stats_go_to_stderr(shell: Shell, history: dict[str, str]) -> None:
    done = shell.run("log", "--oneline", "--stats")
    assert len(done.stdout.splitlines()) == 4
    assert " reads, 0 writes, 0 lists, 0 deletes; " in done.stderr
    stats = json.loads(shell.run("log", "--json", "--stats").stderr)["stats"]
    assert stats["writes"] == 0
    assert stats["reads"] >= 1
    assert stats["bytes_read"] > 0


def test_a_message_cannot_control_the_terminal(shell: Shell) -> None:
    shell.run("init")
    path = shell.cwd / "0.safetensors"
    shell.commit(0)
    shell.run("commit", path, "-m", "red \x1b[31m\rtext\nsecond")
    out = shell.out("log", "-n", "1")
    assert "\x1b" not in out
    assert "\r" not in out
    assert "    red \\x1b[31m" in out
    assert "    second" in out
    assert "second" not in shell.out("log", "--oneline", "-n", "1")


def test_show(shell: Shell, history: dict[str, str]) -> None:
    out = shell.out("show", "main")
    assert f"Parent:   {history['exp1']}" in out
    assert "File:     model.safetensors" in out
    assert f"Edge:     patch from {history['main1'][:12]}" in out
    shown = shell.json("show", history["base"])
    assert shown["parents"] == []
    assert shown["files"] == [
        {"path": "model.safetensors", "bytes": (shell.cwd / "0.safetensors").stat().st_size},
    ]
    assert shown["edges"][0]["from"] is None
    assert shown["manifest"].startswith("manifest/")


def test_ls(shell: Shell, history: dict[str, str]) -> None:
    rows = [line.split() for line in shell.out("ls").splitlines()]
    assert [(row[0], row[1], row[3]) for row in rows] == [("BF16", "[4]", "b"), ("BF16", "[64]", "w")]
    old, new = shell.json("ls", "main~1"), shell.json("ls")
    assert old[0] == new[0]  # b did not change
    assert old[1]["digest"] != new[1]["digest"]
    assert new[1]["bytes"] == 128
    assert shell.json("ls", "--files")[0]["path"] == "model.safetensors"
    assert shell.out("ls", "--files").split()[1] == "model.safetensors"


def test_cat_writes_exact_bytes(shell: Shell, history: dict[str, str]) -> None:
    for args, wanted in (
        (["HEAD", "model.safetensors"], (shell.cwd / "3.safetensors").read_bytes()),
        (["HEAD", "--tensor", "w"], weights(3)["w"]),
        (["v1", "--tensor", "w"], weights(2)["w"]),
    ):
        done = subprocess.run(
            [*command(), "cat", *args], cwd=shell.cwd, env=shell.env, capture_output=True, check=True
        )
        assert done.stdout == wanted
    assert "model.safetensors" in shell.fails(3, "cat", "HEAD", "nothing.json")
    assert "weightvc ls" in shell.fails(3, "cat", "HEAD", "--tensor", "nothing")
    shell.fails(2, "cat", "HEAD")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_cat_writes_more_than_a_pipe_holds(shell: Shell, unbuffered: str) -> None:
    shell.run("init")
    path = checkpoint(shell.cwd / "x.safetensors", w=os.urandom(1 << 20))
    shell.run("commit", path)
    env = shell.env | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [*command(), "cat", "HEAD", "model.safetensors"], cwd=shell.cwd, env=env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == path.read_bytes()
        assert process.wait(60) == 0


def test_reflog_shows_every_move(shell: Shell, history: dict[str, str]) -> None:
    shell.run("reset", "main", "main~1", "--rewind", "-m", "why")
    moves = shell.json("reflog")
    assert [move["op"] for move in moves] == ["reset", "commit", "commit", "commit"]
    assert (moves[0]["old"], moves[0]["new"], moves[0]["message"]) == (history["merge"], history["main1"], "why")
    lines = shell.out("reflog", "main", "-n", "1").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{history['main1'][:12]} main@{{0}} ")
    assert lines[0].endswith("reset: why")
    assert shell.json("show", "main@{1}")["id"] == history["merge"]
    shell.fails(3, "reflog", "nothing")

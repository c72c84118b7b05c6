"""weightvc follow: a directory that keeps up, and what runs at every update."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, command


def start(shell: Shell, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*command(), "follow", *args],
        cwd=shell.cwd,
        env=shell.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_said(running: "subprocess.Popen[str]") -> str:
    """The first line on stderr, or nothing if there is none within a minute."""
    assert running.stderr is not None
    impatient = threading.Timer(60, running.kill)
    impatient.start()
    try:
        return running.stderr.readline()
    finally:
        impatient.cancel()


def wait_until(path: Path, text: str) -> None:
    end = time.monotonic() + 60
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end, f"{path} never said {text!r}"
        time.sleep(0.02)


def test_follows_until_it_is_ended(shell: Shell, history: dict[str, str]) -> None:
    log = shell.cwd / "log"
    running = start(
        shell, "exp", "--into", "served", "--every", "0.05", "--on-update",
        'echo "$WEIGHTVC_STEP $WEIGHTVC_VERSION $WEIGHTVC_PATH" >> log',
    )  # fmt: skip
    try:
        wait_until(log, history["exp1"])
        new = shell.commit(5, "-b", "exp")
        wait_until(log, new)
        slot = shell.cwd / "served" / new[:12]
        assert f"5 {new} {slot}" in log.read_text()
        assert os.readlink(shell.cwd / "served" / "current") == new[:12]
        shell.run("verify", slot, "exp", "-r", ".weightvc")
    finally:
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [history["exp1"][:12], new[:12]]


def test_a_command_that_fails_is_told_and_changes_nothing(shell: Shell, history: dict[str, str]) -> None:
    done = shell.run("follow", "--into", "served", "--updates", "1", "--on-update", "exit 3", "--json")
    fields = json.loads(done.stdout)
    assert (fields["id"], fields["exit_code"], fields["lag"]) == (history["merge"], 3, None)
    assert "ended with status 3" in json.loads(done.stderr)["note"]
    assert fields["path"] == str(shell.cwd / "served" / history["merge"][:12])
    assert shell.run("verify", "served/current", "main", "-r", ".weightvc").returncode == 0


def test_a_command_that_did_not_succeed_for_what_is_held_is_run_at_the_start(
    shell: Shell, history: dict[str, str]
) -> None:
    """Whether follow was killed in it, it failed, or there was none; and no more, once it has succeeded."""
    follow = ("follow", "--into", "served", "--every", "0.05", "--on-update")
    dies = "kill -9 $PPID; exit 1"
    shell.run(*follow, dies, code=-9)
    held = history["merge"]
    assert os.readlink(shell.cwd / "served" / "current") == held[:12]
    log = shell.cwd / "log"
    writes = 'echo "$WEIGHTVC_STEP $WEIGHTVC_VERSION $WEIGHTVC_PATH" >> log'
    for told, runs in ((dies, 0), ("exit 1", 0), (writes, 1), (writes, 1), (dies, 1)):
        running = start(shell, *follow[1:], told)
        try:
            assert f"holds version {held[:12]}" in first_said(running)
            if not runs or not log.exists():
                assert "has not succeeded" in first_said(running)
            if told == writes:
                wait_until(log, held)
            elif not runs and told != dies:
                assert "ended with status 1" in first_said(running)
            if told == dies and not runs:
                running.wait(60)
        finally:
            running.send_signal(signal.SIGTERM)
            running.communicate(timeout=60)
        slot = shell.cwd / "served" / held[:12]
        assert (log.read_text() if log.exists() else "") == f"3 {held} {slot}\n" * runs
        assert running.returncode == (-9 if told == dies and not runs else 0)
    # And for what comes then, once.
    new = shell.commit(5)
    shell.run(*follow, writes, "--updates", "1")
    assert [line.split()[1] for line in log.read_text().splitlines()] == [held, new]


def test_what_a_command_was_not_told_of_waits_for_a_store_that_is_away(shell: Shell, history: dict[str, str]) -> None:
    shell.run("follow", "--into", "served", "--updates", "1")
    root, away = shell.cwd / ".weightvc" / "root", shell.cwd / ".weightvc" / "root.away"
    root.rename(away)
    root.mkdir()
    running = start(shell, "--into", "served", "--every", "0.05", "--on-update", 'echo "$WEIGHTVC_VERSION" >> log')
    try:
        assert "holds version" in first_said(running)
        assert "(attempt 1 failed)" in first_said(running)
        root.rmdir()
        away.rename(root)
        wait_until(shell.cwd / "log", history["merge"])
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 0


def test_what_is_waited_for_is_said_and_a_command_does_not_write_into_json(
    shell: Shell, history: dict[str, str]
) -> None:
    running = start(
        shell, "new", "--into", "served", "--every", "0.05", "--updates", "1", "--json", "--on-update", "echo X"
    )
    try:
        assert running.stderr is not None
        assert "'new'" in json.loads(running.stderr.readline())["note"]
        shell.run("branch", "new", "exp")
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, err) == (0, "X\n")
    assert json.loads(out)["id"] == history["exp1"]
    assert "name served/current" in shell.fails(8, "status", "served")
    assert "name served/current" in shell.fails(8, "verify", "served")


def test_an_update_that_cannot_be_fetched_is_tried_again(shell: Shell, history: dict[str, str]) -> None:
    manifests, away = shell.cwd / ".weightvc" / "manifest", shell.cwd / ".weightvc" / "manifest.away"
    manifests.rename(away)
    running = start(shell, "exp", "--into", "served", "--every", "0.05", "--updates", "1", "--no-cache", "--json")
    try:
        assert "is tried again (attempt 1 failed)" in json.loads(first_said(running))["note"]
        assert "(attempt 2 failed)" in json.loads(first_said(running))["note"]
        away.rename(manifests)
        out, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert (running.returncode, json.loads(out)["id"]) == (0, history["exp1"])
    assert os.readlink(shell.cwd / "served" / "current") == history["exp1"][:12]


def test_how_often_to_look_is_from_some_time_to_a_day(shell: Shell, history: dict[str, str]) -> None:
    for every in ("0", "nan", "1e300", "inf"):
        assert "positive" in shell.fails(8, "follow", "--into", "served", "--updates", "1", "--every", every)
    assert not (shell.cwd / "served").exists()


def test_a_branch_that_is_not_there_is_said_to_be_waited_for(shell: Shell, history: dict[str, str]) -> None:
    running = start(shell, "typo", "--into", "served", "--every", "0.05")
    try:
        assert "waiting for typo" in first_said(running)
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 0


@pytest.mark.parametrize("ref", ["main~1", "main@{1}", "main@{step=1}", "v1", "exp1", "nosuch~1", "a..b"])
def test_what_is_no_branch_is_refused_at_once(shell: Shell, history: dict[str, str], ref: str) -> None:
    for named in (history[ref], history[ref][:8]) if ref in history else (ref,):
        said = shell.fails(8, "follow", named, "--into", "served")
        assert "only a branch can be followed" in said
        assert not (shell.cwd / "served").exists()


def test_a_directory_that_is_somebodys_is_refused_and_stays_as_it_is(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "v1", "served")
    (shell.cwd / "mine").mkdir()
    (shell.cwd / "mine" / "notes.txt").write_text("mine")
    for place, mend in (("served", "`weightvc pull`"), ("mine", "notes.txt; name a new or an empty directory")):
        before = sorted(os.listdir(shell.cwd / place))
        assert mend in shell.fails(8, "follow", "--into", place, "--updates", "1")
        assert sorted(os.listdir(shell.cwd / place)) == before
    (shell.cwd / "volume" / "lost+found").mkdir(parents=True)
    shell.run("follow", "--into", "volume", "--updates", "1")
    shell.run("verify", "volume/current", "main", "-r", ".weightvc")


def test_what_is_held_at_the_start_is_said_and_is_no_update(shell: Shell, history: dict[str, str]) -> None:
    shell.run("follow", "--into", "served", "--updates", "1")
    running = start(shell, "--into", "served", "--every", "0.05", "--updates", "1", "--json")
    try:
        assert running.stderr is not None
        assert f"holds version {history['merge'][:12]}" in json.loads(running.stderr.readline())["note"]
        new = shell.commit(5)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, err) == (0, "")
    assert json.loads(out)["id"] == new

import json
import signal
import socket
import subprocess
import sys
import time

import weightvc
from tests.cli.conftest import Shell, on_s3
from tests.kit.servers import Place
from tests.kit.stub import Status, Stub
from weightvc.protocol import pins


def fill(shell: Shell, count: int) -> list[str]:
    shell.run("init")
    return [shell.commit(i, "--base", "--meta", f"good={'true' if i == 1 else 'false'}") for i in range(count)]


def names(shell: Shell) -> set[str]:
    root = shell.cwd / ".weightvc"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {".lock"}


def test_expire_says_what_keeps_each_version(shell: Shell) -> None:
    ids = fill(shell, 5)
    out = shell.out("expire", "--keep-last", "2", "--keep-meta", "good=true", "--dry-run")
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [
        ["keep", ids[4][:12]],
        ["keep", ids[3][:12]],
        ["expire", ids[2][:12]],
        ["keep", ids[1][:12]],
        ["expire", ids[0][:12]],
    ]
    for line, rule in zip(
        lines, ["head of main", "last 2 of main", "no rule keeps it", "meta good=true of main", "no rule keeps it"]
    ):
        assert rule in line
    assert lines[5].startswith("3 kept, 2 would be let go of, 0 of them stored on as steps; ")
    assert [entry["expired"] for entry in shell.json("log")] == [False] * 5
    made = shell.json("expire", "--keep-last", "2", "--keep-meta", "good=true")
    assert [one["state"] for one in made["versions"]] == ["kept", "kept", "expired", "kept", "expired"]
    assert made["policy"] == {"branches": {"*": {"last": 2, "meta": {"good": True}}}, "unreachable": 30 * 86400}
    assert not made["dry_run"]
    assert [entry["expired"] for entry in shell.json("log")] == [False, False, True, False, True]
    assert "it has expired" in shell.out("log")
    assert ["(expired)" in line for line in shell.out("log", "--oneline").splitlines()] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert "expired" in shell.fails(6, "checkout", ids[0], "out")
    assert "expired" in shell.fails(6, "ls", "main~2")
    text = shell.out("show", "main~2")
    assert text.startswith(f"version {ids[2]} (expired)\n")
    for line in ("Labels: step 2", "    message 2", f"Parent:   {ids[1]}", "Meta:     good = false"):
        assert f"{line}\n" in text
    shown = shell.json("show", "main~2")
    assert (shown["id"], shown["expired"], shown["manifest"], shown["files"]) == (ids[2], True, None, None)
    shell.run("checkout", "main~1", "out")


def test_a_policy_is_saved_shown_and_forgotten(shell: Shell) -> None:
    fill(shell, 3)
    assert "--save" in shell.fails(8, "expire")
    assert shell.json("expire", "--show") is None
    shell.run("expire", "--keep-last", "2", "--save")
    saving = ("expire", "-b", "exp", "--keep-within", "7d", "--save")
    assert "no branch 'exp'" in shell.fails(3, *saving)
    assert "exp" not in shell.json("expire", "--show")["branches"]
    shell.run("branch", "exp")
    shell.run(*saving)
    shell.run("branch", "-d", "exp")
    shell.run(*saving)  # the kept policy names it still
    kept = {"branches": {"*": {"last": 2}, "exp": {"within": 7 * 86400}}, "unreachable": 30 * 86400}
    assert shell.json("expire", "--show") == kept
    # What is not said again stays as it was.
    shell.run("expire", "--keep-unreachable", "90d", "--save")
    shell.run("expire", "--keep-last", "2", "--save")
    kept["unreachable"] = 90 * 86400
    assert shell.json("expire", "--show") == kept
    assert [one["state"] for one in shell.json("expire")["versions"]] == ["kept", "kept"]
    assert shell.json("expire", "--forget", "-b", "exp")["left"]["branches"] == {"*": {"last": 2}}
    assert shell.json("expire", "--forget")["left"] is None
    assert shell.json("expire", "--show") is None
    for bad in (["--keep-last", "0"], ["--keep-within", "7y"], ["-b", "main"], ["--keep-meta", "novalue"]):
        shell.fails(2, "expire", *bad)


def test_a_dry_run_forgets_nothing(shell: Shell) -> None:
    fill(shell, 1)
    assert shell.out("expire", "--forget", "-n") == "there is nothing to forget\n"
    shell.run("expire", "--keep-last", "2", "--save")
    shell.run("expire", "-b", "main", "--keep-last", "3", "--save")
    kept = shell.json("expire", "--show")
    one = {"branches": {"main": {"last": 3}}}
    rest = {"branches": {"*": {"last": 2}}, "unreachable": 30 * 86400}
    before = (shell.cwd / ".weightvc" / "root").read_bytes()
    said = shell.out("expire", "--forget", "-b", "main", "--dry-run")
    assert said == f"would forget {json.dumps(one)}\nwould be left: {json.dumps(rest)}\n"
    assert shell.json("expire", "--forget", "-n") == {"forgotten": kept, "left": None, "dry_run": True}
    nothing = {"forgotten": None, "left": kept, "dry_run": True}
    assert shell.json("expire", "--forget", "-b", "other", "-n") == nothing
    assert (shell.cwd / ".weightvc" / "root").read_bytes() == before
    done = {"forgotten": one, "left": rest, "dry_run": False}
    assert shell.json("expire", "--forget", "-b", "main") == done
    assert shell.json("expire", "--show") == rest
    assert shell.out("expire", "--forget") == f"forgot {json.dumps(rest)}\nno policy is left\n"


IGNORED = {
    "expire --show --keep-last 1": "--show ",
    "expire --show --keep-unreachable 7d": "--show ",
    "expire --show --save": "--show ",
    "expire --show --forget": "--show ",
    "expire --show --force": "--show ",
    "expire --show -b main": "--show ",
    "expire --show --dry-run": "--show ",
    "expire --forget --keep-last 1": "--forget ",
    "expire --forget --keep-meta a=1": "--forget ",
    "expire --forget --keep-unreachable 7d": "--forget ",
    "expire --forget --save": "--forget ",
    "expire --forget --force": "--forget ",
    "expire --keep-unreachable 7d -b main": "--keep-unreachable ",
    "expire --keep-last 1 --keep-meta a=1 --keep-meta a=2": "'a' ",
    "expire --save": "--save",
    "compact --save": "--save",
    "fsck --seed 3": "--seed ",
    "fsck --read-data=0 --seed 3": "--seed ",
    "tag --force": "--force ",
    "tag -d v1 --force": "--force ",
    "branch --restore exp main~1": "one at a time",
}


def test_what_would_be_ignored_is_refused(shell: Shell) -> None:
    """Whoever gave it believes that it holds."""
    fill(shell, 2)
    shell.run("expire", "--keep-last", "1", "--save")
    shell.run("tag", "v1")
    before = (shell.cwd / ".weightvc" / "root").read_bytes()
    for line, says in IGNORED.items():
        assert says in shell.fails(2, *line.split())
    assert (shell.cwd / ".weightvc" / "root").read_bytes() == before


def test_a_dry_run_says_what_it_would_save(shell: Shell) -> None:
    fill(shell, 2)
    said = shell.out("expire", "--keep-last", "1", "--save", "-n")
    assert said.endswith("the policy would be kept\n")
    assert shell.json("expire", "--show") is None


def test_gc_frees_what_was_let_go_of(shell: Shell) -> None:
    fill(shell, 4)
    before = names(shell)
    shell.run("expire", "--keep-last", "1")
    assert shell.json("gc")["deleted"]["objects"] == 0  # noted, and left for an hour
    said = shell.json("gc", "--grace", "0s", "--force", "--dry-run")
    assert said["dry_run"]
    assert len(names(shell) & before) == len(before)
    out = shell.out("gc", "--grace", "0s", "--force")
    assert "3 manifests" in out
    assert out.splitlines()[0].startswith("listed")
    gone = before - names(shell)
    assert sum(name.startswith("manifest/") for name in gone) == 3
    assert shell.json("gc", "--grace", "0s", "--force")["deleted"]["objects"] == 0
    shell.run("checkout", "main", "out")
    assert shell.json("verify", "out")["ok"]
    shell.fails(2, "gc", "--grace", "soon")


KILLED = """
import os, signal
from weightvc.protocol.compact import Compaction
from weightvc_cli.main import main

Compaction._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_what_a_killed_compaction_holds_is_named_with_who_holds_it(shell: Shell) -> None:
    fill(shell, 5)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "compact", "--base-every", "4"], cwd=shell.cwd, env=shell.env
    )
    assert killed.returncode == -signal.SIGKILL
    (pin,) = [name for name in names(shell) if name.startswith("pin/")]
    path = shell.cwd / ".weightvc" / pin
    shell.run("branch", "moved")
    for job in (["gc", "--dry-run"], ["gc"], ["maintain", "--no-compact"]):
        out = shell.out(*job, "--grace", "0s", "--force")
        (held,) = [line for line in out.splitlines() if line.startswith("held")]
        assert "named by nothing, held by a writer's pin: " in held
        assert "manifest" in held
        assert not [line for line in out.splitlines() if line.startswith("young")]
        (told,) = [line for line in out.splitlines() if line.startswith("pin/")]
        host = f"{socket.gethostname()}, process "
        assert told.startswith(f"{pin} is held by a writer ({host}")
        assert told.endswith(f"UTC: wait for that, or, if its process has surely ended, delete {path}")
    said = shell.json("gc", "--grace", "0s", "--force")
    assert said["held"]["kinds"]["manifest"][0] > 0
    (one,) = said["pins"]
    assert (one["key"], one["versions"], one["holder"].startswith(host)) == (pin, [], True)
    assert one["renewed"] < one["until"]
    assert f" pins        1 held: {pin} is held by a writer ({host}" in shell.out("doctor", "--read-only")
    path.unlink()
    said = shell.json("gc", "--grace", "0s", "--force")
    assert (said["held"]["objects"], said["pins"]) == (0, [])
    assert said["deleted"]["kinds"]["manifest"][0] > 0


def test_of_many_pins_some_are_named(shell: Shell) -> None:
    fill(shell, 2)
    shell.run("expire", "--keep-last", "1")
    with weightvc.open(shell.cwd / ".weightvc", cache=None) as repository:
        for _ in range(7):
            pins.Holder(repository.store, begin=0).take()
    lines = shell.out("gc", "--grace", "0s", "--force").splitlines()
    assert sum(line.startswith("pin/") for line in lines) == 5
    assert lines[-1] == "and 2 more pins: --json has all"
    assert len(shell.json("gc", "--grace", "0s", "--force")["pins"]) == 7


def test_a_dry_run_says_what_it_leaves_out(shell: Shell) -> None:
    fill(shell, 3)
    assert shell.out("gc", "-n").endswith("\nnothing was changed: this was a dry run\n")
    shell.run("expire", "--keep-last", "1")
    out = shell.out("gc", "-n", "--grace", "0s")
    assert "2 manifests" in next(line for line in out.splitlines() if line.startswith("deleted"))
    assert out.endswith("this was a dry run. A run also deletes the lists that it writes on its way\n")


def test_gc_over_and_over(shell: Shell) -> None:
    fill(shell, 2)
    shell.run("expire", "--keep-last", "1")
    with shell.running("gc", "--grace", "0s", "--every", "1s", "--json", "--force") as (child, out, _):
        runs = [json.loads(out.readline()) for _ in range(2)]
        child.send_signal(signal.SIGINT)
        assert child.wait(30) in (130, -signal.SIGINT)
    assert [run["deleted"]["kinds"].get("manifest") is not None for run in runs] == [True, False]
    for service in ("gc", "maintain"):
        assert "never pause" in shell.fails(8, service, "--every", "0s")


def test_gc_goes_on_when_the_store_is_there_again(shell: Shell, stub: Stub) -> None:
    shell.env |= on_s3(stub.place())
    shell.run("init")
    shell.commit(0)
    stub.fault(Status(403), operation="ListObjectsV2", times=2)
    with shell.running("gc", "--every", "1s", "--json") as (child, out, err):
        assert json.loads(out.readline())["live"]["objects"] > 0
        child.send_signal(signal.SIGINT)
        child.wait(60)
        notes = err.read().splitlines()
    assert [json.loads(line)["note"].endswith("; the next run goes on") for line in notes[:2]] == [True, True]


def test_maintain_does_it_all(shell: Shell) -> None:
    ids = fill(shell, 4)
    shell.run("expire", "--keep-last", "9", "--save")
    shell.run("expire", "--keep-last", "2", "--save", "--dry-run")
    shell.commit(5)
    shell.run("expire", "--keep-last", "1", "--save")
    done = shell.json("maintain", "--grace", "0s", "--force")
    assert [one["state"] for one in done["expire"]["versions"]] == ["kept", "stone"]
    assert done["gc"]["deleted"]["kinds"]["manifest"][0] == 3
    assert done["copy"] in names(shell)
    assert done["compact"].keys() == shell.json("compact").keys() >= {"reverse", "bytes"}
    assert "1 copy of the root" in shell.out("gc")
    assert shell.out("maintain").startswith("expire: 0 of 2 versions let go of\n")
    assert shell.json("show")["parents"] == [ids[3]]
    assert shell.json("show", "main~1")["manifest"] is None  # stored as a step, and expired all the same
    shell.run("checkout", "main", "out")


def test_many_copies_of_the_root_do_not_pile_up(shell: Shell) -> None:
    fill(shell, 1)
    repository = weightvc.open(shell.cwd / ".weightvc", cache=None)
    made = []
    for i in range(20):
        made.append(repository.copy_root())
        repository.branch(f"b{i}")
    copies = sorted(name for name in names(shell) if name.startswith("root.d/"))
    assert copies == made[-16:]  # the newest
    assert "16 copies of the root" in shell.out("gc", "--dry-run")


def test_a_deleted_branch_is_restored(shell: Shell, history: dict[str, str]) -> None:
    shell.run("branch", "-d", "exp")
    shell.fails(3, "show", "exp")
    assert shell.json("branch", "--restore", "exp")["id"] == history["exp1"]
    assert shell.json("show", "exp")["id"] == history["exp1"]
    assert "exists" in shell.fails(4, "branch", "--restore", "exp")
    assert "ever deleted" in shell.fails(3, "branch", "--restore", "nothing")
    assert [move["op"] for move in shell.json("reflog", "exp")] == ["restore", "delete", "commit", "branch"]


def test_on_real_s3(shell: Shell, s3_place: Place) -> None:
    shell.env |= on_s3(s3_place)
    shell.run("init")
    for i in range(3):
        shell.commit(i, "--base")
    shell.run("expire", "--keep-last", "1")
    done = shell.json("gc", "--grace", "1s")
    assert done["deleted"]["objects"] == 0
    for _ in range(8):
        time.sleep(1.2)
        done = shell.json("gc", "--grace", "1s")
        if done["deleted"]["objects"]:
            break
    assert done["deleted"]["kinds"]["manifest"][0] == 2
    shell.run("checkout", "main", "out")

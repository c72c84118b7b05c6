"""weightvc fsck: what it prints, its JSON, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

import weightvc
from tests.cli.conftest import Shell


def objects(shell: Shell, kind: str) -> list[Path]:
    """The files of a kind, in the order of their commits."""
    found = (shell.cwd / ".weightvc" / kind).iterdir()
    return sorted(found, key=lambda path: int(path.name.split(".")[1].split("-")[0]))


@pytest.mark.usefixtures("history")
def test_whole(shell: Shell) -> None:
    text = shell.out("fsck")
    assert "4 versions, " in text
    assert text.endswith("whole, as far as it was looked at\n")
    text = shell.out("fsck", "--read-data")
    assert "built 4 trees\n" in text
    assert text.endswith("\nwhole\n")
    text = shell.out("fsck", "--read-data=50%", "--seed", "7")
    assert "(50 %, --seed 7)" in text
    assert shell.json("fsck", "--read-data", "0.5", "--seed", "7")["share"] == 0.5
    found = shell.json("fsck")
    assert (found["ok"], found["versions"], found["damages"], found["lost"]) == (True, 4, [], [])
    assert (found["unreferenced"], found["rebuilt"]) == (0, None)
    assert found["bytes"] > 0
    assert "nbytes" not in found


def test_damage_and_repair(shell: Shell, history: dict[str, str]) -> None:
    shell.run("checkout", "main~1", "served")
    bad = objects(shell, "manifest")[1]
    good = bad.read_bytes()
    bad.write_bytes(b"")
    done = shell.run("fsck", "--no-cache", code=7)
    assert f"bad: manifest/{bad.name}: it has 0 bytes\n" in done.stdout
    assert f"named by version {history['main1']}\n" in done.stdout
    assert f"lost: {history['main1'][:12]} (main, generation 1, step 1), {history['merge'][:12]}" in done.stdout
    assert f"cannot be read: 2 versions, named at manifest/{bad.name}\n" in done.stdout
    assert "needed: " in done.stdout
    assert "1 object missing or bad, 2 versions that cannot be read: see `weightvc fsck --repair`" in done.stderr
    done = shell.run("fsck", "--no-cache", "--json", code=7)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is False
    (damage,) = found["damages"]
    assert damage["key"] == f"manifest/{bad.name}"
    first = {"id": history["main1"], "branch": "main", "generation": 1, "step": 1}
    assert damage["lost"][0] == found["lost"][0] == first
    assert json.loads(done.stderr)["exit_code"] == 7
    # From the checkout, without the cache; then whole.
    text = shell.out("fsck", "--no-cache", "--repair", "--from", "served")
    assert "repaired: version " in text
    assert shell.json("fsck", "--no-cache", "--read-data")["ok"]
    # And the cache of the host that committed has the object itself.
    bad = objects(shell, "manifest")[0]
    good = bad.read_bytes()
    bad.write_bytes(b" " * len(good))
    text = shell.out("fsck", "--read-data", "--repair")
    assert f"repaired: manifest/{bad.name} (" in text
    assert bad.read_bytes() == good


def test_one_version_is_no_versions(shell: Shell) -> None:
    shell.run("init")
    shell.commit(0)
    (shell.cwd / ".weightvc" / "root.d").mkdir()
    (shell.cwd / ".weightvc" / "root").rename(shell.cwd / ".weightvc" / "root.d" / "saved")
    assert "with 1 version\n" in shell.run("fsck", code=7).stdout


def test_a_deleted_branch_comes_back(shell: Shell, history: dict[str, str]) -> None:
    """As docs/operations.md has it."""
    shell.run("branch", "-d", "exp")
    gone, before = shell.out("reflog", "exp").splitlines()[:2]
    assert gone.startswith("gone ")
    assert history["exp1"][:12] in before
    shell.run("branch", "exp", history["exp1"][:12])
    assert shell.out("log", "exp", "--oneline", "-n", "1").startswith(history["exp1"][:12])


@pytest.mark.parametrize("damage", [b"", b" " * 900, None])
def test_a_lost_root(shell: Shell, history: dict[str, str], damage: bytes | None) -> None:
    root = shell.cwd / ".weightvc" / "root"
    old = root.read_bytes()
    (shell.cwd / ".weightvc" / "root.d").mkdir()
    (shell.cwd / ".weightvc" / "root.d" / "saved").write_bytes(old)
    assert "can be read" in shell.fails(8, "fsck", "--rebuild-root")
    made = shell.commit(4)
    if damage is None:
        root.unlink()
    else:
        root.write_bytes(damage)
    assert shell.run("log", code=3 if damage is None else 7).stdout == ""
    done = shell.run("fsck", code=7)
    assert "bad: root: " in done.stdout
    assert "from the copy root.d/saved, with 4 versions; --adopt adds 1" in done.stdout
    assert "weightvc fsck --rebuild-root" in done.stderr
    assert root.exists() == (damage is not None)
    if damage is None:
        assert "`weightvc fsck`" in shell.fails(8, "init", ".weightvc")
        with pytest.raises(weightvc.Refused, match="has versions and no root"):
            weightvc.init(root.parent, cache=None, exist_ok=True)
    found = shell.json("fsck", "--rebuild-root", "--adopt")
    assert found["ok"]
    rebuilt = found["rebuilt"]
    assert rebuilt["copy"] == "root.d/saved"
    assert [one["id"] for one in rebuilt["adopted"]] == [made]
    assert rebuilt["branches"] == {"main": made, "exp": history["exp1"]}
    assert rebuilt["tags"] == {"v1": history["exp1"]}
    assert (rebuilt["kept"] is None) == (damage is None)
    assert shell.json("log")[0]["id"] == made
    assert shell.json("fsck", "--read-data")["ok"]


@pytest.mark.usefixtures("history")
def test_usage(shell: Shell) -> None:
    assert "--repair" in shell.fails(2, "fsck", "--from", "x")
    assert "--rebuild-root" in shell.fails(2, "fsck", "--adopt")
    assert "share" in shell.fails(2, "fsck", "--read-data=2")
    assert "share" in shell.fails(2, "fsck", "--read-data=x")
    assert "does not exist" in shell.fails(8, "fsck", "--repair", "--from", "nowhere")
    assert "weightvc init" in shell.fails(3, "fsck", "-r", "nowhere")

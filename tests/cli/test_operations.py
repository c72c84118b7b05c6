"""What docs/operations.md says to type when something went wrong, typed."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, checkpoint, command
from tests.kit.pages import ROOT, blocks

PAGE = "docs/operations.md"
DOCS = (ROOT / PAGE).read_text()


def typed(shell: Shell, text: str, code: int = 0, **words: str) -> str:
    """Type what stands in the document, with its words in capitals filled in; what is printed, errors too."""
    assert text in DOCS
    for word, meant in words.items():
        text = re.sub(rf"\b{word}\b", meant, text)
    script = f'weightvc() {{ {shlex.join(command())} "$@"; }}\n{text}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=shell.cwd,
        env=shell.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def large(shell: Shell, seed: int, *args: str) -> str:
    """Commit weights that do not fit into a manifest; the version's id."""
    path = checkpoint(shell.cwd / "large.safetensors", w=random.Random(seed).randbytes(6 << 20))
    return str(shell.json("commit", path, *args)["id"])


def packs(shell: Shell) -> list[Path]:
    return sorted((shell.cwd / ".weightvc" / "pack").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_branch_was_deleted(shell: Shell, history: dict[str, str]) -> None:
    shell.run("branch", "-d", "exp")
    typed(shell, "weightvc branch --restore NAME", NAME="exp")
    assert shell.json("show", "exp")["id"] == history["exp1"]


def test_a_bad_step_and_a_branch_that_was_reset(shell: Shell) -> None:
    shell.run("init")
    ids = [shell.commit(i) for i in range(5)]
    typed(shell, "weightvc reset main main~3 --rewind")
    assert shell.json("show", "main")["id"] == ids[1]
    assert ids[4][:12] in typed(shell, "weightvc reflog BRANCH", BRANCH="main")
    typed(shell, "weightvc reset BRANCH 'BRANCH@{1}' --rewind", BRANCH="main")
    assert shell.json("show", "main")["id"] == ids[4]
    typed(shell, "weightvc branch exp main~3")
    typed(shell, "weightvc revert main~3")
    assert shell.json("show", "main")["tree"] == shell.json("show", "exp")["tree"]


def test_a_tag_was_deleted(shell: Shell) -> None:
    shell.run("init")
    ids = [shell.commit(i) for i in range(3)]
    shell.run("tag", "v1")
    shell.run("reset", "main", "main~1", "--rewind")  # nothing but the tag leads to it
    shell.run("tag", "-d", "v1")
    assert ids[2][:12] not in shell.out("log", "--all")
    assert ids[2][:12] in typed(shell, "weightvc expire --keep-unreachable 30d --dry-run")
    typed(shell, "weightvc tag NAME ID", NAME="v1", ID=ids[2][:12])
    assert shell.json("show", "v1")["id"] == ids[2]


@pytest.mark.parametrize("copied", [True, False])
def test_the_root_is_lost(shell: Shell, history: dict[str, str], copied: bool) -> None:
    if copied:
        shell.run("maintain")
    made = shell.commit(4)
    root = shell.cwd / ".weightvc" / "root"
    root.write_bytes(root.read_bytes()[:100])
    (block,) = [block for block in blocks(PAGE, "sh") if "--rebuild-root" in block.text]
    says, adopting, after = (line.partition("  ")[0] for line in block.text.splitlines())
    assert "root: " in typed(shell, says, 7)
    assert made[:12] in typed(shell, adopting)
    assert "whole\n" in typed(shell, after)
    assert shell.json("show", "main")["id"] == made
    assert sorted(path.name for path in (shell.cwd / ".weightvc" / "lost").iterdir())[0].startswith("root-")
    shell.commit(5)
    shell.run("maintain", "--grace", "0s")
    assert shell.json("fsck", "--read-data")["ok"]


@pytest.mark.parametrize("host", ["trainer", "rollout host"])
def test_a_pack_is_lost(shell: Shell, host: str) -> None:
    shell.run("init")
    large(shell, 1)
    second = large(shell, 2, "--base")
    shell.run("checkout", "main", "served")
    packs(shell)[-1].unlink()
    cache = [] if host == "trainer" else ["--no-cache"]
    done = shell.run("fsck", *cache, code=7)
    assert "pack/" in done.stdout
    assert second[:12] in done.stdout
    if host == "trainer":
        typed(shell, "weightvc fsck --read-data --repair")
    else:
        typed(shell, "weightvc fsck --read-data --repair --from PATH", PATH="served --no-cache")
    assert shell.json("fsck", "--read-data", "--no-cache")["ok"]


def test_bits_have_rotted(shell: Shell) -> None:
    shell.run("init")
    large(shell, 1)
    (pack,) = packs(shell)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    said = shell.run("fsck", "--read-data", "--no-cache", code=7).stderr
    assert "see `weightvc fsck --read-data --repair`" in said
    typed(shell, "weightvc fsck --read-data --repair")
    assert shell.json("fsck", "--read-data", "--no-cache")["ok"]


def test_an_object_is_put_back_from_a_copy_of_it(shell: Shell) -> None:
    """As of a bucket that keeps versions."""
    shell.run("init")
    shell.commit(0)
    (manifest,) = (shell.cwd / ".weightvc" / "manifest").iterdir()
    (shell.cwd / "copy" / "manifest").mkdir(parents=True)
    manifest.rename(shell.cwd / "copy" / "manifest" / manifest.name)
    shell.env["WEIGHTVC_CACHE"] = "none"
    assert f"repaired: manifest/{manifest.name}" in typed(shell, "weightvc fsck --repair --from copy")
    assert shell.json("fsck", "--read-data")["ok"]


def test_an_object_lies_on_another_disk_until_there_is_room(shell: Shell) -> None:
    shell.run("init")
    for seed in range(4):
        large(shell, seed, "--base")
    other = shell.cwd / "other"
    other.mkdir()
    (block,) = [block for block in blocks(PAGE, "sh") if "ln -s /other/aside" in block.text]
    filled = block.text.replace("/other/aside", str(other / "aside"))
    script = re.sub(r"\bN\b", "1", filled.replace("REPOSITORY", ".weightvc"))
    done = subprocess.run(
        ["bash", "-c", f'set -e\nweightvc() {{ {shlex.join(command())} "$@"; }}\n{script}'],
        cwd=shell.cwd,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(other.iterdir()) == []
    assert not any(path.is_symlink() for path in (shell.cwd / ".weightvc").rglob("*"))
    assert len({pack.name.split(".")[1].rpartition("-")[0] for pack in packs(shell)}) == 1  # of one transaction
    assert shell.json("fsck", "--read-data")["ok"]


def test_much_that_nobody_let_go_of(shell: Shell) -> None:
    """Of commits that were killed before they were published: here the root is put back by hand instead."""
    shell.run("init")
    shell.commit(0, "--base")
    root = shell.cwd / ".weightvc" / "root"
    old = root.read_bytes()
    for i in range(1, 4):
        shell.commit(i, "--base")
    root.write_bytes(old)
    shell.run("gc", "--grace", "0s", code=8)
    assert "whole" in (said := shell.out("fsck"))
    assert "named by nothing: " in said
    typed(shell, "weightvc gc --force")
    shell.run("gc", "--force", "--grace", "0s")
    assert "named by nothing" not in shell.out("fsck")


def test_the_first_line_and_the_job(shell: Shell, tmp_path: Path) -> None:
    shell.run("init", "policy")
    shell.env["WEIGHTVC_REPO"] = str(shell.cwd / "policy")
    for i in range(3):
        shell.commit(i)
    (block,) = [block for block in blocks(PAGE, "sh") if "weightvc maintain" in block.text]
    first, job = block.text.splitlines()
    shell.run(*shlex.split(first.replace("s3://bucket/policy", "policy"))[1:])
    lines = tmp_path / "lines"
    shell.run(
        *shlex.split(job.replace("s3://bucket/policy", "policy").replace("/var/log/weightvc.jsonl", str(lines)))[1:]
    )
    assert lines.read_text().count('"ok": true') == 1

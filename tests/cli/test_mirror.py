"""weightvc mirror: end to end by command."""

import json
import signal

import pytest

from tests.cli.conftest import Shell
from tests.kit.servers import Place


def test_mirrors_and_says_what_it_did(shell: Shell, history: dict[str, str]) -> None:
    assert "weightvc init" in shell.fails(3, "mirror", ".weightvc", "near")
    shell.run("init", "near")
    said = shell.json("mirror", ".weightvc", "near")
    assert (said["branch"], said["id"], said["versions"], said["old"]) == ("main", history["merge"], 4, None)
    assert shell.out("mirror", ".weightvc", "near") == f"main is at {history['merge'][:12]}: nothing to copy\n"
    new = shell.commit(5)
    assert shell.out("mirror", ".weightvc", "near").startswith(f"main is at {new[:12]}: 1 version, ")
    assert shell.json("mirror", ".weightvc", "near", "-b", "exp")["versions"] == 0
    for ref in ("main", "exp"):
        assert shell.json("log", ref, "-r", "near")[0]["id"] == shell.json("log", ref)[0]["id"]
    # A directory that was checked out from the one goes on with the other.
    shell.run("checkout", "main~1", "served")
    shell.run("checkout", "main", "served", "-r", "near")
    assert shell.json("status", "served", "-r", "near")["version"] == new
    shell.run("fsck", "-r", "near", "--read-data")
    shell.run("reset", "main", "main~1", "--rewind")
    assert "(rewound)" in shell.out("mirror", ".weightvc", "near")
    assert "mirrored from" in shell.out("reflog", "-r", "near")


def test_which_repositories_is_said_by_src_and_dst_alone(shell: Shell, history: dict[str, str]) -> None:
    shell.run("init", "near")
    assert "--repo" not in shell.out("mirror", "--help")
    assert "--endpoint-url" in shell.out("mirror", "--help")
    assert "leave -r out" in shell.fails(2, "-r", "near", "mirror", ".weightvc", "near")
    assert "-r" in shell.fails(2, "mirror", ".weightvc", "near", "-r", "near")
    assert shell.json("branch", "-r", "near") == []


@pytest.mark.parametrize("every", [(), ("--every", "0.05")])
@pytest.mark.parametrize("ref", ["main~1", "v1", "exp1"])
def test_what_is_no_branch_is_refused_at_once(
    shell: Shell, history: dict[str, str], ref: str, every: tuple[str, ...]
) -> None:
    shell.run("init", "near")
    said = shell.fails(8, "mirror", ".weightvc", "near", "-b", history.get(ref, ref)[:8], *every)
    assert "branch" in said


def test_a_mirror_with_commits_of_its_own_is_refused(shell: Shell, history: dict[str, str]) -> None:
    shell.run("init", "near")
    shell.run("mirror", ".weightvc", "near")
    shell.run("commit", "1.safetensors", "-m", "own", "-r", "near")
    shell.commit(5)
    assert "versions of its own" in shell.fails(4, "mirror", ".weightvc", "near")
    assert "versions of its own" in shell.fails(4, "mirror", ".weightvc", "near", "--every", "0.05")
    assert "versions of its own" not in shell.fails(8, "mirror", ".weightvc", "near", "--every", "nan")


def test_to_s3_and_on_until_it_is_ended(shell: Shell, history: dict[str, str], s3_place: Place) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": str(s3_place.options["access_key"]),
        "AWS_SECRET_ACCESS_KEY": str(s3_place.options["secret_key"]),
        "AWS_REGION": "us-east-1",
    }
    url = f"{s3_place.url}?endpoint_url={s3_place.options['endpoint_url']}"
    shell.run("init", url, env=env)
    with shell.running("mirror", ".weightvc", url, "--every", "0.05", "--json", env=env) as (process, out, err):
        assert json.loads(out.readline())["id"] == history["merge"]
        new = shell.commit(5)
        assert json.loads(out.readline())["id"] == new
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), err.read()) == (0, "")
    # And back: the endpoint of one side is in its URL, the other is a directory.
    shell.run("init", "back")
    shell.run("mirror", url, "back", "--last", "2", env=env)
    log = shell.json("log", "-r", "back")
    assert {one["id"] for one in log} == {one["id"] for one in shell.json("log")}
    shell.run("checkout", "main", "served", "-r", "back")
    shell.run("verify", "served", "main", "-r", ".weightvc")

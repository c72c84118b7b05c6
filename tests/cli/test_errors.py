"""Exit codes, what goes to which stream, and input that must not be trusted."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, checkpoint, command, raw, weights


def test_version_and_help(shell: Shell) -> None:
    assert shell.out("--version") == "weightvc 0.1.0\n"
    help_text = shell.out("--help")
    for name in ("init", "commit", "checkout", "pull", "log", "show", "diff", "status", "branch", "tag", "reset"):
        assert f"  {name} " in help_text
    for name in ("revert", "reflog", "ls", "cat", "verify"):
        assert f"  {name} " in help_text
        assert shell.out(name, "-h").startswith(f"Usage: weightvc {name} ")
    done = shell.run(code=2)
    assert done.stdout == ""
    assert "Usage: weightvc" in done.stderr


def test_usage_errors(shell: Shell) -> None:
    assert "nothing" in shell.fails(2, "nothing")
    assert "did you mean commit" in shell.fails(2, "comit", "x")
    assert shell.out("help") == shell.out("--help")
    assert shell.out("help", "log") == shell.out("log", "--help")
    assert "weightvc commit --help" in shell.fails(2, "commit")
    error = json.loads(shell.run("commit", "--json", "-m", code=2).stderr)
    assert (error["error"], error["exit_code"]) == ("Usage", 2)


def test_errors_are_json_when_asked(shell: Shell, history: dict[str, str]) -> None:
    done = shell.run("log", "nothing", "--json", code=3)
    assert done.stdout == ""
    error = json.loads(done.stderr)
    assert (error["error"], error["exit_code"]) == ("RefNotFound", 3)
    assert "'nothing'" in error["message"]


def test_a_corrupt_root_is_named(shell: Shell, history: dict[str, str]) -> None:
    root = shell.cwd / ".weightvc" / "root"
    whole = root.read_bytes()
    for data in (b"", b" " * 64, bytes(64), whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        root.write_bytes(data)
        assert "root" in shell.fails(7, "log")
        assert "root" in shell.fails(7, "commit", "1.safetensors")


def test_an_unreachable_store(shell: Shell) -> None:
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    url = "s3://bucket/prefix?attempts=1&connect_timeout=1"
    server = ["--endpoint-url", "http://127.0.0.1:1"]
    for args in ([*server, "log", "-r", url], ["log", "-r", url, *server, "--region", "us-east-1"]):
        message = shell.fails(9, *args, env=env)
        assert "s3" in message
        assert "AWS_ENDPOINT_URL" not in message
    # Who named no server may have meant another than Amazon's. (Here a file says where that one is.)
    (shell.cwd / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:1\nregion = us-east-1\n")
    message = shell.fails(9, "log", "-r", url, env=env | {"AWS_CONFIG_FILE": str(shell.cwd / "config")})
    assert message.count("--endpoint-url URL or AWS_ENDPOINT_URL") == 1
    shell.fails(8, "log", "-r", "somewhere", "--profile", "x")


def test_a_bug_is_called_one(shell: Shell, history: dict[str, str]) -> None:
    code = (
        "import sys, weightvc\n"
        "weightvc.open = lambda *a, **k: {}['x\\ny']\n"
        "from weightvc_cli.main import main\n"
        "sys.argv = ['weightvc', 'log']\n"
        "main()\n"
    )
    for debug in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=shell.cwd,
            env=shell.env | {"WEIGHTVC_DEBUG": debug},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("weightvc: a bug in weightvc: KeyError: ")
        assert ("Traceback" in done.stderr) == bool(debug)


def test_warnings_go_to_stderr(shell: Shell) -> None:
    shell.run("init")
    path = shell.cwd / "x.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    raw(path, header, bytes(16))
    shell.run("commit", path)
    raw(path, header, b"\x01" * 16)
    done = shell.run("commit", path)
    assert done.stdout.startswith("[main ")
    assert done.stderr.startswith("weightvc: warning: ")
    assert "--dtype bf16" in done.stderr
    raw(path, header, b"\x02" * 16)
    done = shell.run("commit", path, "--json")
    assert json.loads(done.stdout)["changed"] == 4
    assert "--dtype bf16" in json.loads(done.stderr)["warning"]


def test_a_reader_that_leaves_is_no_error(shell: Shell, history: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*command(), "log"], cwd=shell.cwd, env=shell.env, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


def _large(shell: Shell) -> None:
    shell.run("init")
    shell.run("commit", checkpoint(shell.cwd / "x.safetensors", w=bytes(4 << 20)))


def test_cat_into_a_reader_that_leaves(shell: Shell) -> None:
    _large(shell)
    with shell.running("cat", "HEAD", "--tensor", "w") as (process, out, err):
        assert out.read(1) == "\0"
        out.close()
        assert err.read() == ""
        assert process.wait(60) == 141


def test_an_interrupt_ends_at_once(shell: Shell) -> None:
    _large(shell)
    with shell.running("cat", "HEAD", "--tensor", "w") as (process, out, err):
        # It has begun to write more than a pipe holds, so it waits there.
        assert out.read(1) == "\0"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in err.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(shell: Shell, history: dict[str, str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*command(), "log"], cwd=shell.cwd, env=shell.env, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 9
    assert done.stderr.startswith(b"weightvc: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("shard", ["../../s.safetensors", "/etc/x", "a\\..\\b", "C:x", "a\0b"])
def test_an_index_may_not_lead_out(shell: Shell, shard: str) -> None:
    shell.run("init")
    folder = shell.cwd / "model"
    checkpoint(folder / "model-00001-of-00001.safetensors", **weights(0))
    index = {"metadata": {}, "weight_map": {"w": shard, "b": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shell.fails(8, "commit", folder)
    assert shell.json("branch") == []


def test_a_link_may_not_lead_out(shell: Shell) -> None:
    shell.run("init")
    folder = shell.cwd / "model"
    checkpoint(folder / "model.safetensors", **weights(0))
    (shell.cwd / "secret").write_text("secret")
    (folder / "config.json").symlink_to(shell.cwd / "secret")
    assert "config.json" in shell.fails(8, "commit", folder)
    assert "does not exist" in shell.fails(3, "commit", folder / "nothing")


def test_names_of_tensors_are_kept_exactly(shell: Shell) -> None:
    shell.run("init")
    names = ["../../x", "a\0b", "x" * 5000, "W", "w", "\u00e9", "e\u0301"]
    path = checkpoint(shell.cwd / "x.safetensors", **{name: bytes([i, 0]) for i, name in enumerate(names)})
    shell.run("commit", path)
    assert sorted(t["name"] for t in shell.json("ls")) == sorted(names)
    shell.run("checkout", "HEAD", "out")
    assert (shell.cwd / "out/model.safetensors").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in shell.cwd.iterdir()) == [".weightvc", "out", "x.safetensors"]
    assert "\0" not in shell.out("ls")
    done = subprocess.run(
        [*command(), "cat", "HEAD", "--tensor", "../../x"], cwd=shell.cwd, env=shell.env, capture_output=True
    )
    assert done.stdout == b"\0\0"


def _tensor(**changes: object) -> bytes:
    return json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} | changes}).encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        pytest.param(b'{"w":' + _tensor()[6:-1] + b',"w":' + _tensor()[6:-1] + b"}", bytes(4), id="duplicate"),
        pytest.param(_tensor(), bytes(5), id="trailing"),
        pytest.param(_tensor(), bytes(3), id="short"),
        pytest.param(_tensor(data_offsets=[1, 5]), bytes(5), id="hole"),
        pytest.param(_tensor(data_offsets=[-4, 0]), bytes(4), id="negative"),
        pytest.param(_tensor(data_offsets=[0, 4.0]), bytes(4), id="fractional"),
        pytest.param(_tensor(shape=[2**33, 2**33]), bytes(4), id="overflow"),
        pytest.param(_tensor().replace(b"[2]", b"[" + b"9" * 5000 + b"]"), bytes(4), id="digits"),
        pytest.param(b"[" * 200_000, b"", id="nesting"),
        pytest.param(b'{"__metadata__":' + _tensor()[6:-1] + b"}", bytes(4), id="metadata"),
    ],
)
def test_a_malformed_header_is_refused(shell: Shell, header: bytes, data: bytes) -> None:
    path = raw(shell.cwd / "x.safetensors", header, data)
    assert "x.safetensors" in shell.fails(8, "diff", path, path)


def test_a_length_without_end_is_refused(shell: Shell) -> None:
    path = shell.cwd / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    shell.fails(8, "diff", path, path)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_pickle_never_runs(shell: Shell, name: str) -> None:
    shell.run("init")
    (shell.cwd / name).write_bytes(pickle.dumps({"w": _Evil()}, protocol=2))
    shell.fails(8, "commit", name)
    assert not (shell.cwd / "ran").exists()


def test_words_that_are_no_text(shell: Shell, history: dict[str, str]) -> None:
    bad = os.fsdecode(b"\xff")
    assert "message" in shell.fails(8, "reset", "main", "main", "-m", bad)
    assert "message" in shell.fails(8, "commit", "1.safetensors", "-m", bad)
    assert "author" in shell.fails(8, "tag", "t1", env={"WEIGHTVC_AUTHOR": bad})
    assert [tag["name"] for tag in shell.json("tag")] == ["v1"]


@pytest.mark.parametrize("text", ["[" * 200_000, '{"repository":"r","version":5,"branch":{},"files":{}}', "{}", ""])
def test_a_marker_that_cannot_be_read(shell: Shell, history: dict[str, str], text: str) -> None:
    folder = shell.cwd / "e"
    folder.mkdir()
    (folder / ".weightvc").write_text(text)
    assert ".weightvc" in shell.fails(8, "status", "e")
    assert ".weightvc" in shell.fails(8, "status", "e", "-r", ".weightvc")
    assert ".weightvc" in shell.fails(8, "checkout", "main", "e", "-r", ".weightvc")


def test_a_working_directory_that_is_gone(shell: Shell, history: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *command(), "log"],
        cwd=shell.cwd,
        env=shell.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 8
    assert done.stderr.startswith("weightvc: the working directory is gone")
    assert len(done.stderr.splitlines()) == 1

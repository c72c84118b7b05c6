"""weightvc follow --engine: an engine that is moved by the command alone."""

import json
from pathlib import Path

from tests.cli.conftest import Shell
from tests.kit.engines import SGLangServer, digest


def test_an_engine_follows(shell: Shell, history: dict[str, str]) -> None:
    from safetensors.torch import load_file

    with SGLangServer(key="abc") as engine:
        env = {"WEIGHTVC_ENGINE_KEY": "abc"}
        args = ("follow", "exp", "--into", "served", "--every", "0.05", "--engine", f"sglang={engine.url}")
        done = shell.run(*args, "--updates", "1", "--json", "--mode", "drain", env=env)
        told = json.loads(done.stdout)
        assert (told["id"], told["pause"]["mode"], told["pause"]["way"]) == (history["exp1"], "drain", "disk")
        assert engine.version == history["exp1"]
        served = [load_file(file) for file in Path(told["path"]).glob("*.safetensors")]
        assert [engine.digest()] == [digest(found) for found in served]
        # An engine that was started again serves something else; the directory has the newest version by now.
        engine.weights, engine.version = {}, "default"
        out = shell.run(*args, "--updates", "1", env=env).stdout
        assert out.startswith(history["exp1"][:12])
        assert "the engine paused for" in out
        assert engine.version == history["exp1"]


def test_an_engine_that_is_not_there_is_waited_for(shell: Shell, history: dict[str, str]) -> None:
    with SGLangServer() as engine:
        engine.faults["/pause_generation"] = "500"
        args = ("exp", "--into", "served", "--every", "0.05", "--updates", "1", "--engine", f"sglang={engine.url}")
        with shell.running("follow", *args) as (process, out, err):
            said = err.readline()
            assert "POST /pause_generation: status 500" in said
            assert "is tried again" in said
            engine.faults.clear()
            assert out.readline().startswith(history["exp1"][:12])
            assert process.wait(60) == 0
        assert engine.version == history["exp1"]


def test_bad_engines_are_refused(shell: Shell, history: dict[str, str]) -> None:
    for args in (
        ("--engine", "http://127.0.0.1:1"),
        ("--engine", "trt=http://127.0.0.1:1"),
        ("--engine", "vllm=127.0.0.1"),
        ("--engine", "vllm=http://127.0.0.1:1", "--mode", "in_place"),
    ):
        done = shell.run("follow", "--into", "served", *args, code=8)
        assert done.stdout == ""
    shell.run("follow", "--into", "served", "--engine", "vllm=http://x", "--mode", "abort", code=2)

import json
from pathlib import Path

from tests.cli.conftest import Shell, checkpoint, weights


def _pair(shell: Shell) -> tuple[Path, Path]:
    old = checkpoint(shell.cwd / "old.safetensors", **weights(0), gone=b"\0\0")
    new = checkpoint(shell.cwd / "new.safetensors", **weights(1), more=b"\0\0\1\0")
    return old, new


def test_paths_need_no_repository(shell: Shell) -> None:
    old, new = _pair(shell)
    found = shell.json("diff", old, new)
    assert {t["name"]: t["status"] for t in found["tensors"]} == {
        "b": "same",
        "gone": "removed",
        "more": "added",
        "w": "changed",
    }
    assert found["elements"] == 70
    assert found["changed"] == 3
    assert found["steps"] == {"1": 1}
    assert found["full_bytes"] == 140
    assert found["patch_bytes"] == sum(t["patch_bytes"] for t in found["tensors"])
    out = shell.out("diff", old, new)
    assert "removed             gone\n" in out
    assert "added    100.000 %  more\n" in out
    assert "%" not in next(line for line in shell.out("diff", old, new, "--stat").splitlines() if "gone" in line)
    assert "3 of 4 tensors differ, 3 of 70 elements" in out
    assert " b\n" not in out


def test_stat_says_steps_weight_and_cost(shell: Shell) -> None:
    old, new = _pair(shell)
    out = shell.out("diff", old, new, "--stat", "--step-time", "30", "--readers", "3")
    assert "+1" in out
    assert "A patch would weigh " in out
    assert "one every 30 s (2,880 a day), for 3 readers, on S3:" in out
    costs = shell.json("diff", old, new, "--step-time", "30", "--readers", "3")["costs"]
    assert costs["steps"] == 2880
    assert costs["readers"] == 3
    assert costs["full_bytes"] == 140 * 2880
    assert costs["patch_egress"] > 0
    shell.fails(2, "diff", old, new, "--step-time", "0")


def test_nothing_changed(shell: Shell) -> None:
    old, _ = _pair(shell)
    assert shell.out("diff", old, old, "--exit-code") == "0 of 3 tensors differ, 0 of 69 elements (0 %)\n"
    assert "A patch would weigh 0 B" in shell.out("diff", old, old, "--stat")


def test_exit_code_is_one_when_asked(shell: Shell) -> None:
    old, new = _pair(shell)
    shell.run("diff", old, new)
    assert shell.run("diff", old, new, "--exit-code", code=1).stderr == ""
    done = shell.run("diff", old, new, "--exit-code", "--json", code=1)
    assert json.loads(done.stdout)["changed"] == 3


def test_versions_and_paths_mix(shell: Shell, history: dict[str, str]) -> None:
    found = shell.json("diff", "main~1", "main")
    assert (found["changed"], found["elements"]) == (2, 68)
    assert shell.json("diff", "v1", "2.safetensors")["changed"] == 0
    assert shell.json("diff", "2.safetensors", "main")["changed"] == 2
    message = shell.fails(3, "diff", "main", "nothing")
    assert "no branch, tag or version" in message
    assert message.startswith("no file or directory 'nothing' here; ")


def test_dtype_casts_both(shell: Shell) -> None:
    old, new = _pair(shell)
    found = shell.json("diff", old, new, "--dtype", "fp32")
    assert {t["dtype"] for t in found["tensors"]} == {"F32"}
    assert found["full_bytes"] == 280


def test_a_missing_path_without_a_repository(shell: Shell) -> None:
    old, _ = _pair(shell)
    message = shell.fails(3, "diff", old, "typo.safetensors")
    assert "'typo.safetensors' is no file or directory" in message


def test_what_lies_beside_weights_does_not_count(shell: Shell) -> None:
    for step in (1, 2):
        folder = shell.cwd / f"checkpoint-{step}"
        checkpoint(folder / "model.safetensors", **weights(step))
        with (folder / "optimizer.pt").open("wb") as file:
            file.truncate(65 << 20)  # more than is read of a side file
    for command in ("diff", "density"):
        assert shell.json(command, "checkpoint-1", "checkpoint-2")["changed"] == 2
    assert shell.json("audit", ".")["distances"][0]["changed"] == 2

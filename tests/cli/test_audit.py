"""density and audit: what they say of pairs and runs whose changes are known."""

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Shell, checkpoint, weights


def bf16(values: np.ndarray) -> bytes:
    return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def run(folder: Path, count: int, share: float = 0.01) -> Path:
    """Checkpoints `step-N`, ten steps apart; in each another share of the elements moves up by one."""
    rng = np.random.default_rng(0)
    bits = np.frombuffer(bf16(rng.normal(0, 0.02, 1 << 16)), "<u2").copy()
    order = rng.permutation(bits.size)
    each = int(share * bits.size)
    for step in range(count):
        checkpoint(folder / f"step-{10 * step}.safetensors", **{"model.layers.0.w": bits.tobytes()})
        bits[order[: each * (step + 1)][each * step :]] += 1
    return folder


def test_density_by_dtype_layer_and_exponent(shell: Shell) -> None:
    old = np.array([1.0, 1.5, 0.5, 0.5, 3.0, 0.0], "<f4")
    bits = np.frombuffer(bf16(old), "<u2").copy()
    new = bits.copy()
    new[[0, 2]] += np.array([1, 4], "<u2")
    names = ("layers.10.a", "layers.10.b", "layers.9.a", "head.weight", "alone")
    before = checkpoint(shell.cwd / "old.safetensors", **dict.fromkeys(names, bits.tobytes()))
    tensors = dict.fromkeys(names, bits.tobytes()) | {"layers.10.b": new.tobytes(), "more": b"\0\0"}
    after = checkpoint(shell.cwd / "new.safetensors", **tensors)
    found = shell.json("density", before, after)
    assert [layer["name"] for layer in found["layers"]] == ["alone", "head", "layers.9", "layers.10", "more"]
    layer = found["layers"][3]
    assert (layer["tensors"], layer["elements"], layer["changed"]) == (2, 12, 2)
    assert [(one["name"], one["elements"], one["changed"]) for one in found["dtypes"]] == [("BF16", 31, 3)]
    # What was added has no old weights.
    assert [tuple(one.values()) for one in found["exponents"]] == [
        ("BF16", None, 5, 0, 0, 0.0),
        ("BF16", -1, 10, 1, 0, 0.1),
        ("BF16", 0, 10, 1, 1, 0.1),
        ("BF16", 1, 5, 0, 0, 0.0),
    ]
    assert found["patch_bytes"] == sum(one["patch_bytes"] for one in found["layers"])
    out = shell.out("density", before, after)
    assert "layers.10" in out
    assert "2^-1" in out
    assert "3 of 31 elements" in out


def test_density_of_versions(shell: Shell, history: dict[str, str]) -> None:
    assert shell.json("density", "main~1", "main")["changed"] == 2
    assert "no branch, tag or version" in shell.fails(3, "density", "main", "nothing")


def test_audit_of_a_directory(shell: Shell) -> None:
    folder = run(shell.cwd / "out", 10)
    found = shell.json("audit", folder, "--pairs", "2", "--readers", "3", "--step-time", "30")
    assert [Path(name).name for name in found["checkpoints"]] == [f"step-{10 * i}.safetensors" for i in range(10)]
    assert found["stride"] == 10
    assert [(one["apart"], len(one["pairs"])) for one in found["distances"]] == [(1, 2), (2, 2), (4, 2), (8, 2)]
    for one in found["distances"]:
        assert one["changed"] == one["apart"] * int(0.01 * (1 << 16))
    assert found["growth"] == pytest.approx(1)
    assert found["pays"]
    assert found["verdict"].startswith("Patches pay: they are ")
    assert found["costs"]["readers"] == 3
    assert found["costs"]["full_bytes"] == 2 * (1 << 16) * 2880
    assert found["costs"]["patch_bytes"] < found["costs"]["compacted_bytes"] < found["costs"]["full_bytes"]
    ends = [pair["new"] for pair in found["distances"][0]["pairs"]]
    assert [Path(name).name for name in ends] == ["step-10.safetensors", "step-90.safetensors"]
    out = shell.out("audit", folder, "--last", "3")
    assert out.startswith("3 checkpoints, ")
    assert "k^1.00" in out
    assert out.splitlines()[-1].split()[-2:] == [str(folder / f"step-{n}.safetensors") for n in (80, 90)]


def test_audit_says_why_patches_do_not_pay(shell: Shell) -> None:
    dense = run(shell.cwd / "dense", 2, 0.9)
    found = shell.json("audit", dense)
    assert not found["pays"]
    assert "90% of the BF16 elements change" in found["verdict"]
    assert "10 steps apart" in found["verdict"]
    paths = [dense / f"step-{step}.safetensors" for step in (0, 10)]
    assert "learning rate" in shell.json("audit", *paths)["verdict"]
    other = checkpoint(shell.cwd / "other.safetensors", x=b"\0" * 100)
    assert "compare checkpoints of one model" in shell.json("audit", paths[0], other)["verdict"]
    assert shell.json("audit", paths[0], paths[0])["verdict"].startswith("Nothing changes from ")
    assert shell.json("audit", paths[0], paths[0])["times"] is None


def test_audit_of_masters_tells_what_a_cast_would_do(shell: Shell) -> None:
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, 1 << 16).astype("<f4")
    for step in range(3):
        header = b'{"w":{"dtype":"F32","shape":[65536],"data_offsets":[0,262144]}}'
        data = struct.pack("<Q", len(header)) + header + masters.tobytes()
        (shell.cwd / f"{step}.safetensors").write_bytes(data)
        masters = masters + rng.choice([-1e-6, 1e-6], masters.size).astype("<f4")
    found = shell.json("audit", ".")
    assert not found["pays"]
    assert "Serve bf16 (--dtype bf16)" in found["verdict"]
    assert found["distances"][0]["density"] > 0.9
    assert found["cast"]["density"] < 0.05
    cast = shell.json("audit", ".", "--dtype", "bf16")
    assert cast["pays"]
    assert cast["cast"] is None
    assert cast["distances"][0]["pairs"][-1]["changed"] == found["cast"]["changed"]


def test_audit_of_versions(shell: Shell, history: dict[str, str]) -> None:
    found = shell.json("audit")
    assert found["checkpoints"] == [history[name][:12] for name in ("base", "main1", "merge")]
    assert found["stride"] == 1.5
    assert [one["changed"] for one in found["distances"]] == [1.5, 1]
    assert shell.json("audit", "exp")["checkpoints"] == [history[name][:12] for name in ("base", "exp1")]
    shell.run("commit", "1.safetensors", "-m", "x", "--run", "r7")
    assert "labelled run='r7'" in shell.fails(8, "audit", "main", "--run", "r7")
    shell.run("commit", "2.safetensors", "-m", "x", "--run", "r7")
    assert len(shell.json("audit", "main", "--run", "r7")["checkpoints"]) == 2
    assert len(shell.json("audit", "main", "--last", "2")["checkpoints"]) == 2


def test_what_expired_is_passed_over(shell: Shell, history: dict[str, str]) -> None:
    new = [shell.commit(step) for step in (4, 5)]
    shell.run("expire", "--keep-last", "2")
    # The first is kept on the branch exp.
    assert shell.json("audit")["checkpoints"] == [one[:12] for one in (history["base"], *new)]


def test_what_cannot_be_audited(shell: Shell, history: dict[str, str]) -> None:
    one = checkpoint(shell.cwd / "out" / "step-1.safetensors", **weights(1))
    assert "give two at least" in shell.fails(8, "audit", one)
    assert "give two at least" in shell.fails(8, "audit", "out")
    assert "give paths alone, or one branch" in shell.fails(2, "audit", one, "main")
    assert "--run is for versions" in shell.fails(2, "audit", one, "--run", "r7")
    assert "--only is for a directory" in shell.fails(2, "audit", "main", "--only", "*")
    assert "no branch, tag or version" in shell.fails(3, "audit", "nothing")
    shell.run("export", "main", "deltas", "--last", "2")
    assert "is a delta: `weightvc import`" in shell.fails(8, "audit", "deltas")

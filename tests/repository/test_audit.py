"""weightvc.audit: its figures against what commits store, its memory, and what it makes of odd runs."""

import math
from typing import Any

import numpy as np
import pytest

import weightvc
from tests.kit import memory
from weightvc.auditing import Audit, AuditedPair, Distance
from weightvc.comparison import GroupDiff, layer_of


def states(count: int, tensors: int = 20, elements: int = 1 << 17) -> list[dict[str, Any]]:
    """Half-precision tensors of a walk of normal weights."""
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, (tensors, elements)).astype("f4")
    out = []
    for _ in range(count):
        out.append({f"layers.{i}.w": masters[i].astype("f2") for i in range(tensors)})
        masters += rng.normal(0, 1e-7, masters.shape).astype("f4")
    return out


def test_patches_weigh_what_commits_store() -> None:
    made = states(3)
    repository = weightvc.init("memory://audited", cache=None)
    versions = [repository.commit(state) for state in made]
    found = weightvc.audit(made, pairs=9)
    assert found.checkpoints == ("checkpoint 0", "checkpoint 1", "checkpoint 2")
    for pair, version in zip(found.distances[0].pairs, versions[1:]):
        place = repository.entry(version).place
        assert place is not None
        assert pair.patch == pytest.approx(place.edges[-1].nbytes, rel=0.05)
        assert pair.changed == place.edges[-1].changed
    same = repository.audit(pairs=9)
    assert [one.density for one in same.distances] == [one.density for one in found.distances]
    assert same.verdict == found.verdict


def test_a_close_look_changes_nothing_else() -> None:
    old, new = states(2, tensors=3)
    plain, close = weightvc.diff(old, new), weightvc.diff(old, new, closely=True)
    assert (plain.tensors, plain.steps, plain.patch) == (close.tensors, close.steps, close.patch)
    assert (plain.exponents, plain.xor) == ([], None)
    assert sum(row.elements for row in close.exponents) == close.elements
    assert sum(row.changed for row in close.exponents) == close.changed
    assert sum(row.single for row in close.exponents) == close.steps[1] + close.steps[-1]


@pytest.mark.parametrize(
    ("dtype", "bits", "exponent"),
    [
        ("<f2", 0x3C00, 0),
        ("<f4", 0x3F800000, 0),
        ("<f8", 0x4000000000000000, 1),
        ("<f4", 0x00000001, None),
        ("<f2", 0xA400, -6),
    ],
)
def test_exponents_are_those_of_numbers(dtype: str, bits: int, exponent: int | None) -> None:
    kind = np.dtype(dtype)
    old = np.full(3, bits, f"<u{kind.itemsize}")
    new = old.copy()
    new[1] += np.array(1, old.dtype)
    (row,) = weightvc.diff({"w": old.view(kind)}, {"w": new.view(kind)}, closely=True).exponents
    assert (row.exponent, row.elements, row.changed, row.single) == (exponent, 3, 1, 1)


def test_memory_is_bounded_whatever_the_model(tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    for step in range(3):
        save_file({"w": np.full(100 << 20, step, np.uint8)}, tmp_path / f"{step}.safetensors")
    paths = [tmp_path / f"{step}.safetensors" for step in range(3)]
    weightvc.audit(paths[:2])
    with memory.at_most(150 << 20):  # two files of 100 MiB are open at once
        weightvc.audit(paths)


def test_layers() -> None:
    for name, layer in {
        "model.layers.12.mlp.experts.3.up": "model.layers.12",
        "0.weight": "0",
        "h.7": "h.7",
        "model.embed_tokens.weight": "model.embed_tokens",
        "block2.weight": "block2",
        "w": "w",
        "": "",
        "model.layers.10.experts.7.weight": "model.layers.10",
    }.items():
        assert layer_of("", name) == layer
    assert layer_of("unet", "down.0.w") == "unet/down.0"


def audited(*densities: float, full: int = 10**6, dtype: str = "BF16", **changes: Any) -> Audit:
    """An audit in which so much changes at 1, 2, 4, … steps, at a byte a change."""
    pairs = [
        AuditedPair("a", "b", 1 << i, 500_000, int(share * 500_000), int(share * 500_000), 10**5, full, 0)
        for i, share in enumerate(densities)
    ]
    group = GroupDiff(dtype, 1, 500_000, pairs[0].changed, pairs[0].patch)
    fields = {"stride": 1.0, "cast": None} | changes
    distances = tuple(Distance(pair.apart, (pair,)) for pair in pairs)
    return Audit(("a", "b"), full=full, elements=500_000, distances=distances, dtypes=(group,), **fields)


def test_growth_and_what_compaction_adds() -> None:
    found = audited(0.01, 0.01 * 2**0.5, 0.02, 0.02 * 2**0.5)
    assert found.growth == pytest.approx(0.5, abs=0.01)
    # Half of a patch of 5,000 bytes for each of 4, a quarter of 16, …, and the bases, twice of it.
    assert found.compacted == pytest.approx(5000 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16 + 1 / 32 + 2), rel=0.02)
    assert audited(0.01).growth is None
    assert audited(0.0, 0.01).growth is None
    assert audited(1.0, 1.0).compacted <= 10**6 + 500_000
    assert math.isinf(audited(0.0).times)


def test_verdicts() -> None:
    assert audited(0.01).verdict.startswith("Patches pay: they are 200 times smaller than whole checkpoints, and 20")
    assert "Publish every 8th: its patch has 25% of the bytes of eight" in audited(0.4, 0.5, 0.6, 0.8).verdict
    assert "publish fewer versions" in audited(0.4, 0.5).verdict
    assert "Patches pay little" in audited(0.4).verdict
    assert "Patches do not pay: they are only 2.2 times" in audited(0.9).verdict
    assert "100 steps apart" in audited(0.9, stride=100.0).verdict
    cast = AuditedPair("a", "b", 1, 500_000, 5000, 5000, 10**4, 10**6, 0)
    assert "Serve bf16" in audited(0.9, dtype="F32", full=2 * 10**6, cast=cast).verdict
    assert "smaller still" in audited(0.1, dtype="F32", cast=cast).verdict


def test_bad_arguments() -> None:
    one = {"w": np.zeros(3, "f2")}
    for arguments, said in (
        (([one],), "1 is there"),
        (([],), "none is there"),
        (([one, one], {"pairs": 0}), "one pair"),
        (([one, one], {"steps": [1]}), "1 steps for 2"),
    ):
        checkpoints, options = (*arguments, {})[:2]
        with pytest.raises(weightvc.Refused, match=said):
            weightvc.audit(checkpoints, **options)  # type: ignore[arg-type]
    opened = []

    def source() -> Any:
        from weightvc.sources import open_source

        opened.append(1)
        return open_source(one)

    assert weightvc.audit({"x": source, "y": one}).checkpoints == ("x", "y")
    assert len(opened) == 1

"""Real optimizer steps, committed and checked out."""

from pathlib import Path

import pytest

import weightvc
from tests.kit import chain


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_real_steps_come_back_to_the_bit_and_are_small(optimizer: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "target"
    with (
        weightvc.init(tmp_path / "repository", cache=tmp_path / "writer") as writer,
        weightvc.open(tmp_path / "repository", cache=None) as reader,
    ):
        for step, data in enumerate(chain.versions(optimizer, 4)):
            source.write_bytes(data)
            version = writer.commit(source, step=step)
            reader.checkout("main", target)
            assert (target / "model.safetensors").read_bytes() == data

            place = writer.entry(version.id).place
            assert place is not None
            edge = place.edges[-1]
            if step:
                print(f"{optimizer} {step}: {edge.changed} changed, {edge.nbytes / edge.changed:.3f} B each")
                assert edge.source == version.parents[0]
                assert edge.nbytes < 2 * edge.changed
            else:
                print(f"base: {place.nbytes / version.nbytes:.3f} of raw")
                assert place.nbytes < 0.7 * version.nbytes

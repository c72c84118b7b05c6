"""Checkouts: the committed files byte for byte, their modes, and what else lies in the directory."""

import os
import stat
import subprocess
import sys

import pytest

import weightvc
from tests.kit.weights import Bits, file_bytes, files_below, flipped, held, lying, tensor, write_shards
from weightvc.errors import BadFile, Refused

WEIGHTS = {("", name): tensor("BF16", (50,), i) for i, name in enumerate("abcd")}


def test_three_shards_then_one_file_into_one_directory(repository, tmp_path):
    write_shards(tmp_path / "in", WEIGHTS, 3)
    (tmp_path / "in" / "config.json").write_text("{}")
    one = repository.commit(tmp_path / "in")
    shards = files_below(tmp_path / "in")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_bytes(WEIGHTS))
    two = repository.commit(file)
    assert one.tree == two.tree
    target = tmp_path / "out"
    repository.checkout(one.id, target)
    assert files_below(target) == shards
    repository.checkout(two.id, target)
    assert files_below(target) == {"model.safetensors": file.read_bytes()}
    (target / "notes.txt").write_text("mine")
    (target / "sub").mkdir()
    (target / "sub" / "more.txt").write_text("mine too")
    with pytest.raises(Refused, match=r"notes\.txt.*sub/more\.txt"):
        repository.checkout(one.id, target)
    assert sorted(files_below(target)) == ["model.safetensors", "notes.txt", "sub/more.txt"]
    assert repository.status(target).foreign == ["notes.txt", "sub/more.txt"]
    repository.checkout(one.id, target, force=True)
    assert files_below(target) == {**shards, "notes.txt": b"mine", "sub/more.txt": b"mine too"}


def test_a_key_in_two_shards_is_refused(repository, tmp_path):
    write_shards(tmp_path / "in", WEIGHTS, 3)
    (tmp_path / "in" / "model-00004-of-00004.safetensors").write_bytes(
        file_bytes({("", "a"): tensor("BF16", (50,), 9)})
    )
    with pytest.raises(BadFile, match="'a'"):
        repository.commit(tmp_path / "in")


def test_modes(repository, tmp_path):
    """What umask says, or the mode that was there."""
    (tmp_path / "model.safetensors").write_bytes(file_bytes(WEIGHTS))
    repository.commit(tmp_path / "model.safetensors")
    old = os.umask(0o002)
    try:
        repository.checkout("main", tmp_path / "out")
        written = tmp_path / "out" / "model.safetensors"
        assert stat.S_IMODE(written.stat().st_mode) == 0o664
        written.chmod(0o640)
        repository.checkout("main", tmp_path / "out")
        assert stat.S_IMODE(written.stat().st_mode) == 0o640
        one = tmp_path / "one.safetensors"
        repository.checkout("main", one)
        assert stat.S_IMODE(one.stat().st_mode) == 0o664
        one.chmod(0o600)
        repository.checkout("main", one, replace=True)
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
        (tmp_path / "out").chmod(0o750)
        repository.checkout("main", tmp_path / "out")
        assert stat.S_IMODE((tmp_path / "out" / ".weightvc").stat().st_mode) == 0o664
    finally:
        os.umask(old)


def test_a_directory_that_was_changed_is_not_trusted(repository, tmp_path):
    """Damaged in place, with size and time kept: that is seen, and the next checkout is exact all the same."""
    repository.commit(Bits(WEIGHTS))
    new = {key: flipped(value, 0.1, 1) for key, value in WEIGHTS.items()}
    repository.commit(Bits(new))
    target = tmp_path / "out"
    repository.checkout("main~1", target)
    file = target / "model.safetensors"
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = repository.verify(target)
    assert (result.ok, len(result.tensors)) == (False, 1)
    assert repository.status(target).changed == ["model.safetensors"]
    with pytest.raises(Refused, match=r"model\.safetensors"):
        repository.checkout("main", target)
    repository.checkout("main", target, replace=True)
    assert lying(target) == new
    assert repository.verify(target).ok
    assert repository.verify(target, "main~1").tensors == list("abcd")


def test_status(repository, tmp_path):
    ids = [repository.commit(Bits({k: flipped(v, 0.1, i) for k, v in WEIGHTS.items()})).id for i in range(3)]
    target = tmp_path / "out"
    repository.checkout("main", target)
    found = repository.status(target)
    assert (found.version.id, found.branch, found.behind) == (ids[2], "main", 0)
    assert (found.changed, found.missing, found.foreign) == ([], [], [])
    new = repository.commit(Bits(WEIGHTS))
    assert (repository.status(target).behind, repository.status(target).head.id) == (1, new.id)
    (target / "model.safetensors").touch()
    assert repository.status(target).changed == []
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "model.safetensors").write_bytes(data)
    assert repository.status(target).changed == ["model.safetensors"]
    (target / "model.safetensors").unlink()
    assert repository.status(target).missing == ["model.safetensors"]
    with pytest.raises(Refused, match="does not say"):
        repository.status(tmp_path)


def test_components_and_single_files(repository, tmp_path):
    weights = {("", "w"): tensor("F32", (3,), 1), ("text/encoder", "w"): tensor("F32", (3,), 2)}
    repository.commit(Bits(weights))
    repository.checkout("main", tmp_path / "out")
    assert sorted(files_below(tmp_path / "out")) == ["model.safetensors", "text/encoder/model.safetensors"]
    assert lying(tmp_path / "out") == weights
    with pytest.raises(Refused, match="several components"):
        repository.checkout("main", tmp_path / "one.safetensors")
    assert not (tmp_path / "one.safetensors").exists()
    assert (
        repository.load(component="text/encoder", framework="numpy")["w"].tobytes()
        == weights["text/encoder", "w"].data
    )
    assert set(repository.files()) == {"model.safetensors", "text/encoder/model.safetensors"}
    assert repository.cat("main", "model.safetensors") == (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(weightvc.NotFound, match=r"nope.*model\.safetensors"):
        repository.cat("main", "nope")


def test_a_target_that_is_a_link_or_a_file(repository, tmp_path):
    repository.commit(Bits(WEIGHTS))
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    repository.checkout("main", tmp_path / "link")
    assert lying(real) == WEIGHTS
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadFile, match="is a file"):
        repository.checkout("main", tmp_path / "file")


SCRIPT = """
import sys
import weightvc
for name in ("torch", "numba", "numpy", "boto3", "fsspec"):
    assert name not in sys.modules, name
folder = sys.argv[1]
repository = weightvc.init(folder + "/repository", cache=folder + "/cache")
repository.commit(folder + "/a.safetensors")
repository.commit(folder + "/b.safetensors")
assert [version.generation for version in repository.log()] == [1, 0]
repository.checkout("main", folder + "/out")
assert repository.verify(folder + "/out").ok
assert repository.status(folder + "/out").behind == 0
assert repository.diff("main~1", "main").changed
repository.tag("v1"); repository.branch("b"); repository.revert("main~1")
for name in ("torch", "numba", "boto3", "fsspec"):
    assert name not in sys.modules, name
"""


def test_files_and_history_need_neither_torch_nor_numba(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(file_bytes(WEIGHTS))
    (tmp_path / "b.safetensors").write_bytes(file_bytes({k: flipped(v, 0.1, 1) for k, v in WEIGHTS.items()}))
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_and_then_space(repository, tmp_path, monkeypatch):
    """The disk fills while a checkout writes: a typed error, no leftovers, the old version still there."""
    import errno

    from weightvc.protocol import checkout

    repository.commit(Bits(WEIGHTS))
    new = {key: flipped(value, 0.5, 1) for key, value in WEIGHTS.items()}
    repository.commit(Bits(new))
    target = tmp_path / "here" / "out"
    repository.checkout("main~1", target)

    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkout.os, "pwrite", full)
        with pytest.raises(weightvc.Unavailable, match="make space"):
            repository.checkout("main", target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert lying(target) == WEIGHTS
    repository.checkout("main", target)
    assert lying(target) == new == held(repository)

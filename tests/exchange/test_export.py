"""Exports: what an engine that knows only the layout makes of them."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import weightvc
from tests.kit.faults import die_at_file_operation, fork, full_disk, wait
from tests.kit.slime import INDEX, Engine, Plain, checkpoint, opened, read
from tests.kit.weights import files_below, tiny_format
from weightvc import exporting
from weightvc.errors import BadName, Expired, Refused, Unavailable
from weightvc.exporting import Export, Exported
from weightvc.repository import Repository


def all_of(repository: Repository, directory: Path, ref: str = "main", **options: object) -> list[Exported]:
    return list(Export(repository, directory, ref, **options).run())  # type: ignore[arg-type]


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_an_engine_pulls_each_version_bit_for_bit(
    repository: Repository, line: list[Plain], tmp_path: Path, encoding: str, checksum: str
) -> None:
    done = all_of(repository, tmp_path / "out", encoding=encoding, checksum=checksum)
    assert [(one.number, one.version.step, one.full) for one in done] == [
        (1, 0, True), (2, 10, False), (3, 20, False), (4, 30, False), (5, 40, False)
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path / "out")) == [f"weight_v{n:06d}" for n in range(1, 6)]
    near, late = Engine(tmp_path / "near"), Engine(tmp_path / "late")
    for number, weights in enumerate(line, 1):
        near.pull(tmp_path / "out", number)
        assert read(near.local) == weights
    late.pull(tmp_path / "out", 5)
    trained = tmp_path / "trained" / "4"
    assert files_below(late.local) == files_below(trained)
    for one in done[1:]:
        assert one.tensors == sum(len(opened(path)[0]) for path in one.path.glob("*.safetensors"))
        assert one.nbytes == sum(path.stat().st_size for path in one.path.iterdir())


def test_what_tiny_chunks_and_many_files_make_of_it(
    line: list[Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SHARD", 40)
    with tiny_format():
        repository = weightvc.init(tmp_path / "tiny", cache=None)
        for i, weights in enumerate(line):
            repository.commit(checkpoint(tmp_path / "ck" / str(i), weights), step=i)
        all_of(repository, tmp_path / "out")
    shards = sorted(path.name for path in (tmp_path / "out" / "weight_v000002").glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0] == f"model-00000-of-{len(shards):05d}.safetensors"
    engine = Engine(tmp_path / "local")
    engine.pull(tmp_path / "out", 5)
    assert read(engine.local) == line[-1]


def test_what_a_delta_cannot_say_is_written_whole(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    shape = {**line[-1], "head": ("BF16", [300, 2], line[-1]["head"][2])}
    for i, (weights, config) in enumerate([(shape, "{}"), (shape, '{"a": 1}'), (shape, '{"a": 1}')], 5):
        path = checkpoint(tmp_path / "trained" / str(i), weights, shards=2)
        (path / "config.json").write_text(config)
        repository.commit(path, step=10 * i)
    done = all_of(repository, tmp_path / "out", full_every=3)
    assert [one.number for one in done if one.full] == [1, 3, 6, 7]
    assert [one.why for one in done if one.full] == [
        "it is the first one here",
        "full_every is 3",
        "full_every is 3",
        "the side file 'config.json' changed, which a delta cannot say: leave it out (--exclude) if engines can do "
        "without it",
    ]
    assert all(one.why is None for one in done if not one.full)
    # Nothing changed in the last one: a delta of no tensors.
    assert done[-1].tensors == 0
    engine = Engine(tmp_path / "local")
    for number in (2, 4, 8):
        engine.pull(tmp_path / "out", number)
    assert files_below(engine.local) == files_below(tmp_path / "trained" / "7")


def test_why_one_is_written_whole_is_told_once_a_reason(
    fresh: Callable[[str], Repository], line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = fresh("told")

    def commit(weights: Plain, *, shards: int = 1, step: int, **files: str) -> None:
        path = checkpoint(tmp_path / "trained" / f"{step}", weights, shards=shards)
        for name, text in files.items():
            (path / name).write_text(text)
        repository.commit(path, step=step)

    commit(line[0], step=0, log="0")
    for step in (1, 2, 3):
        commit(line[step], step=step, log=f"{step}")
    commit(line[3], step=4)
    commit(line[3], step=5, shards=2)
    reshaped = {**line[3], "head": ("BF16", [300, 2], line[3]["head"][2])}
    commit(reshaped, step=6, shards=2)
    retyped = {**reshaped, "head": ("F16", [300, 2], line[3]["head"][2])}
    commit(retyped, step=7, shards=2)
    renamed = {"tail" if name == "head" else name: tensor for name, tensor in retyped.items()}
    commit(renamed, step=8)
    commit(dict(reversed(renamed.items())), step=9)
    commit(dict(reversed(renamed.items())), step=10)
    done = all_of(repository, tmp_path / "out")
    side = "which a delta cannot say: leave it out (--exclude) if engines can do without it"
    whys = [
        "it is the first one here",
        *[f"the side file 'log' changed, {side}"] * 3,
        f"the side file 'log' is gone, {side}",
        "the weights file 'model-00001-of-00002.safetensors' is new",
        "the shape of the tensor 'head' changed",
        "the dtype of the tensor 'head' changed",
        "the tensor 'head' is gone",
        "the header of 'model.safetensors' changed",
        None,
    ]
    assert [one.why for one in done] == whys
    assert [one.full for one in done] == [why is not None for why in whys]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"weight_v000002 is written whole, as others may be for the same reason: {whys[1]}"
    # Once a reason, and nothing of what was asked for.
    assert [text.split(": ", 1)[1] for text in told] == list(dict.fromkeys(filter(None, whys[1:])))


def test_it_goes_on_behind_the_newest_and_older_ones_may_go(repository: Repository, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [one.number for one in all_of(repository, out, "main~3")] == [1, 2]
    shutil.rmtree(out / "weight_v000001")
    before = files_below(out)
    assert [one.number for one in all_of(repository, out)] == [3, 4, 5]
    assert before.items() <= files_below(out).items()
    assert all_of(repository, out) == []
    done = all_of(repository, tmp_path / "short", last=2)
    assert [(one.number, one.full) for one in done] == [(4, True), (5, False)]


def test_versions_that_expired_are_passed_over(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    all_of(repository, tmp_path / "early", "main~4")
    gone = repository.resolve("main~2")
    repository.expire(weightvc.Policy({"*": weightvc.Rules(last=2)}), force=True)
    done = all_of(repository, tmp_path / "out")
    assert [(one.number, one.full) for one in done] == [(4, True), (5, False)]
    assert caplog.records == []
    done = all_of(repository, tmp_path / "early")
    assert [(one.number, one.why) for one in done] == [(4, "the version before it is not there any more"), (5, None)]
    assert "weight_v000004 is written whole" in caplog.records[0].getMessage()
    engine = Engine(tmp_path / "local")
    engine.pull(tmp_path / "out", 5)
    assert read(engine.local) == line[-1]
    with pytest.raises(Expired):
        all_of(repository, tmp_path / "other", gone.id)


def test_a_branch_that_went_elsewhere_is_refused_and_a_revert_is_followed(
    repository: Repository, line: list[Plain], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    all_of(repository, out)
    repository.revert("main~2")
    assert [one.number for one in all_of(repository, out)] == [6]
    engine = Engine(tmp_path / "local")
    engine.pull(out, 6)
    assert read(engine.local) == line[2]
    repository.reset("main", "main~3", rewind=True)
    before = files_below(out)
    with pytest.raises(Refused, match=r"weight_v000006 is version .* engines cannot be led back"):
        all_of(repository, out)
    repository.commit(checkpoint(tmp_path / "other", line[0], shards=2), step=99)
    with pytest.raises(Refused, match="weight_v000006"):
        list(Export(repository, out).follow(every=0.01))
    assert files_below(out) == before


@pytest.mark.parametrize("name", ["weight_v000001", "weight_v000009"])
def test_directories_of_somebody_else_are_refused(repository: Repository, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / INDEX).write_text(json.dumps({"metadata": {"delta_encoding": "xor"}}))
    with pytest.raises(Refused, match=f"{name} was not written by"):
        all_of(repository, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [name]


def test_what_the_layout_cannot_say_is_refused_before_anything_is_written(
    fresh: Callable[[str], Repository], line: list[Plain], tmp_path: Path
) -> None:
    nested = checkpoint(tmp_path / "nested" / "encoder", line[0]).parent
    checkpoint(tmp_path / "named", line[0])
    (tmp_path / "named" / "model.safetensors").rename(tmp_path / "named" / "policy.safetensors")
    loose = checkpoint(tmp_path / "loose", line[0], shards=2)
    (loose / INDEX).unlink()
    delta = checkpoint(tmp_path / "delta", line[0])
    (delta / INDEX).write_text(
        json.dumps({"metadata": {"delta_encoding": "xor"}, "weight_map": dict.fromkeys(line[0], "model.safetensors")})
    )
    for path, said in ((nested, "folder"), (tmp_path / "named", "policy"), (loose, "alone"), (delta, "delta")):
        repository = fresh(f"repository-{path.name}")
        repository.commit(path)
        with pytest.raises(Refused, match=said):
            all_of(repository, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_too_large_for_positions_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightvc.objects.slime.OVERWRITE_LIMIT", 100)
    with pytest.raises(Refused, match="over 4 GiB"):
        all_of(repository, tmp_path / "out", encoding="overwrite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"encoding": "zip"}, {"checksum": "md5"}, {"last": 0}, {"full_every": True}])
def test_wrong_options_are_refused(repository: Repository, tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(Refused):
        Export(repository, tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="local directory"):
        Export(repository, "s3://bucket/out")


def test_only_branches_are_followed(repository: Repository, tmp_path: Path) -> None:
    repository.tag("v1", "main")
    with pytest.raises(BadName):
        list(Export(repository, tmp_path / "out", "v1").follow(every=0.01))
    with pytest.raises(Refused):
        list(Export(repository, tmp_path / "out").follow(every=float("nan")))


def test_follows_until_it_is_told_to_end(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    stop, numbers = threading.Event(), []
    for done in Export(repository, tmp_path / "out").follow(every=0.01, stop=stop):
        numbers.append(done.number)
        if done.number == 5:
            repository.commit(checkpoint(tmp_path / "more", line[0], shards=2), step=50)
        if done.number == 6:
            stop.set()
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_from_tensors_in_memory(fresh: Callable[[str], Repository], tmp_path: Path) -> None:
    import numpy as np

    repository = fresh("memory")
    values = np.arange(100, dtype=np.float32)
    for i in range(2):
        repository.commit({"w": (values + np.float32(i)).astype(np.int32)}, step=i)
    assert [one.full for one in all_of(repository, tmp_path / "out")] == [True, False]
    engine = Engine(tmp_path / "local")
    engine.pull(tmp_path / "out", 2)
    assert read(engine.local) == {"w": ("I32", [100], (values + 1).astype(np.int32).tobytes())}


def test_a_full_disk_is_told_and_leaves_nothing_behind(repository: Repository, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    all_of(repository, wanted, "main~3")  # a whole one and a delta
    said: list[str] = []
    while not said or said[-1]:
        out = tmp_path / f"out{len(said)}"

        def work(out: Path = out, at: int = len(said)) -> str:
            die_at_file_operation(at, full_disk)
            try:
                all_of(weightvc.open(repository.url, cache=None), out, "main~3")
            except Unavailable as error:
                return str(error)
            return ""

        assert wait(fork(work, tmp_path / "result")) == 0
        said.append(json.loads((tmp_path / "result").read_text()))
        if out.exists():
            assert all(name.startswith("weight_v") for name in os.listdir(out))
        all_of(repository, out, "main~3")
        assert files_below(out) == files_below(wanted)
    assert len(said) > 15
    assert all("make space" in text for text in said[:-1])


def test_killed_at_any_file_operation_it_goes_on(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    all_of(repository, wanted, "main~3")  # a whole one and a delta
    url, cache = repository.url, tmp_path / "cache"
    status, killed = -9, 0
    while status == -9:
        out = tmp_path / f"out{killed}"

        def work(out: Path = out, at: int = killed) -> None:
            die_at_file_operation(at)
            all_of(weightvc.open(url, cache=cache), out, "main~3")

        status = wait(fork(work, tmp_path / "result"))
        for path in out.glob("weight_v*"):
            # Whatever stands there under its name is whole.
            assert files_below(path) == files_below(wanted / path.name)
        all_of(repository, out, "main~3")
        assert files_below(out) == files_below(wanted)
        killed += 1
    assert status == 0
    assert killed > 20

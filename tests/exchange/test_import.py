"""Imports: numbered checkpoints and slime's streams, into a branch, each once and in order."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import weightvc
from tests.exchange.conftest import stepped
from tests.kit.faults import die_at_file_operation, fork, wait
from tests.kit.slime import INDEX, Engine, Plain, checkpoint, publish, read, safetensors
from tests.kit.weights import files_below
from weightvc.errors import BadFile, BadName, BranchMoved, Refused
from weightvc.exporting import Export
from weightvc.importing import Import
from weightvc.objects.schema import CHUNK
from weightvc.repository import Repository


def steps(repository: Repository, directory: Path, **options: object) -> list[int]:
    """The steps that an import commits."""
    return [one.number for one in Import(repository, directory, **options).run()]  # type: ignore[arg-type]


def log(repository: Repository, branch: str = "main") -> list[int | None]:
    return [version.step for version in repository.log(branch)]


def out(repository: Repository, ref: str, where: Path) -> Path:
    repository.checkout(ref, where)
    return where


@pytest.fixture
def repository(fresh: Callable[[str], Repository]) -> Repository:
    return fresh("repository")


@pytest.fixture
def stream(tmp_path: Path, line: list[Plain]) -> Path:
    """Deltas 1 to 4 on line[0], as slime publishes them."""
    for number in range(1, 5):
        publish(
            tmp_path / "stream",
            number,
            line[number - 1],
            line[number],
            encoding=("xor", "overwrite")[number % 2],
            hashed=("xxh3-128", "blake3", "adler32")[number % 3],
            shards=1 + number % 2,
        )
    return tmp_path / "stream"


# Whole checkpoints


@pytest.mark.parametrize("name", ["step_{:06d}", "checkpoint-{}", "global_step{}", "weight_v{:06d}", "{}", "a7_{}"])
def test_folders_by_the_number_in_their_names(
    repository: Repository, line: list[Plain], tmp_path: Path, name: str
) -> None:
    # By number, not by name: 9 comes before 10.
    for number, weights in zip((9, 10, 200), line):
        checkpoint(tmp_path / "in" / name.format(number), weights, shards=2)
    for other in ("logs", ".step_7", "tmp-checkpoint-8", "latest"):
        (tmp_path / "in" / other).mkdir()
    (tmp_path / "in" / "notes-3").write_text("no checkpoint")
    assert steps(repository, tmp_path / "in") == [9, 10, 200]
    assert log(repository) == [200, 10, 9]
    assert repository.resolve("main").message == f"imported {name.format(200)}"
    got = files_below(out(repository, "main@{step=10}", tmp_path / "out"))
    assert got == files_below(tmp_path / "in" / name.format(10))
    assert steps(repository, tmp_path / "in") == []


def test_files_by_the_number_in_their_names(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in (120, 121):
        safetensors(tmp_path / "in" / f"step_{number}.safetensors", line[number - 120])
    assert steps(repository, tmp_path / "in", run="r7") == [120, 121]
    assert read(out(repository, "main", tmp_path / "out")) == line[1]
    assert repository.resolve("main").run == "r7"


def test_what_is_new_is_added_and_what_was_removed_does_not_matter(
    repository: Repository, line: list[Plain], tmp_path: Path
) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / "in" / f"step_{number}", line[number])
    assert steps(repository, tmp_path / "in") == [1, 2]
    shutil.rmtree(tmp_path / "in" / "step_1")
    checkpoint(tmp_path / "in" / "step_3", line[3])
    assert steps(repository, tmp_path / "in") == [3]


def test_a_changed_one_is_refused_by_name(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / "in" / f"step_{number}", line[number])
    steps(repository, tmp_path / "in")
    checkpoint(tmp_path / "in" / "step_1", line[4])
    checkpoint(tmp_path / "in" / "step_3", line[3])
    with pytest.raises(Refused, match=r"step_1 has other weights than version .* step 1 of the branch"):
        steps(repository, tmp_path / "in")
    assert log(repository) == [2, 1]
    # A resumed run: the branch goes back to where it was resumed from.
    shutil.rmtree(tmp_path / "in" / "step_1")
    checkpoint(tmp_path / "in" / "step_2", line[4])
    repository.reset("main", "main@{step=1}", rewind=True)
    assert steps(repository, tmp_path / "in") == [2, 3]


def test_one_that_comes_late_is_refused_by_name(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    checkpoint(tmp_path / "in" / "step_5", line[1])
    steps(repository, tmp_path / "in")
    checkpoint(tmp_path / "in" / "step_4", line[0])
    with pytest.raises(Refused, match="step_4 comes before step 5"):
        steps(repository, tmp_path / "in")
    assert steps(repository, tmp_path / "in", branch="other") == [4, 5]


def test_casts_and_leaves_out(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    checkpoint(tmp_path / "in" / "step_5", line[1])
    (tmp_path / "in" / "step_5" / "optimizer.pt").write_bytes(b"state")
    assert steps(repository, tmp_path / "in", dtype="bf16", exclude=["optimizer.*"]) == [5]
    assert set(repository.files("main")) == {"config.json", "model.safetensors"}
    with repository.source("main") as source:
        assert {tensor.dtype for tensor in source.tensors} == {"BF16", "F8_E4M3", "I64"}
    assert steps(repository, tmp_path / "in", dtype="bf16", exclude=["optimizer.*"]) == []


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        ([], BadFile, "has no checkpoint whose name ends in a number"),
        (["model-00001-of-00002.safetensors"], BadFile, "has no checkpoint"),
        (["step_1", "step_01"], BadName, "'step_01' and 'step_1' are both numbered"),
        (["step_1", "checkpoint-2"], BadName, "--only"),
        (["step_1", "step_1.safetensors"], BadName, "both numbered"),
        (["step_" + "9" * 19], BadName, "over 18 digits"),
    ],
)
def test_names_that_are_refused(
    repository: Repository, line: list[Plain], tmp_path: Path, names: list[str], error: type[Exception], said: str
) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        if name.endswith(".safetensors"):
            safetensors(tmp_path / "in" / name, line[0])
        else:
            checkpoint(tmp_path / "in" / name, line[0])
    with pytest.raises(error, match=said):
        steps(repository, tmp_path / "in")
    assert repository.branches() == {}
    if "checkpoint-2" in names:
        assert steps(repository, tmp_path / "in", only="step_*") == [1]


@pytest.mark.parametrize("missing", ["model-00002-of-00003.safetensors", INDEX])
def test_shards_that_are_not_all_there_are_refused(
    repository: Repository, line: list[Plain], tmp_path: Path, missing: str
) -> None:
    checkpoint(tmp_path / "in" / "step_1", line[0])
    checkpoint(tmp_path / "in" / "step_2", line[0], shards=3)
    (tmp_path / "in" / "step_2" / missing).unlink()
    with pytest.raises(BadFile, match="step_2"):
        steps(repository, tmp_path / "in")
    assert log(repository) == [1]


def test_a_url_is_refused(repository: Repository) -> None:
    with pytest.raises(Refused, match="local directory"):
        Import(repository, "s3://bucket/in")


def test_a_branch_that_another_writer_moved(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / "in" / f"step_{number}", line[number])
    importing = Import(repository, tmp_path / "in").run()
    next(importing)
    weightvc.open(repository.url, cache=None).commit(checkpoint(tmp_path / "own", line[0]), step=7)
    with pytest.raises((BranchMoved, Refused)):
        next(importing)


# Streams of deltas


def test_a_stream_on_the_model_that_engines_began_from(
    repository: Repository, line: list[Plain], stream: Path, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", line[0], shards=3)
    with pytest.raises(Refused, match=r"weight_v000001 is a delta on version 0.*--base"):
        steps(repository, stream)
    assert repository.branches() == {}
    assert steps(repository, stream, base=model) == [0, 1, 2, 3, 4]
    for number, weights in enumerate(line):
        assert read(out(repository, f"main@{{step={number}}}", tmp_path / f"out{number}")) == weights
    assert set(files_below(tmp_path / "out4")) == set(files_below(model))
    # The same command again, and on a stream that was pruned and has grown.
    assert steps(repository, stream, base=model) == []
    for number in (1, 2):
        shutil.rmtree(stream / f"weight_v{number:06d}")
    newer = stepped(line[4], 5)
    publish(stream, 5, line[4], newer)
    assert steps(repository, stream, base=model) == [5]
    assert read(out(repository, "main", tmp_path / "out5")) == newer


def test_a_wrong_base_commits_nothing(
    repository: Repository, line: list[Plain], stream: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path / "model", line[0])
    other = checkpoint(tmp_path / "other", line[4])
    alien = checkpoint(tmp_path / "alien", {"w": ("U8", [2], b"ab")})
    for wrong, said in ((other, "checksum"), (alien, "none of that name"), (tmp_path / "missing", "No such file")):
        for importing in (lambda base: steps(repository, stream, base=base),
                          lambda base: Follower(repository, stream, caplog, base=base).next()):  # fmt: skip
            with pytest.raises(Refused, match=said) as raised:
                importing(wrong)
            assert type(raised.value) is Refused
            assert f"{wrong} (--base)" in str(raised.value)
            assert repository.branches() == {}
    assert steps(repository, stream, base=model) == [0, 1, 2, 3, 4]


def test_a_base_that_is_not_what_the_branch_goes_on_from_is_refused(
    repository: Repository, line: list[Plain], stream: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path / "model", line[0])
    wrong = repository.commit(checkpoint(tmp_path / "other", line[4]), step=0)
    with pytest.raises(Refused, match=r"model \(--base\) has other weights than version .*, step 0") as raised:
        steps(repository, stream, base=model)
    assert wrong.short in str(raised.value)
    assert "weight_v000001" in str(raised.value)
    assert "(-b)" in str(raised.value)
    assert log(repository) == [0]
    assert steps(repository, stream, base=model, branch="right") == [0, 1, 2, 3, 4]
    # Where a number is missing, --base does not stand in for it.
    for number in (1, 2):
        shutil.rmtree(stream / f"weight_v{number:06d}")
    with pytest.raises(Refused, match=r"on version 2.*the branch goes on from its step 0.*--base"):
        steps(repository, stream, base=model)
    # What is not there any more cannot be compared, and is not needed.
    shutil.rmtree(model)
    assert steps(repository, stream, base=model, branch="right") == []
    assert f"{model} (--base) is not there" in caplog.records[-1].getMessage()


def test_a_base_does_not_stand_in_for_a_delta_that_is_not_whole(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second delta fits the base as well as the first."""
    where, new = tmp_path / "stream", {**line[0], "head": line[1]["head"]}
    publish(where, 1, line[0], line[0])
    publish(where, 2, line[0], new)
    index = (where / "weight_v000001" / INDEX).read_bytes()
    (where / "weight_v000001" / INDEX).write_bytes(index[:20])
    model = checkpoint(tmp_path / "model", line[0])
    follower = Follower(repository, where, caplog, base=model)
    assert "on version 1, which is not in yet" in follower.until_told("weight_v000002")
    assert repository.branches() == {}
    (where / "weight_v000001" / INDEX).write_bytes(index)
    follower = Follower(repository, where, caplog, base=model)
    assert [follower.next() for _ in range(3)] == [0, 1, 2]


def test_whole_versions_among_deltas(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    where = tmp_path / "stream"
    checkpoint(where / "weight_v000003", line[0], shards=2)
    publish(where, 4, line[0], line[1])
    checkpoint(where / "weight_v000007", line[2])
    publish(where, 8, line[2], line[2])
    assert steps(repository, where) == [3, 4, 7, 8]
    assert read(out(repository, "main@{step=4}", tmp_path / "out")) == line[1]
    assert read(out(repository, "main", tmp_path / "out8")) == line[2]


def test_a_gap_is_refused_by_name(repository: Repository, line: list[Plain], stream: Path, tmp_path: Path) -> None:
    shutil.rmtree(stream / "weight_v000003")
    with pytest.raises(Refused, match=r"weight_v000004 is a delta on version 3, which is neither"):
        steps(repository, stream, base=checkpoint(tmp_path / "model", line[0]))
    assert log(repository) == [2, 1, 0]


def test_a_delta_that_changed_is_refused_by_name(
    repository: Repository, line: list[Plain], stream: Path, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", line[0])
    steps(repository, stream, base=model)
    shutil.rmtree(stream / "weight_v000002")
    publish(stream, 2, line[1], line[4])
    with pytest.raises(Refused, match="weight_v000002 has other weights"):
        steps(repository, stream, base=model)
    with pytest.raises(Refused, match="weight_v000001 is a delta, which has the dtypes of its base"):
        steps(repository, stream, base=model, branch="other", dtype="bf16")


def test_what_was_exported_comes_back(
    repository: Repository, fresh: Callable[[str], Repository], line: list[Plain], tmp_path: Path
) -> None:
    for i, weights in enumerate(line):
        repository.commit(checkpoint(tmp_path / str(i), weights, shards=1 + (i > 2)), step=100 + i)
    list(Export(repository, tmp_path / "out").run())
    back = fresh("back")
    assert steps(back, tmp_path / "out") == [1, 2, 3, 4, 5]
    for theirs, ours in zip(repository.log(), back.log(), strict=True):
        assert (ours.tree, ours.layout) == (theirs.tree, theirs.layout)
    # And on, by an engine that was fed by either.
    list(Export(back, tmp_path / "again").run())
    engine = Engine(tmp_path / "local")
    engine.pull(tmp_path / "again", 5)
    assert files_below(engine.local) == files_below(tmp_path / "4")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_tensors_of_several_chunks(
    repository: Repository, fresh: Callable[[str], Repository], tmp_path: Path, encoding: str
) -> None:
    size = CHUNK + 10
    old = {"w": ("U8", [size], bytes(size)), "v": ("U8", [2], b"ab")}
    changed = bytearray(size)
    for at in (0, 7, CHUNK - 1, CHUNK, size - 1):
        changed[at] = at % 255 + 1
    new = {**old, "w": ("U8", [size], bytes(changed))}
    for i, weights in enumerate((old, new)):
        repository.commit(checkpoint(tmp_path / str(i), weights), step=i)
    list(Export(repository, tmp_path / "out", encoding=encoding).run())
    back = fresh("back")
    assert steps(back, tmp_path / "out") == [1, 2]
    assert back.resolve("main").tree == repository.resolve("main").tree
    engine = Engine(tmp_path / "local")
    engine.pull(tmp_path / "out", 2)
    assert read(engine.local) == new


def test_killed_at_any_file_operation_it_goes_on(
    fresh: Callable[[str], Repository], line: list[Plain], stream: Path, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", line[0])
    for number in (3, 4):
        shutil.rmtree(stream / f"weight_v{number:06d}")
    status, killed = -9, 0
    while status == -9:
        repository = fresh(f"killed{killed}")

        def work(url: str = repository.url, at: int = killed) -> None:
            die_at_file_operation(at)
            steps(weightvc.open(url, cache=None), stream, base=model)

        status = wait(fork(work, tmp_path / "result"))
        steps(weightvc.open(repository.url, cache=None), stream, base=model)
        assert log(repository) == [2, 1, 0]
        killed += 1
    assert status == 0
    assert killed > 20
    assert read(out(repository, "main", tmp_path / "out")) == line[2]


# Following


class Follower:
    """An import that follows, one commit at a time; what it logs is in `told`."""

    def __init__(self, repository: Repository, directory: Path, caplog: pytest.LogCaptureFixture, **options: object):
        self.stop = threading.Event()
        self._caplog = caplog
        caplog.set_level(logging.INFO, "weightvc")
        importing = Import(repository, directory, **options)  # type: ignore[arg-type]
        self._found: Iterator = importing.follow(every=0.01, stop=self.stop)

    def next(self) -> int:
        number = next(self._found).number
        assert isinstance(number, int)
        return number

    def until_told(self, text: str) -> str:
        """Go on until that is logged; nothing may be committed meanwhile."""
        found: list[str] = []
        stop = self.stop

        class Heard(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if text in record.getMessage():
                    found.append(record.getMessage())
                    stop.set()

        heard = Heard()
        logging.getLogger("weightvc").addHandler(heard)
        try:
            assert list(self._found) == []
        finally:
            logging.getLogger("weightvc").removeHandler(heard)
        return found[0]

    @property
    def told(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


def test_follows_in_order_over_rotation_and_restarts(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "in"
    for number in (10, 9):
        checkpoint(where / f"step_{number}", line[number % 5], shards=2)
    follower = Follower(repository, where, caplog)
    assert [follower.next(), follower.next()] == [9, 10]
    shutil.rmtree(where / "step_9")
    (where / "step_10" / "config.json").unlink()
    (where / "step_10" / "model-00001-of-00002.safetensors").unlink()
    checkpoint(where / "step_11", line[1], shards=2)
    assert follower.next() == 11
    shutil.rmtree(where / "step_10")
    again = Follower(weightvc.open(repository.url, cache=None), where, caplog)
    checkpoint(where / "step_12", line[2], shards=2)
    assert again.next() == 12
    assert follower.told == []
    assert log(repository) == [12, 11, 10, 9]


def test_waits_for_one_that_is_still_written(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "in"
    follower = Follower(repository, where, caplog)
    assert "no such directory" in follower.until_told("waiting for")
    whole = checkpoint(tmp_path / "whole", line[0], shards=2)
    half = where / "step_1"
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX):
        half.mkdir(parents=True, exist_ok=True)
        data = (whole / name).read_bytes()
        (half / name).write_bytes(data[: len(data) // 2])
        follower = Follower(repository, where, caplog)
        assert "step_1 is not whole" in follower.until_told("is not whole")
        (half / name).write_bytes(data)
        if name != INDEX:
            follower = Follower(repository, where, caplog)
            assert "step_1 is not whole" in follower.until_told("is not whole")
    assert Follower(repository, where, caplog).next() == 1
    assert read(out(repository, "main", tmp_path / "out")) == line[0]


def test_one_that_never_becomes_whole_is_told_once_and_passed_over(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "in"
    checkpoint(where / "step_1", line[0], shards=2)
    (where / "step_1" / INDEX).unlink()
    for number in (2, 3):
        checkpoint(where / f"step_{number}", line[number])
    follower = Follower(repository, where, caplog)
    assert [follower.next(), follower.next()] == [2, 3]
    for number in (4, 5):  # some looks later
        checkpoint(where / f"step_{number}", line[0])
        assert follower.next() == number
    assert len(follower.told) == 1
    assert f"step_1 is not whole: {where / 'step_1'}: has the shards" in follower.told[0]
    checkpoint(where / "step_1", line[0], shards=2)
    assert "step 5 is in already" in follower.until_told("step_1 is passed over")
    assert log(repository) == [5, 4, 3, 2]


def test_while_one_changes_later_ones_wait(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "in"
    checkpoint(where / "step_1", line[1])
    checkpoint(where / "step_2", line[2])
    importing = Import(repository, where)
    look, growing = importing._look, iter(range(8))

    def looked(one: object) -> object:
        # The trainer writes on between any two looks.
        if one.path.name == "step_1" and next(growing, None) is not None:  # type: ignore[attr-defined]
            with (where / "step_1" / "log.txt").open("a") as file:
                file.write("more\n")
        return look(one)  # type: ignore[arg-type]

    importing._look = looked  # type: ignore[method-assign, assignment]
    following = importing.follow(every=0.01)
    assert [next(following).number, next(following).number] == [1, 2]
    assert next(growing, None) is None
    assert (out(repository, "main~1", tmp_path / "out") / "log.txt").read_text() == "more\n" * 8


def test_one_that_is_removed_before_it_was_committed_is_told(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "in" / "step_1", line[1], shards=2)
    (tmp_path / "in" / "step_1" / INDEX).unlink()
    checkpoint(tmp_path / "in" / "step_2", line[2])
    follower = Follower(repository, tmp_path / "in", caplog)
    assert follower.next() == 2
    for number in (1, 2):
        shutil.rmtree(tmp_path / "in" / f"step_{number}")
    assert follower.until_told("was removed") == "step_1 was removed before it was committed"


def test_one_that_was_changed_afterwards_ends_it(
    repository: Repository, line: list[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "in" / "step_1", line[1])
    follower = Follower(repository, tmp_path / "in", caplog)
    assert follower.next() == 1
    checkpoint(tmp_path / "in" / "step_1", line[2])
    with pytest.raises(Refused, match="step_1 has other weights"):
        follower.next()


def test_follows_a_stream_of_deltas(
    repository: Repository, line: list[Plain], stream: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = (stream / "weight_v000003" / INDEX).read_bytes()
    (stream / "weight_v000003" / INDEX).unlink()  # slime writes it last
    model = checkpoint(tmp_path / "model", line[0])
    follower = Follower(repository, stream, caplog, base=model)
    assert [follower.next() for _ in range(3)] == [0, 1, 2]
    assert "weight_v000004 is a delta on version 3, which is not in yet" in follower.until_told("weight_v000004")
    (stream / "weight_v000003" / INDEX).write_bytes(index)
    follower = Follower(repository, stream, caplog, base=model)
    assert [follower.next(), follower.next()] == [3, 4]
    publish(stream, 7, line[0], line[1])
    with pytest.raises(Refused, match="weight_v000007 is a delta on version 6"):
        follower.next()


def test_a_number_of_seconds_that_is_none(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        next(Import(repository, tmp_path).follow(every=0))


def test_json_of_an_index_is_left_alone(repository: Repository, line: list[Plain], tmp_path: Path) -> None:
    """An index with other metadata is that of a whole checkpoint, and comes back byte for byte."""
    path = checkpoint(tmp_path / "in" / "weight_v000001", line[0], shards=2)
    index = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps({**index, "metadata": {"version": "000001"}}, indent=3))
    assert steps(repository, tmp_path / "in") == [1]
    assert files_below(out(repository, "main", tmp_path / "out")) == files_below(path)
    assert os.listdir(tmp_path / "in") == ["weight_v000001"]

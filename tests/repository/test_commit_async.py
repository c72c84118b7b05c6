"""Commits behind the trainer: a copy of one moment, in order, and no loss without a word."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import torch

import weightvc
from tests.kit import faults
from tests.kit.weights import Bits, flipped, held, tensor, write_shards
from weightvc.errors import (
    BadFile,
    BadName,
    BadTensor,
    BranchMoved,
    NotPublished,
    QueueFull,
    Refused,
    StateUnknown,
    Unavailable,
)
from weightvc.protocol import swap
from weightvc.repository import Repository


class Gate:
    """What a repository writes waits, or fails, while the gate is shut."""

    def __init__(self, repository: Repository) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self._put = repository.store.put
        repository.store.put = self.put  # type: ignore[method-assign]

    def put(self, key: str, data: bytes) -> str:
        self.reached.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self._put(key, data)

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()


@pytest.fixture
def gate(repository: Repository) -> Gate:
    return Gate(repository)


def step(repository: Repository, number: int, **more: Any) -> Any:
    """Commit a tensor that holds the step's number, and change it at once."""
    weights = torch.full((40,), float(number))
    future = repository.commit_async({"w": weights}, step=number, **more)
    weights.fill_(-1)
    return future


def values(repository: Repository, ref: str = "HEAD") -> set[float]:
    return set(repository.load(ref)["w"].tolist())


def steps(repository: Repository) -> list[int | None]:
    return [version.step for version in repository.log()][::-1]


def test_the_version_holds_what_the_tensors_held_at_the_call(repository, gate):
    gate.shut()
    w = torch.arange(100, dtype=torch.float32)
    future = repository.commit_async({"w": w}, step=1)
    assert not future.done()
    w.add_(1)
    gate.open.set()
    version = future.result(60)
    assert (version.step, repository.resolve().id) == (1, version.id)
    assert repository.load()["w"].tolist() == list(range(100))


def awkward() -> dict[str, Any]:
    """Tensors that do not lie as they are kept, and others, small and large."""
    torch.manual_seed(0)
    nan = torch.tensor([0x7FC00001, 0x7F800001, 0xFFC12345 - 2**32, 0x7F800000, 1], dtype=torch.int32)
    big = torch.randn(300, 301)
    return {
        "big": big,
        "cut": big[:1],
        "conj": torch.randn(70, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "expanded": torch.randn(1, 3).expand(40_000, 3),
        "half": torch.randn(40_001).half(),
        "nan": torch.cat([nan.view(torch.float32).repeat(10_000), big[0]]),
        "neg": torch._neg_view(torch.randn(40_000)),
        "numpy": np.arange(60_000, dtype=">i4")[::2],
        "numpy small": np.arange(5.0),
        "odd": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(1.5),
        "tied": big,
        "transposed": big.t(),
        "zz": torch.nn.Parameter(torch.randn(100_000)),
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16, "float32"])
def test_it_is_the_tree_that_commit_makes(repository, dtype):
    source = awkward()
    expected = repository.commit(source, dtype=dtype, branch="other").tree
    future = repository.commit_async(source, dtype=dtype)
    with torch.no_grad():
        for value in source.values():
            if isinstance(value, torch.Tensor) and not value._is_view():
                value.zero_()
    source["numpy small"][:] = 0
    assert future.result(60).tree == expected
    # The same room again.
    expected = repository.commit(source, dtype=dtype, branch="other").tree
    assert repository.commit_async(source, dtype=dtype).result(60).tree == expected


def test_modules_components_and_sources_are_copied(repository, gate):
    gate.shut()
    model = torch.nn.Linear(3, 2)
    bits = Bits({("", "w"): tensor("F8_E5M2", (70_000,), 1)})
    futures = [
        repository.commit_async(model, step=1, queue=9),
        repository.commit_async({"draft": {"w": torch.ones(3)}, "": {"b": torch.zeros(2)}}, step=2, queue=9),
        repository.commit_async(bits, step=3, queue=9),
    ]
    expected = model.weight.tolist()
    torch.nn.init.zeros_(model.weight)
    bits._items[0] = tensor("F8_E5M2", (70_000,), 2)
    gate.open.set()
    ids = [future.result(60).id for future in futures]
    assert repository.load(ids[0])["weight"].tolist() == expected
    assert repository.load(ids[1], component="draft")["w"].tolist() == [1, 1, 1]
    assert held(repository, ids[2]) == {("", "w"): tensor("F8_E5M2", (70_000,), 1)}


def test_files_are_committed_as_they_are_or_refused(repository, gate, tmp_path):
    weights = {("", "w"): tensor("BF16", (300,), 0)}
    write_shards(tmp_path, weights, 1)
    expected = repository.commit(tmp_path, branch="other")
    assert repository.commit_async(tmp_path).result(60).layout == expected.layout
    gate.shut()
    repository.commit_async({"w": torch.zeros(4)}, branch="other")
    assert gate.reached.wait(60)
    future = repository.commit_async(tmp_path, step=2)  # waits for the one before, and has read no weights yet
    write_shards(tmp_path, {("", "w"): flipped(weights["", "w"], 0.1, 1)}, 1)
    gate.open.set()
    with pytest.raises(BadFile, match="changed"):
        future.result(60)
    with pytest.raises(NotPublished, match="step 2 was not published"):
        repository.flush()


def test_an_error_reaches_the_next_call_and_the_next_commit_has_both_changes(repository, gate):
    first = repository.commit({"w": torch.zeros(4)}, step=0)
    gate.error = Unavailable("no network")
    w = torch.tensor([1.0, 0, 0, 0])
    failed = repository.commit_async({"w": w}, step=1)
    assert isinstance(failed.exception(60), Unavailable)
    gate.error = None
    w[1] = 2
    with pytest.raises(NotPublished, match="step 1 was not published: no network") as caught:
        repository.commit_async({"w": w}, step=2)
    assert (caught.value.failures[0][0], caught.value.exit_code) == ("step 1", Unavailable.exit_code)
    assert caught.value.__cause__ is failed.exception()
    version = repository.commit_async({"w": w}, step=2).result(60)
    assert version.parents == (first.id,)
    assert repository.load()["w"].tolist() == [1, 2, 0, 0]
    assert repository.entry(version).place.edges[0].changed == 2
    assert steps(repository) == [0, 2]
    repository.flush()


@pytest.mark.parametrize("call", ["commit", "flush", "close", "revert"])
def test_every_call_that_commits_or_waits_tells_of_errors(repository, gate, call):
    repository.commit({"w": torch.zeros(4)}, step=0)
    gate.error = Unavailable("no network")
    step(repository, 1).exception(60)
    gate.error = None
    calls = {
        "commit": lambda: repository.commit({"w": torch.ones(4)}),
        "flush": repository.flush,
        "close": repository.close,
        "revert": lambda: repository.revert("main"),
    }
    with pytest.raises(NotPublished, match="step 1"):
        calls[call]()
    calls[call]()


def test_all_that_failed_are_named_once(repository, gate):
    gate.shut()
    for number in range(3):
        step(repository, number, queue=3)
    gate.error = Unavailable("no network")
    gate.open.set()
    with pytest.raises(NotPublished, match=r"step 0 was.*; step 1 was.*; step 2 was") as caught:
        repository.flush()
    assert [label for label, _ in caught.value.failures] == ["step 0", "step 1", "step 2"]
    repository.flush()


def test_a_failure_that_comes_while_others_are_told_is_told_too(repository, gate):
    told: list[str] = []

    def tell(call: Any) -> None:
        try:
            call()
        except NotPublished as error:
            told.extend(label for label, _ in error.failures)

    class Failures(list[Any]):
        def append(self, failure: Any) -> None:
            if self:
                teller.start()
                teller.join(0.3)
            super().append(failure)

    teller = threading.Thread(target=tell, args=(lambda: step(repository, 2),))
    gate.shut()
    gate.error = Unavailable("no network")
    step(repository, 0)
    second = step(repository, 1)
    repository._behind[0]._failures = Failures()
    gate.open.set()
    second.exception(60)
    teller.join(60)
    tell(repository.flush)
    assert told == ["step 0", "step 1"]


def test_somebody_else_moved_the_branch(repository, memory_url):
    step(repository, 0).result(60)
    weightvc.open(memory_url, cache=None).commit({"w": torch.ones(2)}, step=7)
    with pytest.raises(BranchMoved):
        step(repository, 1).result(60)
    with pytest.raises(NotPublished):
        repository.flush()
    step(repository, 2, on_conflict="rebase").result(60)
    assert steps(repository) == [0, 7, 2]


def test_one_that_landed_though_its_reply_was_lost_is_gone_on_from(repository, monkeypatch):
    step(repository, 0).result(60)
    real = swap._swap

    def unknown(*arguments: Any) -> Any:
        real(*arguments)
        raise StateUnknown("whether it landed is unknown")

    monkeypatch.setattr(swap, "_swap", unknown)
    assert isinstance(step(repository, 1).exception(60), StateUnknown)
    monkeypatch.setattr(swap, "_swap", real)
    with pytest.raises(NotPublished, match="step 1"):
        repository.flush()
    step(repository, 2).result(60)
    assert steps(repository) == [0, 1, 2]


def test_one_whose_reply_was_lost_and_that_lands_later(repository, monkeypatch):
    """The head is not ours when the next commit begins, and is when it is to be published."""
    step(repository, 0).result(60)
    real, late = swap._swap, []

    def unknown(*arguments: Any) -> Any:
        late.append(arguments)
        raise StateUnknown("whether it landed is unknown")

    def after(*arguments: Any) -> Any:
        if late:
            real(*late.pop())
        return real(*arguments)

    monkeypatch.setattr(swap, "_swap", unknown)
    assert isinstance(step(repository, 1).exception(60), StateUnknown)
    monkeypatch.setattr(swap, "_swap", after)
    with pytest.raises(NotPublished):
        repository.flush()
    step(repository, 2).result(60)
    assert steps(repository) == [0, 1, 2]
    assert values(repository, "main~1") == {1.0}


def test_wait_waits_for_room(repository, gate):
    gate.shut()
    step(repository, 0)
    assert gate.reached.wait(60)
    step(repository, 1)
    done = threading.Event()

    def third() -> None:
        step(repository, 2)
        done.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not done.wait(0.2)
    gate.open.set()
    thread.join(60)
    assert done.is_set()
    repository.flush()
    assert steps(repository) == [0, 1, 2]
    assert [values(repository, f"main~{n}") for n in range(3)] == [{2.0}, {1.0}, {0.0}]


def test_who_waits_for_room_is_told_what_failed_meanwhile(repository, gate):
    gate.shut()
    gate.error = Unavailable("no network")
    step(repository, 0)
    step(repository, 1)
    threading.Timer(0.1, gate.open.set).start()
    with pytest.raises(NotPublished, match="step 0"):
        step(repository, 2)
    with contextlib.suppress(NotPublished):  # step 1 may have failed by then, or not
        repository.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_the_trainers_threads_come_first(repository):
    from weightvc.publisher import NICE

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []
    put = repository.store.put
    repository.store.put = lambda *arguments: (seen.append(niceness()), put(*arguments))[1]
    step(repository, 0).result(60)
    assert {*seen} == {min(19, niceness() + NICE)}


def test_skip_publishes_the_newest(repository, gate, caplog):
    caplog.set_level(logging.INFO, "weightvc")
    gate.shut()
    futures = [step(repository, 0)]
    assert gate.reached.wait(60)
    futures += [step(repository, number, when_full="skip") for number in (1, 2, 3)]
    gate.open.set()
    repository.flush()
    assert [future.cancelled() for future in futures] == [False, True, True, False]
    assert steps(repository) == [0, 3]
    assert values(repository) == {3.0}
    assert "step 1 is skipped, since step 2 is here" in caplog.text


def test_raise_takes_nothing(repository, gate):
    gate.shut()
    step(repository, 0)
    assert gate.reached.wait(60)
    step(repository, 1, when_full="raise")
    with pytest.raises(QueueFull, match="step 2 is not published"):
        step(repository, 2, when_full="raise")
    step(repository, 3, when_full="raise", queue=2)
    gate.open.set()
    repository.flush()
    assert steps(repository) == [0, 1, 3]


def test_a_future_can_be_cancelled(repository, gate):
    gate.shut()
    step(repository, 0)
    assert gate.reached.wait(60)
    assert step(repository, 1).cancel()
    gate.open.set()
    repository.flush()
    step(repository, 2).result(60)
    assert steps(repository) == [0, 2]


def test_a_commit_that_is_waited_for_comes_after_those_that_are_not(repository, gate):
    gate.shut()
    step(repository, 0)
    step(repository, 1)
    threading.Timer(0.1, gate.open.set).start()
    repository.commit({"w": torch.zeros(3)}, step=2)
    assert steps(repository) == [0, 1, 2]


def test_what_a_future_calls_may_commit_and_never_waits_for_itself(repository, gate):
    said: list[Any] = []

    def more(done: Any) -> None:
        try:
            said.append(repository.commit({"w": torch.ones(40)}, step=10).step)
            repository.tag("t", done.result())
            step(repository, 11)
        except Exception as error:
            said.append(type(error))

    gate.shut()
    step(repository, 0).add_done_callback(more)
    assert gate.reached.wait(60)
    step(repository, 1)
    gate.open.set()
    repository.flush()
    assert said == [10, QueueFull]
    assert steps(repository) == [0, 10, 1]
    assert repository.resolve("t").step == 0


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"step": -1}, Refused, "step=-1"),
        ({"step": 1.5}, Refused, "step=1.5"),
        ({"metadata": {"a": {1}}}, Refused, "metadata"),
        ({"metadata": [1]}, Refused, r"metadata=\[1\]"),
        ({"metadata": [1], "transform": weightvc.Transform("t", "1", dict)}, Refused, r"metadata=\[1\]"),
        ({"message": "x" * 5000}, Refused, "shorten"),
        ({"branch": "a//b"}, BadName, "a//b"),
        ({"codec": "best"}, Refused, "codec"),
        ({"on_conflict": "merge"}, Refused, "on_conflict"),
        ({"dtype": "int8"}, Refused, "int8"),
        ({"queue": 0}, Refused, "queue=0"),
        ({"when_full": "drop"}, Refused, "when_full"),
        ({"source": {"w": torch.ones(2, device="meta")}}, BadTensor, "meta"),
        ({"source": {"w": 3}}, BadTensor, "int"),
        ({"source": 3}, Refused, "int"),
    ],
)
def test_what_cannot_be_committed_is_refused_at_once(repository, more, error, says):
    with pytest.raises(error, match=says):
        repository.commit_async(**{"source": {"w": torch.ones(2)}, **more})
    repository.flush()
    assert repository.branches() == {}


def test_labels_are_copied_too(repository, gate):
    gate.shut()
    metadata = {"lr": [1.0]}
    future = repository.commit_async({"w": torch.ones(2)}, step=np.int64(3), run="r", metadata=metadata, message="m")
    metadata["lr"].append(2.0)
    gate.open.set()
    version = future.result(60)
    assert (version.step, version.run, version.message, version.metadata) == (3, "r", "m", {"lr": [1.0]})


def test_a_block_that_ends_in_an_error_publishes_and_raises_that_error(repository, gate, caplog):
    def fail() -> None:
        with repository:
            step(repository, 0).result(60)
            gate.error = Unavailable("no network")
            step(repository, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "step 1 was not published: no network" in caplog.text


HEAD = """
import sys, threading, time, torch, weightvc
repository = weightvc.open(sys.argv[1], cache=None)
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


EXITS = {
    "by an exception": "raise SystemExit(3)",
    "forgotten": "del repository",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_process_that_ends_publishes_first(tmp_path, how):
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None)
    done = run(
        f"""
        for step in range(3):
            repository.commit_async({{"w": torch.full((1000,), step)}}, step=step, queue=3)
        {EXITS[how]}
        """,
        url,
    )
    assert (done.returncode, done.stderr) == (3 if "exception" in how else 0, "")
    assert steps(weightvc.open(url, cache=None)) == [0, 1, 2]


def test_a_process_that_ends_says_what_was_not_published(tmp_path):
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None)
    done = run(
        """
        def fail(*_):
            raise weightvc.Unavailable("no network")
        repository.store.put = fail
        for step in range(2):
            repository.commit_async({"w": torch.full((1000,), step)}, step=step, queue=3).exception()
            if step == 0:
                try:
                    repository.flush()
                except weightvc.NotPublished:
                    pass
        """,
        url,
    )
    assert done.stderr == "step 1 was not published: no network\n"


ENDED = """
def work():
    while threading.main_thread().is_alive():
        time.sleep(0.05)
    try:
        repository.commit_async({"w": torch.zeros(10_000_000)}, step=1)
    except weightvc.Refused as error:
        print(error)
threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("before", ["", 'repository.commit_async({"w": torch.ones(3)}, step=0).result(60)'])
def test_once_the_main_thread_has_ended_it_is_refused(tmp_path, before):
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None)
    done = run(f"{before}\n{ENDED}", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 1 is not published" in done.stdout
    assert "join()" in done.stdout
    repository = weightvc.open(url, cache=None)
    assert (steps(repository) if repository.branches() else []) == ([0] if before else [])


def test_what_had_begun_when_the_main_thread_ended_is_published(tmp_path):
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None)
    done = run(
        """
        begun = threading.Event()
        def serve(tensors):
            begun.set()
            time.sleep(1)  # the main thread ends
            return tensors
        def work():
            transform = weightvc.Transform("late", "1", serve)
            repository.commit_async({"w": torch.zeros(10_000_000)}, step=1, transform=transform)
        threading.Thread(target=work).start()
        begun.wait()
        """,
        url,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert steps(weightvc.open(url, cache=None)) == [1]


def test_what_a_future_calls_may_commit_when_the_main_thread_has_ended(tmp_path):
    url = str(tmp_path / "repository")
    weightvc.init(url, cache=None)
    done = run(
        """
        put = repository.store.put
        repository.store.put = lambda *arguments: (time.sleep(0.5), put(*arguments))[1]
        future = repository.commit_async({"w": torch.zeros(10_000_000)}, step=1)
        future.add_done_callback(lambda _: repository.commit_async({"w": torch.ones(3)}, branch="next"))
        """,
        url,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {*weightvc.open(url, cache=None).branches()} == {"main", "next"}


def test_a_failure_is_told_though_the_repository_is_forgotten(tmp_path, caplog, monkeypatch):
    from weightvc import publisher

    monkeypatch.setattr(publisher, "_ended", False)
    repository = weightvc.init(tmp_path / "repository", cache=None)
    Gate(repository).error = Unavailable("no network")
    step(repository, 5).exception(60)
    del repository
    gc.collect()
    publisher._at_exit()
    assert "step 5 was not published" in caplog.text
    assert not publisher._untold


def test_a_forked_child_publishes_nothing_of_its_parent(tmp_path):
    repository = weightvc.init(tmp_path / "repository", cache=None)
    gate = Gate(repository)
    gate.shut()
    step(repository, 0)
    assert gate.reached.wait(60)
    step(repository, 1)

    def work() -> list[str]:
        repository.flush()  # nothing of it is here
        own = weightvc.open(repository.url, cache=None)
        own.commit_async({"w": torch.ones(3)}, branch="child").result(60)
        return sorted(own.branches())

    assert faults.wait(faults.fork(work, tmp_path / "result")) == 0
    assert (tmp_path / "result").read_text() == '["child"]'
    gate.open.set()
    repository.flush()
    assert steps(repository) == [0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_tensors_of_a_gpu_are_copied_in_the_current_stream(repository, gate, dtype):
    gate.shut()
    weights = {f"w{i}": torch.randn(1 << 20, device="cuda") for i in range(20)}
    weights["t"] = torch.randn(100, 200, device="cuda").t()
    expected = {name: value.cpu() for name, value in weights.items()}
    future = repository.commit_async(weights, dtype=dtype)
    for value in weights.values():
        value.add_(1)
    gate.open.set()
    assert future.result(60).tree == repository.commit(expected, branch="other", dtype=dtype).tree

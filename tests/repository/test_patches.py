"""Patches between any two versions, forth and back: exact, as small as a commit's, in bounded memory."""

import secrets
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightvc
from tests.kit.weights import Bits, Weights, changed, tensor, tiny_format, trees
from weightvc.errors import Corrupt
from weightvc.objects import dtypes, frame, key, manifest
from weightvc.objects.catalogue import Entry
from weightvc.objects.manifest import CONTEXT, REF, SAME, Patch, Stream
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.protocol import coder, patches
from weightvc.protocol.commit import Packer
from weightvc.protocol.patches import Span
from weightvc.protocol.payloads import BasePayloads, PatchPayloads
from weightvc.protocol.refs import Refs
from weightvc.protocol.spool import Spool
from weightvc.protocol.state import Chain, Level, Models, chunk_map
from weightvc.repository import Repository
from weightvc_kernels import SPARSE


class Bench:
    """Makes patches between versions of a repository, and reads them back."""

    def __init__(self, repository: Repository) -> None:
        self.shelf = repository._shelf
        self.refs = Refs(self.shelf, repository.refresh())

    @contextmanager
    def span(self, old: Entry, new: Entry, back: bool = False) -> Iterator[Span]:
        with patches.opened(self.shelf, self.refs, old, new) as span:
            yield span.turned() if back else span

    def packer(self, pool: ThreadPoolExecutor) -> Packer:
        return Packer(self.shelf, key.Transaction(1), pool)

    def make(self, span: Span) -> Patch:
        with ThreadPoolExecutor(2) as pool:
            return patches.patch(span, self.packer(pool), "a" * 64)

    def check(self, span: Span, entry: Entry) -> Patch:
        """Make it, store it in a manifest of `entry`, read that, and read every block through it."""
        made, schema = self.make(span), span.new.tree.schema
        stored = self.shelf.manifest(entry.place.manifest)
        stored = manifest.Manifest(
            *(stored.version, None, stored.schema, schema.digest, None, {}, span.new.tree.digests, None, made)
        )
        read = manifest.decode(manifest.encode(stored), "it").patch
        assert (read.moved, read.changed, read.tables) == (made.moved, made.changed, made.tables)
        manifest.check_blocks(read.stream, schema, "it")
        spool, models = Spool(None), Models(read.tables, "it")
        payloads = PatchPayloads(self.shelf, read.stream, spool, whole=True)
        mapping = chunk_map(schema, span.old.tree.schema, read.moved)
        exact(Chain(span.old, [Level(schema, read.stream, payloads, "it", "", mapping, models)]), span, read.stream)
        assert made.changed == lanes_that_differ(span, made.moved)
        return made

    def check_base(self, side: patches.Side) -> Stream:
        with ThreadPoolExecutor(2) as pool:
            stream = patches.base(side, self.packer(pool))
            schema = side.tree.schema
            manifest.check_blocks(stream, schema, "it")
            payloads = BasePayloads(self.shelf, stream, side.tree.digests, pool, Spool(None), whole=True)
            level = Level(schema, stream, payloads, "it")
            exact(Chain(None, [level]), Span(side, side), stream)
        return stream


def exact(chain: Chain, span: Span, stream: Stream) -> None:
    """Each block is read right, and takes no more bytes than it has."""
    schema = span.new.tree.schema
    for number, (low, high) in enumerate(pairwise(stream.first)):
        data = chain.read(low, high)
        assert bytes(data) == bytes(span.new.read(low, high))
        assert stream.lengths[number] <= (4 if stream.codecs[number] == REF else len(data))
    assert stream.first[-1] == schema.chunks


def lanes_that_differ(span: Span, moved: dict[int, int]) -> int:
    """Lanes that are not as in their source chunk, as a manifest counts them."""
    old, new = span.old.tree.schema, span.new.tree.schema
    sources = chunk_map(new, old, moved) or range(new.chunks)
    total = 0
    for chunk in range(new.chunks):
        lane = dtypes.lane(new.tensors[new.tensor_of(chunk)].dtype)
        now = np.frombuffer(span.new.read(chunk, chunk + 1), f"u{lane}")
        if sources[chunk] < 0:
            total += now.size
        else:
            was = np.frombuffer(span.old.read(sources[chunk], sources[chunk] + 1), f"u{lane}")
            total += int((was != now).sum())
    return total


def history(steps: Sequence[Weights]) -> tuple[Repository, list[Entry]]:
    repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
    for weights in steps:
        repository.commit(Bits(weights))
    return repository, [repository.entry(f"HEAD~{k}") for k in reversed(range(len(steps)))]


@st.composite
def walks(draw: st.DrawFn) -> list[Weights]:
    out = [draw(trees())]
    for _ in range(draw(st.integers(1, 4))):
        out.append(
            out[draw(st.integers(0, len(out) - 1))] if draw(st.integers(0, 4)) == 0 else draw(changed(out[-1]))
        )
    return out


@pytest.mark.timeout(900)
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(walks())
def test_any_two_versions_whatever_changed_between(walk: list[Weights]) -> None:
    with tiny_format():
        repository, entries = history(walk)
        bench = Bench(repository)
        with bench.span(entries[0], entries[-1]) as span:
            bench.check(span, entries[-1])
            bench.check(span.turned(), entries[0])
            bench.check_base(span.new)
            if walk[0] == walk[-1]:
                assert bench.make(span).stream.nbytes == 0


def test_versions_that_no_patches_join() -> None:
    one, two = ({("", "w"): tensor("BF16", (500,), seed), ("", "x"): tensor("F32", (9,), 0)} for seed in (1, 2))
    with tiny_format():
        repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
        repository.commit(Bits(one), branch="a")
        repository.commit(Bits(two), branch="b")
        bench, entries = Bench(repository), [repository.entry(name) for name in "ab"]
        for back in (False, True):
            with bench.span(*entries, back) as span:
                assert SAME in bench.check(span, entries[not back]).stream.codecs


def weights(count: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return values.view(np.uint32)


def test_as_small_as_a_commit_forth_and_back() -> None:
    """bf16 weights under small steps: over the span a patch as large as a commit's, and much less than its steps'."""
    rng = np.random.default_rng(1)
    names = [f"layer.{i:02}" for i in range(30)]
    exact_weights = {name: weights(40_000, i).view(np.float32) for i, name in enumerate(names)}
    steps = []
    for _ in range(6):
        steps.append({n: (w.view(np.uint32) >> 16).astype("<u2") for n, w in exact_weights.items()})
        for w in exact_weights.values():
            w += rng.normal(0, 1e-6, w.size).astype(np.float32)
    repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
    direct = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
    for step in steps:
        repository.commit(step_of(step))
    direct.commit(step_of(steps[0]))
    direct.commit(step_of(steps[-1]))
    entries = [repository.entry(f"HEAD~{k}") for k in reversed(range(6))]
    (least,) = [edge.nbytes for edge in direct.entry().place.edges]
    sum_of_steps = sum(entry.place.edges[0].nbytes for entry in entries[1:])
    bench = Bench(repository)
    for back in (False, True):
        with bench.span(entries[0], entries[-1], back) as span:
            made = bench.check(span, entries[0 if back else -1])
        assert set(made.stream.codecs) == {CONTEXT}
        assert made.stream.nbytes < 1.03 * least
        assert made.stream.nbytes < 0.8 * sum_of_steps


def step_of(arrays: dict[str, np.ndarray]) -> Bits:
    from tests.kit.weights import Tensor

    return Bits({("", name): Tensor("BF16", array.shape, array.tobytes()) for name, array in arrays.items()})


def test_renames_are_followed_over_steps_that_change_them() -> None:
    one, two = tensor("BF16", (4000,), 1), tensor("BF16", (4000,), 2)
    near = np.frombuffer(one.data, "<u2").copy()
    near[::100] += 1
    moved = type(one)("BF16", (4000,), near.tobytes())
    steps = [
        {("", "a"): one, ("", "b"): two},
        {("", "b"): two, ("", "z"): one},
        {("", "b"): two, ("", "z"): moved},
        {("", "b"): two, ("", "y"): moved, ("x", "new"): tensor("U8", (10,), 3)},
    ]
    repository, entries = history(steps)
    bench = Bench(repository)
    with bench.span(entries[0], entries[3]) as span:
        there, back = bench.check(span, entries[3]), bench.check(span.turned(), entries[0])
    assert there.moved == {1: 0}  # y is a
    assert back.moved == {0: 1}
    for made, whole in ((there, 10), (back, 0)):
        assert made.changed == 40 + whole
        assert made.stream.nbytes < 200
    with bench.span(entries[3], entries[0]) as span:
        # No patches lead from the older to the newer: names alone.
        assert bench.check(span, entries[0]).moved == {}


def schema(*names: str) -> Schema:
    return Schema([TensorInfo("", name, "U8", (4,), 4) for name in sorted(names)])


def test_moves_add_up() -> None:
    a, b, c = schema("p", "q", "r"), schema("q", "s", "t"), schema("p", "s", "u")
    # s was p and t was r; then p was s, s was made anew, u was q.
    forth = patches.along(a, [(b, {1: 0, 2: 2}), (c, {0: 1, 1: -1, 2: 0})])
    assert forth == {2: 1}  # p is p again, by its name; s has no tensor of its name in a
    assert patches.turned(forth, a, c) == {1: 2}
    # Two that change places.
    swapped = patches.along(a, [(a, {0: 1, 1: 0})])
    assert swapped == {0: 1, 1: 0}
    assert patches.turned(swapped, a, a) == {0: 1, 1: 0}
    assert patches.along(a, [(a, swapped), (a, swapped)]) == {}
    # Two that came from one: back it goes to that of its name, else to the first.
    assert patches.turned({0: 0}, schema("q"), schema("p", "q", "r")) == {}
    assert patches.turned({0: 0, 1: 0}, schema("a"), schema("p", "q")) == {0: 0}


def test_weights_that_are_tied_are_stored_once() -> None:
    one, two = tensor("BF16", (20_000,), 1), tensor("BF16", (20_000,), 2)
    repository, entries = history(
        [{("", "a"): one, ("", "b"): two}, {("", "a"): two, ("", "b"): two, ("", "c"): two}]
    )
    bench = Bench(repository)
    with bench.span(*entries) as span:
        assert bench.check(span, entries[1]).stream.codecs[1:] == [SAME, REF]
        assert bench.check_base(span.new).codecs[1:] == [REF, REF]


class Made:
    """A tree of bf16 that is made whenever it is read."""

    def __init__(self, chunks: int, step: int) -> None:
        self._step = step
        info = TensorInfo("", "w", "BF16", (chunks * CHUNK // 2,), chunks * CHUNK)
        digests = b"".join(frame.digest(self.read(i, i + 1)) for i in range(chunks))
        self.tree = Tree(Schema([info]), digests)

    def read(self, low: int, high: int) -> bytes:
        assert high == low + 1
        values = np.full(CHUNK // 2, 0x3F80 + low, "<u2")
        values[low :: 4001 + self._step] += self._step
        return values.tobytes()


class Sink:
    """A stream of which only the index is kept."""

    def __init__(self) -> None:
        self.stream = Stream()

    def add(self, count: int, codec: int, payload: bytes, check: int = 0) -> None:
        self.stream.counts.append(count)
        self.stream.codecs.append(codec)
        self.stream.lengths.append(len(payload))

    def finish(self) -> Stream:
        return self.stream.seal()


def peak(chunks: int) -> int:
    span = Span(Made(chunks, 0), Made(chunks, 1))
    tracemalloc.start()
    try:
        made = patches.patch(span, Sink(), "a" * 64)
        assert len(made.stream.counts) == chunks
        assert made.changed > 500 * chunks
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_tree() -> None:
    peak(2)  # what is made once
    assert peak(48) < peak(12) + 4 * CHUNK


class Sparse:
    """A tree of 2^33 elements, zeros but for some; only what is asked for is made."""

    def __init__(self, dtype: str, values: dict[int, int]) -> None:
        self._lane = dtypes.lane(dtype)
        self._values = values
        size = (1 << 33) * self._lane
        zeros = frame.digest(bytes(CHUNK))
        digests = [zeros] * (size // CHUNK)
        self.tree = Tree(Schema([TensorInfo("", "w", dtype, (1 << 33,), size)]), bytes(32 * len(digests)))
        for chunk in {at * self._lane // CHUNK for at in values}:
            digests[chunk] = frame.digest(self.read(chunk, chunk + 1))
        self.tree.digests = b"".join(digests)

    def read(self, low: int, high: int) -> bytes:
        first, last = low * CHUNK // self._lane, high * CHUNK // self._lane
        data = np.zeros(last - first, f"u{self._lane}")
        for at, value in self._values.items():
            if first <= at < last:
                data[at - first] = value
        return data.tobytes()


@pytest.mark.parametrize("codec", [SPARSE, CONTEXT])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F64"])
def test_positions_in_a_tensor_of_two_to_the_33_elements(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, dtype: str, codec: int
) -> None:
    monkeypatch.setattr(coder, "FEW", 0)
    monkeypatch.setattr(coder, "CONTEXT_FROM", 0 if codec == CONTEXT else 1 << 60)
    places = [0, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**33 - 1]
    span = Span(Sparse(dtype, {}), Sparse(dtype, {at: i + 1 for i, at in enumerate(places)}))
    entry = repository.commit(Bits({("", "w"): tensor("U8", (1,), 0)})) and repository.entry()
    made = Bench(repository).make(span)
    assert made.changed == len(places)
    stored = Bench(repository).shelf.manifest(entry.place.manifest)
    stored = manifest.Manifest(
        *(stored.version, None, stored.schema, stored.schema_digest, None, {}, span.new.tree.digests, None, made)
    )
    read = manifest.decode(manifest.encode(stored), "it").patch
    stream, schema = read.stream, span.new.tree.schema
    touched = sorted({at * dtypes.lane(dtype) // CHUNK for at in places})
    assert {i: c for i, c in enumerate(stream.codecs) if c != SAME} == dict.fromkeys(touched, codec)
    payloads = PatchPayloads(Bench(repository).shelf, stream, Spool(None), whole=True)
    chain = Chain(span.old, [Level(schema, stream, payloads, "it", "", None, Models(read.tables, "it"))])
    for chunk in {*touched, *(chunk + 1 for chunk in touched[:-1])}:
        assert bytes(chain.read(chunk, chunk + 1)) == span.new.read(chunk, chunk + 1)


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_side_that_cannot_be_read_is_an_error(side: str) -> None:
    span = Span(Made(6, 0), Made(6, 1))
    broken: Any = getattr(span, side)
    read = broken.read

    def fails(low: int, high: int) -> bytes:
        if low == 4:
            raise Corrupt("chunk 4 is gone")
        return read(low, high)

    broken.read = fails
    with pytest.raises(Corrupt, match="chunk 4 is gone"):
        patches.patch(span, Sink(), "a" * 64)

"""Repositories that earlier versions wrote: every later version has to read them, for ever.

tests/golden/make.py wrote them, and what is expected of them.
"""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import weightvc
import weightvc_kernels as kernels
from tests.kit.weights import Bits, Weights, files_below, flipped, held
from weightvc.objects import dtypes, frame, layout, manifest, schema, tree, version
from weightvc.objects.catalogue import COMMIT, Entry
from weightvc.objects.manifest import Manifest, Stream
from weightvc.objects.tensor import TensorInfo
from weightvc.protocol import swap
from weightvc.protocol.refs import tag_page
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository
from weightvc.sources.base import Layout, LayoutFile
from weightvc.stores import open_store
from weightvc_kernels import streams

REPOSITORIES = Path(__file__).parents[1] / "golden" / "repositories"
NAMES = sorted(path.name for path in REPOSITORIES.iterdir())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Repository, dict[str, Any]]:
    """A copy of a golden repository, and what is expected of it."""
    shutil.copytree(REPOSITORIES / request.param, tmp_path / "repository")
    expected = json.loads((tmp_path / "repository" / "expected.json").read_text())
    return weightvc.open(tmp_path / "repository", cache=None), expected


def plain_tree(weights: Weights) -> str:
    """The tree digest, as docs/format.md says it."""

    def digest(*parts: bytes) -> bytes:
        return blake3(b"".join(parts)).digest()

    def text(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()

    components: dict[str, list[Any]] = {}
    tensors = []
    for (component, name), tensor in sorted(weights.items()):
        components.setdefault(component, []).append([name, tensor.dtype, list(tensor.shape)])
        chunks = [digest(tensor.data[at : at + 4194304]) for at in range(0, len(tensor.data), 4194304)]
        tensors.append(digest(text(["tensor 1", tensor.dtype, list(tensor.shape)]), b"\n", *chunks))
    schema = digest(text({"components": components, "weightvc": "schema 1"})).hex()
    return digest(text(["tree 1", schema]), b"\n", *tensors).hex()


def test_reads_as_expected(golden: tuple[Repository, dict[str, Any]], tmp_path: Path) -> None:
    repository, expected = golden
    assert repository.default_branch == expected["default"]
    assert repository.branches() == expected["branches"]
    assert repository.tags() == expected["tags"]
    for wanted in expected["versions"]:
        version = repository.resolve(wanted["id"])
        for field in ("id", "tree", "layout", "generation", "step", "run", "message"):
            assert getattr(version, field) == wanted[field]
        assert list(version.parents) == wanted["parents"]
        assert json.dumps(version.metadata, sort_keys=True) == json.dumps(wanted["metadata"], sort_keys=True)
        weights = held(repository, version.id)
        assert [
            {"component": c, "name": n, "dtype": t.dtype, "shape": list(t.shape), "sha256": sha256(t.data)}
            for (c, n), t in weights.items()
        ] == wanted["tensors"]
        assert plain_tree(weights) == version.tree


def test_checks_out_as_expected(golden: tuple[Repository, dict[str, Any]], tmp_path: Path) -> None:
    """Every version's files, each checked out over those of the one before."""
    repository, expected = golden
    for wanted in expected["versions"]:
        repository.checkout(wanted["id"], tmp_path / "out")
        found = {path: sha256(data) for path, data in files_below(tmp_path / "out").items()}
        assert found == wanted["files"]


def test_reading_writes_nothing(golden: tuple[Repository, dict[str, Any]], tmp_path: Path) -> None:
    repository, expected = golden

    def state() -> list[tuple[str, int, bytes]]:
        below = sorted((tmp_path / "repository").rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in below]

    before = state()
    for wanted in expected["versions"][-3:]:
        list(repository.log(wanted["id"]))
        repository.checkout(wanted["id"], tmp_path / "out")
        repository.tags()
    assert state() == before
    assert (repository.stats.writes, repository.stats.deletes) == (0, 0)


def test_commits_on_top(golden: tuple[Repository, dict[str, Any]]) -> None:
    """An old repository is not only read: what is committed to it builds on what is there."""
    repository, expected = golden
    if not expected["branches"]:
        return
    weights = held(repository)
    changed = {k: flipped(t, 0.1, 1) for k, t in weights.items()}
    made = repository.commit(Bits(changed))
    assert made.parents == (expected["branches"][expected["default"]],)
    assert held(repository) == changed
    assert held(repository, "HEAD~1") == weights


# What the golden repositories claim to cover


def catalogued(name: str) -> tuple[Shelf, list[Entry]]:
    shelf = Shelf(open_store(REPOSITORIES / name), None)
    return shelf, list(shelf.catalogue(swap.must_read(shelf.store).root))


def commits(name: str) -> list[tuple[Shelf, Manifest]]:
    shelf, entries = catalogued(name)
    return [(shelf, shelf.manifest(e.place.manifest)) for e in entries if e.op == COMMIT and e.place is not None]


def payloads(shelf: Shelf, stream: Stream) -> list[tuple[int, bytes]]:
    """Codec and bytes of every block."""
    whole = b"".join(bytes(shelf.get(key))[frame.HEADER_SIZE :] for key, _ in stream.packs) or bytes(stream.inline)
    return [
        (codec, whole[start : start + length])
        for codec, start, length in zip(stream.codecs, stream.offsets, stream.lengths)
    ]


def test_covers_every_codec_and_mode() -> None:
    seen: Counter[tuple[str, int, int | None]] = Counter()
    for name in NAMES:
        for shelf, made in commits(name):
            for kind, stream in (("base", made.base), ("patch", made.patch and made.patch.stream)):
                for codec, payload in payloads(shelf, stream) if stream else []:
                    mode = payload[0] if codec in (kernels.SPARSE, kernels.DENSE) else None
                    seen[kind, codec, mode] += 1
    bases = [(kernels.RAW, None), (kernels.PLANES, None), (manifest.REF, None)]
    modes = [(codec, mode) for codec in (kernels.SPARSE, kernels.DENSE) for mode in (0, 1)]
    wanted = {("base", *one) for one in bases} | {
        ("patch", *one)
        for one in [*bases, *modes, (manifest.SAME, None), (manifest.CONTEXT, None), (manifest.RICE, None)]
    }
    assert set(seen) == wanted


def test_covers_every_form_of_number_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int]] = set()
    section, numbers, rest = streams.Reader.section, streams.Reader.numbers, streams.Reader._rest

    def spied_section(reader: streams.Reader, size: int, what: str) -> Any:
        seen.add(("zstd", reader._data[reader._at] & 1))
        return section(reader, size, what)

    def spied_numbers(reader: streams.Reader, count: int, lane: int, what: str) -> Any:
        seen.add(("low bits", min(reader._data[reader._at], 1)))
        seen.add(("lane", lane))
        return numbers(reader, count, lane, what)

    def spied_rest(reader: streams.Reader, count: int, lane: int, limit: int, what: str) -> Any:
        seen.add(("planes above", min(reader._data[reader._at], 2)))
        return rest(reader, count, lane, limit, what)

    monkeypatch.setattr(streams.Reader, "section", spied_section)
    monkeypatch.setattr(streams.Reader, "numbers", spied_numbers)
    monkeypatch.setattr(streams.Reader, "_rest", spied_rest)
    for name in ("codecs", "dtypes"):
        with weightvc.open(REPOSITORIES / name, cache=None) as repository:
            for wanted in json.loads((REPOSITORIES / name / "expected.json").read_text())["versions"]:
                held(repository, wanted["id"])
    forms = {"zstd": (0, 1), "low bits": (0, 1), "planes above": (1, 2), "lane": (1, 2, 4, 8)}
    assert {(form, kind) for form, kinds in forms.items() for kind in kinds} <= seen


def test_covers_packs_and_manifests() -> None:
    made = [m for _, m in commits("packs")]
    counts = {(len(m.base.packs) if m.base else 0, len(m.patch.stream.packs) if m.patch else 0) for m in made}
    assert any(base > 1 and patch > 1 for base, patch in counts)
    assert any(base > 1 and patch == 0 for base, patch in counts)
    assert (0, 0) in counts
    # Blocks of no bytes at the very end, and where a pack begins.
    sealed = [m.patch.stream for m in made if m.patch and m.patch.stream.packs]
    assert any(s.lengths[-1] == 0 for s in sealed)
    assert any(s.lengths[i] == 0 and s.offsets[i] in s.starts for s in sealed for i in range(len(s.lengths) - 1))


def test_covers_moved_tensors_and_chunks_of_many_sizes() -> None:
    made = [m for _, m in commits("trees")]
    assert sum(1 for m in made if m.patch and m.patch.moved) == 2
    schemas = [shelf.schema(m.schema, m.schema_digest) for name in NAMES for shelf, m in commits(name)]
    assert {t.dtype for s in schemas for t in s.tensors} == set(dtypes.BITS)
    assert any(t.shape == () for s in schemas for t in s.tensors)
    assert any(0 in t.shape for s in schemas for t in s.tensors)
    assert any(t.nbytes > 2 * manifest.BLOCK for s in schemas for t in s.tensors)
    assert any(t.component for s in schemas for t in s.tensors)
    assert any(not s.tensors for s in schemas)


def test_checks_are_of_the_lanes_that_change() -> None:
    """No reader of today looks at the checks, so nothing else would notice wrong ones."""
    checked: Counter[int] = Counter()
    for name in ("codecs", "fast"):
        checked += checks_of(name)
    assert min(checked[codec] for codec in (kernels.SPARSE, kernels.DENSE, kernels.RICE)) > 3


def checks_of(name: str) -> Counter[int]:
    """How many checks of each codec there are in a repository; all are right."""
    checked: Counter[int] = Counter()
    with weightvc.open(REPOSITORIES / name, cache=None) as repository:
        for shelf, made in commits(name):
            if made.patch is None:
                continue
            info = shelf.schema(made.schema, made.schema_digest)
            stream = made.patch.stream
            with repository.source(made.patch.source, whole=True) as source:
                for i, (codec, payload) in enumerate(payloads(shelf, stream)):
                    if codec not in (kernels.SPARSE, kernels.DENSE, kernels.RICE):
                        assert stream.checks[i] == 0
                        continue
                    old = bytes(source.verified.read(stream.first[i], stream.first[i + 1]))
                    lane = dtypes.lane(info.tensors[info.tensor_of(stream.first[i])].dtype)
                    at, _ = kernels.positions_values(codec, payload, old, lane)
                    lanes = np.frombuffer(old, f"<u{lane}")[at].tobytes()
                    assert stream.checks[i] == int.from_bytes(blake3(lanes).digest()[:4], "little")
                    checked[codec] += 1
    return checked


def test_covers_layouts() -> None:
    made = [m for _, m in commits("files")]
    assert all(m.layout for m in made)
    assert len({m.layout for m in made}) < len(made)
    assert any(m.files for m in made)
    assert any(m.layout is None for _, m in commits("dtypes"))


def test_covers_history() -> None:
    shelf, entries = catalogued("history")
    assert set(tag_page(shelf, swap.must_read(shelf.store).root)[1]) == {"gone"}
    assert {e.op for e in entries} == {"commit", "branch", "delete", "reset", "tag", "untag", "default"}
    versions = [e.version for e in entries if e.version is not None]
    assert {len(v.parents) for v in versions} == {0, 1, 3}
    assert any(e.op == COMMIT and e.name is None for e in entries)
    assert len(swap.must_read(open_store(REPOSITORIES / "long")).root.segments) == 3


def test_covers_compaction() -> None:
    shelf, entries = catalogued("compacted")
    root = swap.must_read(shelf.store).root
    gained = {e.new for e in entries if e.place is not None and e.place.ways}
    assert gained & {e.new for e in root.tail}
    assert gained & {e.new for ref in root.segments for e in shelf.segment(ref)}
    ways = [(e, way) for e in entries if e.place is not None for way in e.place.ways]
    for entry, way in ways:
        made = shelf.manifest(way.manifest)
        assert made.version.id == entry.new
    moved = [shelf.manifest(way.manifest).patch for _, way in ways if way.edges[0].source is not None]
    assert any(patch is not None and patch.moved for patch in moved)  # over a rename


def test_small_enough_to_carry() -> None:
    assert sum(p.stat().st_size for p in REPOSITORIES.rglob("*") if p.is_file()) < 700_000


def test_examples_in_the_description_of_the_format() -> None:
    """What docs/format.md shows in hexadecimal is what the code computes."""
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    w, b = bytes.fromhex("0000803fc07f0080"), b"\7"
    parts = schema.Schema([TensorInfo("", "w", "BF16", (2, 2), 8), TensorInfo("draft", "b", "U8", (), 1)])
    made = tree.Tree(parts, frame.digest(w) + frame.digest(b))
    empty = tree.Tree(schema.Schema([TensorInfo("", "e", "F32", (0, 3), 0)]), b"")
    config = layout.make(Layout((LayoutFile("config.json", 3, b"{}\n"),)))
    record = version.make(
        tree=made.digest, layout=None, parents=[], step=0, run=None, message="hello", author="me",
        metadata={"lr": 1e-6}, elements=5, nbytes=9, now=1767225600000000,
    )  # fmt: skip
    old = bytes.fromhex("0000803fc07f008080bf803f")
    new = bytes.fromhex("0000813fc07f00007fbf803f")
    codec, dense, was = kernels.encode_patch(old, new, 2)
    assert codec == kernels.DENSE
    sparse = bytes.fromhex("000300060101000006020202")
    wanted = [
        *(digest.hex() for digest in (frame.digest(w), frame.digest(b), *made.tensors, *empty.tensors)),
        *(parts.canonical.decode(), parts.digest, made.digest),
        *(config.record, config.digest, record.record, record.id),
        *(frame.header("M").hex(), frame.header("R").hex()),
        *(dense.hex(), was.tobytes().hex(), frame.digest(was.tobytes())[:4].hex(), old.hex(), new.hex()),
        streams.put_numbers(np.array([1, 2, 3, 300, 0, 5, 7, 1000], "<u2")).hex(),
        streams.put_numbers(np.array([100, 200, 130, 90, 255, 120, 160, 40000], "<u2")).hex(),
    ]
    assert [one for one in wanted if one not in text] == []
    planes = bytes.fromhex("0c0000800101000c007fff007f7f")
    assert kernels.decode_whole(kernels.PLANES, planes, len(old), 2).tobytes() == old
    assert kernels.decode_patch(kernels.SPARSE, sparse, old, 2).tobytes() == new
    assert planes.hex() in text
    assert sparse.hex() in text

"""What docs/format.md says is enough to read the golden repositories, and what weightvc writes today."""

import json
import shutil
import tempfile
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightvc
from tests import plain_reader
from tests.kernels import plain_codec, plain_rice
from tests.kit.weights import Bits, Tensor, changed, tiny_format, trees
from tests.plain_reader import DENSE, PLANES, RAW, SPARSE, Repository, digest, parse

GOLDEN = Path(__file__).parent / "golden"
PATHS = {path.parent.name: path.parent for path in sorted(GOLDEN.rglob("expected.json"))}
each = pytest.mark.parametrize("name", PATHS)
SAID = ("time", "author", "message")
"""What the entry of an expired version says of it, in words of its record."""


def expected_of(name: str) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((PATHS[name] / "expected.json").read_text())
    return expected


def ways(repository: Repository, id: str) -> list[dict[str, Any]]:
    """What an entry says of each of its manifests."""
    entry = repository.commits[id]
    return [entry, *entry.get("ways", [])]


def read_by(repository: Repository, id: str, way: dict[str, Any]) -> list[plain_reader.Tree]:
    """The tree by the base and by the patch of a manifest; both are as the entry says."""
    trees, edges = zip(*repository.ways(id, way["manifest"]))
    # A patch is of no use if the version that it is against has expired.
    assert sorted(edges, key=str) == sorted(
        (edge for edge in way["edges"] if edge[0] is None or edge[0] in repository.commits), key=str
    )
    return list(trees)


def head_of(repository: Repository, manifest: str) -> dict[str, Any]:
    return repository.get(manifest, "M", "manifest 1")[0]


def hashes(tree: plain_reader.Tree) -> list[dict[str, Any]]:
    """What expected.json says of tensors."""
    return [tensor._asdict() | {"sha256": sha256(b"".join(chunks)).hexdigest()} for tensor, chunks in tree]


def test_there_are_golden_repositories() -> None:
    assert {"codecs", "context", "fast", "history", "compacted", "retention"} < PATHS.keys()


@each
def test_names_are_as_expected(name: str) -> None:
    repository, expected = Repository(PATHS[name]), expected_of(name)
    assert repository.root["branches"] == expected["branches"]
    assert repository.root["default"] == expected["default"]
    assert repository.tags == expected["tags"]
    catalogued = [digest(entry["record"]) for entry in repository.catalogue if "record" in entry]
    assert catalogued == [version["id"] for version in expected["versions"]]


@each
def test_every_version_is_read_by_every_way(name: str) -> None:
    repository = Repository(PATHS[name])
    for version in expected_of(name)["versions"]:
        id = version["id"]
        if id not in repository.commits:
            continue  # it has expired, as is seen to below
        for way in ways(repository, id):
            assert all(hashes(tree) == version["tensors"] for tree in read_by(repository, id, way))
        files = {path: sha256(content).hexdigest() for path, content in repository.files(id).items()}
        assert files == version["files"]


@each
def test_entries_and_records_are_as_described(name: str) -> None:
    repository = Repository(PATHS[name])
    expected = {version["id"]: version for version in expected_of(name)["versions"]}
    for id, entry in repository.commits.items():
        record, version = json.loads(entry["record"]), expected[id]
        for field in ("tree", "parents", "generation", "layout", "message", "metadata"):
            assert record[field] == version[field]
        assert record["labels"] == {field: version[field] for field in ("step", "run") if version[field] is not None}
        assert record["nbytes"] == sum(len(chunk) for _, chunks in repository.tree(id) for chunk in chunks)
        parents = [expected[parent]["generation"] for parent in record["parents"]]
        assert record["generation"] == max(parents, default=-1) + 1
        for way in ways(repository, id):
            head = head_of(repository, way["manifest"])
            assert head["record"] == entry["record"]
            assert [head["schema"][1], head["layout"]] == [entry["schema"], entry["layout"]]
            assert sorted(head["files"].values()) == sorted(entry["files"])
            packs = [pack for kind in ("base", "patch") if kind in head for pack in head[kind]["packs"]]
            assert way["packs"] == len(packs)
            assert all(len(repository.object(key)) == 8 + nbytes for key, nbytes in packs)


@each
def test_a_reflog_leads_to_where_its_branch_is(name: str) -> None:
    repository = Repository(PATHS[name])
    for branch, head in repository.root["branches"].items():
        moves = [
            (entry["old"], digest(entry["record"]) if "record" in entry else entry["new"])
            for entry in repository.catalogue
            if entry["name"] == branch
            and entry["op"] in ("commit", "expired", "branch", "delete", "reset", "restore")
        ]
        assert moves[-1][1] == head
        assert all(old == new for (_, new), (old, _) in pairwise([(None, None), *moves]))


def test_ways_that_compaction_added_lead_forward_and_back_and_to_bases() -> None:
    repository = Repository(PATHS["compacted"])
    seq = {id: entry["seq"] for id, entry in repository.commits.items()}
    added = [(id, way) for id in seq for way in ways(repository, id)[1:]]
    edges = Counter(
        "base" if source is None else "back" if seq[source] > seq[id] else "forward"
        for id, way in added
        for source, *_ in way["edges"]
    )
    assert set(edges) == {"base", "back", "forward"}
    for _, way in added:
        head = head_of(repository, way["manifest"])
        packs = sum(8 + nbytes for kind in ("base", "patch") if kind in head for _, nbytes in head[kind]["packs"])
        assert way["bytes"] == len(repository.object(way["manifest"])) + packs
    assert set(repository.root["compaction"]) == {"share", "base_every", "reverse"}


def test_what_retention_and_collection_wrote_is_as_described() -> None:
    path, expected = PATHS["retention"], expected_of("retention")
    repository = Repository(path)
    versions = {version["id"] for version in expected["versions"]}
    assert {id for id, entry in repository.commits.items() if "expired" not in entry} == set(expected["kept"])
    gone = {digest(entry["record"]): entry for entry in repository.catalogue if entry["op"] == "expired"}
    assert gone.keys() == versions - repository.commits.keys()
    for id, entry in gone.items():
        assert set(entry) <= {"op", "seq", "name", "old", "record", "expired", "released", "new", *SAID}
        record = json.loads(entry["record"])
        assert [entry["new"], *(entry[field] for field in SAID)] == [id, *(record[field] for field in SAID)]
    rules = {"*": {"last": 1, "meta": {"keep": True}}, "exp": {"within": 86400}}
    assert repository.root["retention"] == {"branches": rules, "unreachable": None}
    page, _ = repository.get(repository.root["collector"], "P", "collector 1")
    assert page["noted"] == [[4, 1_767_225_600_000_000], [9, 1_767_225_601_000_000]]
    assert page["since"] == 1_767_225_602_000_000
    (dead,) = page["dead"]
    assert repository.object(dead).startswith(b"WVC\1K\0\0\0")
    assert repository.root["horizon"] == 4
    (copy,) = path.glob("root.d/*")
    assert copy.read_bytes() == (path / "root").read_bytes()
    assert copy.name == f"{repository.root['sequence']:019}-{repository.root['ring'][-1]}"


def test_pins_are_as_described() -> None:
    path = PATHS["retention"]
    repository = Repository(path)
    pins = [parse(one.read_bytes(), "P", "pin 1")[0] for one in path.glob("pin/*")]
    writer, reader = sorted(pins, key=lambda pin: pin["begin"] is None)
    assert writer == {"begin": 7, "names": [], "versions": [], "lifetime": writer["lifetime"], "weightvc": "pin 1"}
    head = repository.root["branches"]["main"]
    assert (reader["begin"], reader["versions"]) == (None, [head])
    assert set(reader["names"]) >= {repository.commits[head]["manifest"], repository.commits[head]["schema"]}
    assert all(1 <= pin["lifetime"] <= 604_800 for pin in pins)


@pytest.mark.filterwarnings("ignore:.*elements changed")
@pytest.mark.timeout(600)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_committed_is_read_by_every_way(data: st.DataObject) -> None:
    """Chunks, blocks and packs of a few bytes, patches forth and back, and every dtype."""
    codecs: st.SearchStrategy[Literal["auto", "fast", "small"]] = st.sampled_from(["auto", "fast", "small"])
    with tempfile.TemporaryDirectory() as path, tiny_format(), mock.patch.object(plain_reader, "CHUNK", 64):
        written = [data.draw(trees())]
        with weightvc.init(path, cache=None) as repository:
            ids = [repository.commit(Bits(written[0])).id]
            for _ in range(data.draw(st.integers(1, 3))):
                written.append(data.draw(changed(written[-1])))
                ids.append(repository.commit(Bits(written[-1]), codec=data.draw(codecs)).id)
            if data.draw(st.booleans()):
                repository.compact(base_every=4, share=10_000, reverse=True)
        plain = Repository(Path(path))
        for id, weights in zip(ids, written):
            for way in ways(plain, id):
                for tree in read_by(plain, id, way):
                    assert weights == {
                        (tensor.component, tensor.name): Tensor(tensor.dtype, (*tensor.shape,), b"".join(chunks))
                        for tensor, chunks in tree
                    }


# The reader itself


KINDS = [
    *[("history", kind) for kind in ("root", "page", "manifest", "schema")],
    *[("long", "segment"), ("packs", "pack"), ("files", "layout"), ("files", "file")],
]


def all_of(repository: Repository, id: str) -> tuple[list[plain_reader.Tree], dict[str, bytes]]:
    read = [tree for way in ways(repository, id) for tree, _ in repository.ways(id, way["manifest"])]
    return read, repository.files(id)


def everything(path: Path) -> None:
    repository = Repository(path)
    for id in repository.commits:
        all_of(repository, id)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_flipped_bit_in_any_object_is_found(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(PATHS[name], path)
    objects = path.glob("root" if kind == "root" else f"{kind}/*")
    # The newest of a kind is still referred to: a page or a segment may replace older ones.
    damaged = max(objects, key=lambda object: int(f"0{object.suffix}".partition(".")[2].partition("-")[0] or 0))
    data = damaged.read_bytes()
    for at in (0, 8, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(AssertionError, match=None if kind == "root" else damaged.name):
            everything(path)


def test_the_manifest_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the digest of its record; with the right record, by that of the tree, which is all that is left."""
    repository, get = Repository(PATHS["long"]), Repository.get
    id, other = list(repository.commits)[:2]
    manifest, record = repository.commits[other]["manifest"], repository.commits[id]["record"]
    assert list(repository.ways(other, manifest))
    with pytest.raises(AssertionError):
        list(repository.ways(id, manifest))

    def forged(self: Repository, key: str, letter: str, what: str | None = None) -> Any:
        head, sections = get(self, key, letter, what)
        return head | ({"record": record} if key == manifest else {}), sections

    monkeypatch.setattr(Repository, "get", forged)
    with pytest.raises(AssertionError):
        list(repository.ways(id, manifest))


@pytest.mark.parametrize("name", ["dtypes", "files", "packs", "trees"])
def test_damage_behind_the_keys_never_gives_other_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the digests in the keys, as for ranges of packs, those of chunks, records and contents remain."""
    id = list(Repository(PATHS[name]).commits)[1]
    read, refused = all_of(Repository(PATHS[name]), id), 0
    for path in PATHS[name].glob("*/*"):
        damaged, data = path.relative_to(PATHS[name]).as_posix(), path.read_bytes()
        for at in range(3, len(data), max(1, len(data) // 8)):
            other = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]

            def unchecked(self: Repository, key: str, damaged: str = damaged, other: bytes = other) -> bytes:
                return other if key == damaged else (self.path / key).read_bytes()

            monkeypatch.setattr(Repository, "object", unchecked)
            try:
                found = all_of(Repository(PATHS[name]), id)
            except Exception:  # of any kind: no bytes are given
                refused += 1
            else:
                assert found == read
    assert refused


# The examples in the documents


DOCS = Path(__file__).parents[1] / "docs"
OLD, NEW = "0000803fc07f008080bf803f", "0000813fc07f00007fbf803f"


def shown(text: str, page: str = "format.md") -> str:
    """`text`, which a document has to show."""
    assert text in (DOCS / page).read_text()
    return text


def test_examples_of_digests() -> None:
    chunks = [blake3(bytes.fromhex(data)).digest() for data in (shown("0000803fc07f0080"), shown("07"))]
    schema = shown('{"components":{"":[["w","BF16",[2,2]]],"draft":[["b","U8",[]]]},"weightvc":"schema 1"}')
    made = [*(chunk.hex() for chunk in chunks), digest(schema), plain_reader.tree_digest(schema, chunks)]
    lines = [line.strip() for line in (DOCS / "format.md").read_text().splitlines()]
    (record,) = (line.removeprefix("record   ") for line in lines if line.startswith("record   {"))
    assert json.loads(record)["tree"] == made[-1]
    (layout,) = (line for line in lines if line.startswith('{"files":[['))
    for one in (*made, digest(record), digest(layout)):
        shown(one)


@pytest.mark.parametrize(
    ("numbers", "stream"),
    [
        ("1 2 3 300 0 5 7 1000", "0010010203ff000507ff02042de9040002"),
        ("100 200 130 90 255 120 160 40000", "0408101c113a10060c08050f070aff0202c50208"),
    ],
)
def test_examples_of_numbers(numbers: str, stream: str) -> None:
    payload = plain_codec.Reader(bytes.fromhex(shown(stream)))
    assert payload.numbers(8) == [int(number) for number in shown(numbers).split()]
    assert not payload.rest


def test_examples_of_codecs() -> None:
    def decoded(codec: int, payload: str) -> str:
        return plain_codec.decode(codec, bytes.fromhex(shown(payload)), bytes.fromhex(shown(OLD)), 2).hex()

    assert decoded(RAW, OLD) == OLD
    assert decoded(PLANES, "0c0000800101000c007fff007f7f") == OLD
    assert decoded(DENSE, "00000c000200020200") == shown(NEW)
    assert decoded(SPARSE, "000300060101000006020202") == NEW
    old, new = shown("803f" * 10, "patch.md"), shown("803f813f7f3f803f803f803f803f803f803f4840", "patch.md")
    payload = bytes.fromhex(shown("0307010000e190048043", "patch.md"))
    assert plain_rice.decode(payload, 2, bytes.fromhex(old)).hex() == new

"""What docs/format.md says is enough to read the golden repositories, and what it says to refuse is refused."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.plain_reader import (
    DENSE,
    PLANES,
    RAW,
    REF,
    SAME,
    SPARSE,
    Damaged,
    Payload,
    Repository,
    Tensor,
    Version,
    decode,
    digest,
)

GOLDEN = Path(__file__).parent / "golden" / "repositories"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
OLD, NEW = "0000803fc07f008080bf803f", "0000813fc07f00007fbf803f"


SAID = ("new", "time", "author", "message")
"""What the entry of an expired version says of it, in words of its record."""


def hashes(repository: Repository, id: str, prefer: str) -> dict[str, Any]:
    """What expected.json says of a version."""
    version, data = repository.read(id, prefer)
    record = version.record
    tensors = [vars(tensor) | {"sha256": sha256(bytes).hexdigest()} for tensor, bytes in zip(version.tensors, data)]
    said = {field: record[field] for field in ("tree", "parents", "generation", "layout", "message", "metadata")}
    said |= {"id": version.id, "step": record["labels"].get("step"), "run": record["labels"].get("run")}
    files = {path: sha256(content).hexdigest() for path, content in repository.files(version, data).items()}
    return said | {"tensors": tensors, "files": files}


def read_all(path: Path) -> None:
    """Read all that a repository has."""
    repository = Repository(path)
    for id in repository.commits:
        hashes(repository, id, "base")


def test_there_are_golden_repositories() -> None:
    assert NAMES


@pytest.mark.parametrize("prefer", ["base", "patch"])
@pytest.mark.parametrize("name", NAMES)
def test_reads_golden_repository(name: str, prefer: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    repository = Repository(GOLDEN / name)
    assert repository.root["branches"] == expected["branches"]
    assert repository.root["default"] == expected["default"]
    assert repository.tags == expected["tags"]
    assert list(repository.commits) == [version["id"] for version in expected["versions"]]
    for version in expected["versions"]:
        assert hashes(repository, version["id"], prefer) == version


@pytest.mark.parametrize("name", NAMES)
def test_entries_and_records_are_as_described(name: str) -> None:
    repository = Repository(GOLDEN / name)
    for id in repository.commits:
        version, data = repository.read(id)
        entry, head, record = version.entry, version.head, version.record
        assert [entry["manifest"].partition("/")[0], entry["schema"]] == ["manifest", head["schema"][1]]
        assert entry["layout"] == head["layout"]
        assert sorted(entry["files"]) == sorted(head["files"].values())
        assert entry["packs"] == sum(len(head[way]["packs"]) for way in version.ways)
        edges = {}
        for way in version.ways:
            stream = sum(len(payload) for _, _, payload, _ in version.blocks(way))
            patch = way == "patch"
            edges[head[way]["from"] if patch else None] = [
                stream,
                head[way]["changed"] if patch else record["elements"],
            ]
        assert {source: rest for source, *rest in entry["edges"]} == edges
        assert record["nbytes"] == sum(map(len, data))
        parents = [json.loads(repository.commits[parent]["record"]) for parent in record["parents"]]
        assert record["generation"] == max([parent["generation"] + 1 for parent in parents], default=0)


def test_every_further_way_gives_the_same_bytes_and_is_as_described() -> None:
    repository = Repository(GOLDEN / "compacted")
    sources = set()
    for id, entry in repository.commits.items():
        _, data = repository.read(id)
        for way in entry.get("ways", []):
            version = Version(repository, id, way["manifest"])
            for field in ("record", "schema", "layout", "files"):
                assert version.head[field] == Version(repository, id).head[field]
            assert version.digests == Version(repository, id).digests
            assert repository.read_by(id, way["manifest"]) == [data] * len(version.ways)
            assert way["packs"] == sum(len(version.head[kind]["packs"]) for kind in version.ways)
            streams = {}
            for kind in version.ways:
                size = sum(len(payload) for _, _, payload, _ in version.blocks(kind))
                patch = kind == "patch"
                changed = version.head[kind]["changed"] if patch else version.record["elements"]
                streams[version.head[kind]["from"] if patch else None] = [size, changed]
            assert {source: rest for source, *rest in way["edges"]} == streams
            stored = (GOLDEN / "compacted" / way["manifest"]).stat().st_size
            assert way["bytes"] == stored + sum(
                8 + n for kind in version.ways for _, n in version.head[kind]["packs"]
            )
            for source in streams:
                below = repository.commits[source]["seq"] if source else 0
                sources.add((source is None, below > entry["seq"]))
    assert sources == {(True, False), (False, False), (False, True)}  # bases, patches forward and back
    assert set(repository.root["compaction"]) == {"share", "base_every", "reverse"}


def test_what_retention_and_collection_wrote_is_as_described() -> None:
    path = GOLDEN.parent / "retention"
    expected = json.loads((path / "expected.json").read_text())
    repository = Repository(path)
    assert repository.root["branches"] == expected["branches"]
    assert repository.tags == expected["tags"]
    versions = {version["id"]: version for version in expected["versions"]}
    for id in expected["kept"]:
        assert "expired" not in repository.commits[id]
        assert hashes(repository, id, "patch") == versions[id]
    stones = {id for id, entry in repository.commits.items() if "expired" in entry}
    for id in stones:
        assert hashes(repository, id, "patch") == versions[id]
    gone = [entry for entry in repository.entries if entry["op"] == "expired"]
    assert {digest(entry["record"]) for entry in gone} == set(versions) - set(expected["kept"]) - stones
    for entry in gone:
        assert set(entry) <= {*("op", "seq", "name", "old", "record", "expired", "released"), *SAID}
        assert [entry[field] for field in SAID[1:]] == [json.loads(entry["record"])[field] for field in SAID[1:]]
        assert entry["new"] == digest(entry["record"])
    kept = {"*": {"last": 1, "meta": {"keep": True}}, "exp": {"within": 86400}}
    assert repository.root["retention"] == {"branches": kept, "unreachable": None}
    page = repository.page(repository.root["collector"], "collector")
    assert page["noted"] == [[4, 1_767_225_600_000_000], [9, 1_767_225_601_000_000]]
    assert page["since"] == 1_767_225_602_000_000
    (dead,) = page["dead"]
    assert repository.load(dead, "pack")
    assert repository.root["horizon"] == 4
    pins = [repository.page(f"pin/{one.name}", "pin") for one in path.glob("pin/*")]
    writer, reader = sorted(pins, key=lambda pin: pin["begin"] is None)
    assert writer == {"begin": 7, "names": [], "versions": [], "lifetime": writer["lifetime"], "weightvc": "pin 1"}
    head = repository.root["branches"]["main"]
    assert reader["versions"] == [head]
    assert reader["begin"] is None
    assert set(reader["names"]) >= {repository.commits[head]["manifest"], repository.commits[head]["schema"]}
    assert all(1 <= pin["lifetime"] <= 604_800 for pin in pins)
    (copy,) = path.glob("root.d/*")
    assert copy.read_bytes() == (path / "root").read_bytes()


KINDS = [
    *[("history", kind) for kind in ("root", "page", "manifest", "schema")],
    *[("long", "segment"), ("packs", "pack"), ("files", "layout"), ("files", "file")],
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_refuses_a_damaged_object(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(GOLDEN / name, path)
    read_all(path)
    objects = path.glob("root" if kind == "root" else f"{kind}/*")
    # The newest of a kind is still referred to: a page or a segment may replace older ones.
    damaged = max(objects, key=lambda object: int(f"0{object.suffix}".partition(".")[2].partition("-")[0] or 0))
    data = damaged.read_bytes()
    for at in (0, 4, 7, 8, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(Damaged, match="root" if kind == "root" else damaged.name):
            read_all(path)
    for wrong in (data[:-1], data + b"\0", b""):
        damaged.write_bytes(wrong)
        with pytest.raises(Damaged):
            read_all(path)
    damaged.unlink()
    with pytest.raises(Damaged):
        read_all(path)


@pytest.mark.parametrize("name", ["dtypes", "files", "packs", "trees"])
def test_damage_behind_the_keys_never_gives_other_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the digests in the keys, as for ranges of packs, those of chunks, records and contents remain."""
    repository = Repository(GOLDEN / name)
    id = list(repository.commits)[1]
    read = {prefer: hashes(repository, id, prefer) for prefer in ("base", "patch")}
    refused = 0
    for path in sorted(GOLDEN.glob(f"{name}/*/*")):
        key, data = path.relative_to(GOLDEN / name).as_posix(), path.read_bytes()
        for at in range(3, len(data), max(1, len(data) // 8)):
            other = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]

            def load(self: Repository, asked: str, kind: str, key: str = key, other: bytes = other) -> bytes:
                return other if asked == key else (self.path / asked).read_bytes()

            monkeypatch.setattr(Repository, "load", load)
            for prefer in ("base", "patch"):
                try:
                    assert hashes(repository, id, prefer) == read[prefer]
                except Damaged:
                    refused += 1
    assert refused


def test_examples_of_digests() -> None:
    chunk = "a02e65aef997b496d4548a70b8c2cb0b49a036970f678dd45d0e5075682a6aa2"
    tensor = Tensor("", "w", "BF16", [2, 2])
    assert tensor.digest([bytes.fromhex(chunk)]).hex().startswith("eb80659579a20184")
    assert Tensor("", "", "F32", [0, 3]).digest([]).hex().startswith("d28690b6bc3be366")


@pytest.mark.parametrize(
    ("numbers", "stream"),
    [
        ([1, 2, 3, 300, 0, 5, 7, 1000], "0010010203ff000507ff02042de9040002"),
        ([100, 200, 130, 90, 255, 120, 160, 40000], "0408101c113a10060c08050f070aff0202c50208"),
    ],
)
def test_examples_of_numbers(numbers: list[int], stream: str) -> None:
    payload = Payload(bytes.fromhex(stream))
    assert payload.numbers(8, 16).tolist() == numbers
    assert payload.at == len(payload.data)


def decoded(codec: int, payload: str, old: str | None = OLD, check: str = "df84beef") -> str:
    """The bytes of a block of 6 lanes of 2 bytes, in hexadecimal as all that it takes."""
    sources = None if old is None else bytes.fromhex(old)
    return decode(codec, bytes.fromhex(payload), 12, 2, sources, int.from_bytes(bytes.fromhex(check), "little")).hex()


def test_examples_of_codecs() -> None:
    assert decoded(RAW, OLD) == OLD
    assert decoded(PLANES, "0c0000800101000c007fff007f7f") == OLD
    assert decoded(DENSE, "00000c000200020200") == NEW
    assert decoded(SPARSE, "000300060101000006020202") == NEW
    assert decoded(SPARSE, "", check="af1349b9") == OLD
    assert decoded(SAME, "") == OLD


@pytest.mark.parametrize(
    ("codec", "payload", "message"),
    [
        (RAW, OLD + "00", "ends late"),
        (RAW, OLD[2:], "ends early"),
        (SAME, "00", "ends late"),
        (PLANES, "0c0000800101000a007fff007f", "a plain section of another size"),
        (PLANES, "0d0000800101000c007fff007f7f", "no zstd frame"),
        (PLANES, "ffffffffffffffffff01", "more than 9 bytes"),
        (SPARSE, "000300060101000006020200", "a SPARSE delta of 0"),
        (SPARSE, "000300060101020006020202", "past the block"),
        (SPARSE, "000700060101000006020202", "over the block's lanes"),
        (SPARSE, "00030006010100000602020200", "ends late"),
        (SPARSE, "020300060101000006020202", "the mode 2"),
        (DENSE, "00000cff0000000000" + "0202ff02ff", "a number over its bits"),
        (DENSE, "00100c000200020200", "too many low bits"),
        (DENSE, "000f1e" + 15 * "00" + "0c020000000000", "a number over its bits"),
        (REF, "00000000", "the codec 5"),
        (6, "", "the codec 6"),
    ],
)
def test_refuses_a_wrong_payload(codec: int, payload: str, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        decoded(codec, payload)


@pytest.mark.parametrize("codec", [SAME, SPARSE, DENSE])
def test_refuses_blocks_without_sources(codec: int) -> None:
    with pytest.raises(Damaged, match="without its sources"):
        decoded(codec, "", None)


def test_refuses_other_old_lanes() -> None:
    with pytest.raises(Damaged, match="old lanes"):
        decoded(DENSE, "00000c000200020200", check="df84beee")

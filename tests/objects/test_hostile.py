"""Objects with right digests that say nonsense: a typed error, little memory, and nothing touched outside."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

import weightvc_kernels as kernels
from weightvc.errors import BadFile, BadTensor, Corrupt, Refused, Unsupported
from weightvc.objects import catalogue, dtypes, frame, layout, manifest, root, schema, version
from weightvc.objects.catalogue import Entry
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree
from weightvc.sources.base import Layout, LayoutFile

ID = "a" * 64


def name_of(kind: str) -> str:
    return f"{kind}/{ID}.1-{'b' * 32}-0"


def made(**fields: Any) -> version.Version:
    given = {"step": 1, "run": "r", "message": "m", "author": "me", "metadata": {"lr": 0.5}, "now": 5, **fields}
    return version.make(tree=ID, layout=ID, parents=[], elements=4, nbytes=16, **given)


RECORD = json.loads(made().record) | {"parents": [ID]}
COMMIT = {
    "op": "commit",
    "seq": 3,
    "name": "main",
    "old": ID,
    "record": made().record,
    "manifest": name_of("manifest"),
    "schema": name_of("schema"),
    "layout": name_of("layout"),
    "files": [name_of("file")],
    "packs": 0,
    "edges": [[ID, 5, 2]],
    "bytes": 10,
}
MOVE = {"op": "reset", "seq": 3, "name": "main", "old": ID, "new": ID, "time": 5, "author": "me", "message": "m"}
ROOT = {
    "repository": "b" * 32,
    "sequence": 3,
    "created": 5,
    "default": "main",
    "branches": {"main": ID},
    "tags": name_of("page"),
    "tail": [COMMIT, MOVE],
    "segments": [[name_of("segment"), 4]],
    "ring": ["c" * 32],
    "horizon": 0,
    "probe": {},
    "weightvc": "root 1",
}
MANIFEST = {
    "record": made().record,
    "branch": "main",
    "schema": [ID, name_of("schema")],
    "layout": name_of("layout"),
    "files": {ID: name_of("file")},
    "patch": {"packs": [], "from": ID, "moved": [[0, 0]], "changed": 2},
    "weightvc": "manifest 1",
    "writer": "weightvc 0.1.0",
}
CONTENT = frame.digest(b"abc").hex()
LAYOUT = {
    "files": [["config.json", "file", 3, 3, CONTENT], ["x.safetensors", "weights", 20, 8, ID]],
    "weightvc": "layout 1",
}


def index(counts: list[int], codecs: list[int], lengths: list[int]) -> bytes:
    n = len(counts)
    raw = struct.pack(f"<I{n}I", n, *counts) + bytes(codecs) + struct.pack(f"<{2 * n}I", *lengths, *[0] * n)
    return frame.compress(raw)


def read_manifest(head: dict[str, Any]) -> Any:
    sections = [bytes(32), index([1], [0], [0]), b""]
    return manifest.decode(frame.encode(frame.MANIFEST, head, sections), "the object")


def read_layout(fields: Any, inline: Any = (CONTENT,)) -> Any:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    data = frame.encode(frame.LAYOUT, {"inline": list(inline), "layout": text}, [frame.compress(b"abc")])
    return layout.decode(data, "the object")


def read_schema(fields: Any) -> Schema:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return schema.decode(frame.encode(frame.SCHEMA, {"schema": text}), "the object")


def rows(*tensors: Any) -> dict[str, Any]:
    return {"components": {"": list(tensors)}, "weightvc": "schema 1"}


def encoded(kind: str, head: dict[str, Any]) -> bytes:
    """As frame.encode(), but a lone surrogate goes in, as an escape."""
    packed = frame.compress(json.dumps(head).encode())
    body = struct.pack("<I", len(packed)) + packed
    return frame.header(kind) + (frame.digest(body) if kind == frame.ROOT else b"") + body


READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    "record": (RECORD, lambda fields: version.read(json.dumps(fields))),
    "commit": (COMMIT, lambda fields: catalogue.from_json(fields, "the object")),
    "move": (MOVE, lambda fields: catalogue.from_json(fields, "the object")),
    "root": (ROOT, lambda fields: root.decode(encoded(frame.ROOT, fields), "the object")),
    "manifest": (
        {k: v for k, v in MANIFEST.items() if k != "branch"},
        lambda fields: read_manifest({"branch": None, **fields}),
    ),
    "patch": (MANIFEST["patch"], lambda fields: read_manifest({**MANIFEST, "patch": fields})),
    "layout": (LAYOUT, read_layout),
}
JUNK = [True, 1.5, 10**30, -2, [[]], [None], {"x": None}, "DELETED"]
ANY_OBJECT = {"metadata", "probe", "labels"}


@pytest.mark.parametrize("kind", READERS)
def test_the_objects_that_are_tampered_with_read_well_before(kind: str) -> None:
    fields, read = READERS[kind]
    read(fields)


@pytest.mark.parametrize(("kind", "field"), [(kind, f) for kind, (fields, _) in READERS.items() for f in fields])
def test_a_field_of_another_type_or_range_is_corrupt(kind: str, field: str) -> None:
    fields, read = READERS[kind]
    for junk in JUNK:
        if isinstance(junk, dict) and field in ANY_OBJECT:
            continue
        changed = {**fields, field: junk}
        if junk == "DELETED":
            del changed[field]
        if (kind, field, junk) == ("manifest", "patch", "DELETED"):
            continue
        with pytest.raises(Corrupt):
            print(f"{kind}.{field} = {junk!r}: {read(changed)}")


@pytest.mark.parametrize(
    "fields",
    [
        {**RECORD, "message": "\ud800"},
        {**RECORD, "labels": {"step": [1]}},
        {**RECORD, "labels": {"step": -1}},
        {**RECORD, "labels": {"run": 5}},
        {**RECORD, "tree": "../victim"},
        {**RECORD, "tree": "A" * 64},
        {**RECORD, "parents": [[1]]},
        {**RECORD, "time": 10**18},
        {**RECORD, "metadata": {"lr": float("inf")}},
        {**RECORD, "metadata": {"lr": float("nan")}},
    ],
)
def test_a_record_of_nonsense_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        version.read(json.dumps(fields))


def test_a_number_too_large_for_a_float_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="range"):
        version.read(made().record.replace("0.5", "1e999"))


@pytest.mark.parametrize("victim", ["/etc/passwd", "../../../victim", name_of("pack"), name_of("file") + "/..", ""])
def test_only_keys_of_the_right_kind_are_taken_as_keys(victim: str) -> None:
    for field, value in (("files", {ID: victim}), ("layout", victim), ("schema", [ID, victim])):
        with pytest.raises(Corrupt, match="the object"):
            read_manifest({**MANIFEST, field: value})
    for field, value in (("files", [victim]), ("layout", victim), ("manifest", victim), ("schema", victim)):
        with pytest.raises(Corrupt, match="the object"):
            catalogue.from_json({**COMMIT, field: value}, "the object")
    for changed in ({"tags": victim}, {"segments": [[victim, 1]]}):
        with pytest.raises(Corrupt, match="the object"):
            root.decode(encoded(frame.ROOT, {**ROOT, **changed}), "the object")


@pytest.mark.parametrize("junk", [None, [], "main", 5, {"main": None}, {"main": 0}, {"main": "5"}, {"main": True}])
def test_writers_of_nonsense_are_corrupt(junk: Any) -> None:
    with pytest.raises(Corrupt, match="the object"):
        root.decode(encoded(frame.ROOT, {**ROOT, "writers": junk}), "the object")


def test_half_of_a_surrogate_pair_is_corrupt_in_any_field() -> None:
    # It could be read, but not written again: no branch could ever move.
    for changed in ({"later": "\ud800"}, {"probe": {"\udfff": 1}}, {"tail": [{**MOVE, "later": ["\ud800"]}]}):
        with pytest.raises(Corrupt, match="the object"):
            root.decode(encoded(frame.ROOT, {**ROOT, **changed}), "the object")
    with pytest.raises(Corrupt):
        version.read(json.dumps({**RECORD, "metadata": {"x": "\ud800"}}))
    whole = root.decode(encoded(frame.ROOT, {**ROOT, "later": "\U0001f600 \\ud800"}), "it")
    assert root.decode(root.encode(whole), "it").extra == {"later": "\U0001f600 \\ud800"}


def test_a_record_of_a_newer_format_is_told_with_the_object_that_has_it() -> None:
    newer = json.dumps({**RECORD, "weightvc": "version 2"})
    with pytest.raises(Unsupported, match=r"the object.*'version 2'"):
        read_manifest({**MANIFEST, "record": newer})
    with pytest.raises(Unsupported, match=r"the object.*'version 2'"):
        catalogue.from_json({**COMMIT, "record": newer}, "the object")
    with pytest.raises(Unsupported, match=r"the object.*'version 2'"):
        root.decode(encoded(frame.ROOT, {**ROOT, "tail": [{**COMMIT, "record": newer}]}), "the object")


@pytest.mark.parametrize("edge", [[ID, -1, 0], [ID, 1, -1], ["x", 1, 1], [None, 1], [None, 1.0, 1], [None, True, 1]])
def test_edges_have_ids_and_numbers_from_0(edge: list[Any]) -> None:
    with pytest.raises(Corrupt, match="the object"):
        catalogue.from_json({**COMMIT, "edges": [edge]}, "the object")


@pytest.mark.parametrize("moved", [[[0, -2]], [[-1, 0]], [[0, 1.0]], [[0]], [["0", 0]], [[0, 1e308]], 5, [5]])
def test_moved_tensors_are_pairs_of_numbers(moved: Any) -> None:
    with pytest.raises(Corrupt, match="the object"):
        read_manifest({**MANIFEST, "patch": {**MANIFEST["patch"], "moved": moved}})


DEEP = "[" * 200_000 + "]" * 200_000


def test_deep_nesting_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        version.read(f'{{"weightvc":{DEEP}}}')
    with pytest.raises(Corrupt, match="the object"):
        read_schema(f'{{"components":{{"":[["w","U8",{DEEP}]]}},"weightvc":"schema 1"}}')
    with pytest.raises(Corrupt, match="the object"):
        read_layout(f'{{"files":{DEEP},"weightvc":"layout 1"}}')
    packed = frame.compress(f'{{"x":{DEEP}}}'.encode())
    with pytest.raises(Corrupt, match="the object"):
        frame.decode(frame.PAGE, frame.header(frame.PAGE) + struct.pack("<I", len(packed)) + packed, "the object")


@pytest.mark.parametrize(
    "tensor",
    [
        ["w", "U8", [-4]],
        ["w", "U8", [-4, -4]],
        ["w", "U8", [True, 16]],
        ["w", "U8", [16.0]],
        ["w", "U8", ["a"]],
        ["w", "U8", "16"],
        ["w", "U8", {}],
        ["w", "U8", 16],
        ["w", "U8", [10**4000]],
        ["w", "U8", [1 << 63]],
        ["w", "U8", [1 << 32, 1 << 31]],
        ["w", "U8", [0, 1 << 62, 4]],
        ["w", "U8", [1] * 65],
        ["w", "U8", [10**18] * 20_000],
        [5, "U8", [16]],
        [None, "U8", [16]],
        ["w", ["U8"], [16]],
        ["\ud800", "U8", [16]],
        ["w", "U8"],
        "wU8",
        {"w": 1, "U8": 2, "x": 3},
        5,
    ],
)
def test_a_tensor_of_nonsense_is_corrupt(tensor: Any) -> None:
    with pytest.raises(Corrupt, match="the object"):
        read_schema(rows(tensor))


def test_good_shapes_are_not_taken_for_their_likes() -> None:
    # 1, true and 1.0 are equal, and a cache of shapes must not mix them up.
    read_schema(rows(["w", "U8", [1, 16]]))
    for shape in ([True, 16], [1.0, 16]):
        with pytest.raises(Corrupt):
            read_schema(rows(["w", "U8", shape]))


def test_an_unknown_dtype_is_unsupported_and_named() -> None:
    with pytest.raises(Unsupported, match=r"the object.*'F99'.*upgrade"):
        read_schema(rows(["w", "F99", [16]]))


def test_a_forged_shape_takes_no_memory_and_is_found_by_the_digests() -> None:
    forged = read_schema(rows(["w", "U8", [1 << 62]]))
    assert forged.chunks == 1 << 40
    with pytest.raises(Corrupt, match="1 digests"):
        Tree(forged, bytes(32))
    stream = manifest.Stream([1], [1], [5], [0]).seal()
    with pytest.raises(Corrupt, match="the object"):
        manifest.check_blocks(stream, forged, "the object")
    assert "positions" not in vars(forged)


def test_what_readers_refuse_of_shapes_is_not_written() -> None:
    for shape in ((1,) * 65, (1 << 63,), (-1,), (0, 1 << 62, 4)):
        with pytest.raises(BadTensor):
            dtypes.nbytes("U8", shape)
    assert dtypes.nbytes("U8", (1,) * 64) == 1


def of(*tensors: tuple[str, int]) -> Schema:
    return Schema(
        [TensorInfo("", f"{i:03}", dtype, (n,), dtypes.nbytes(dtype, (n,))) for i, (dtype, n) in enumerate(tensors)]
    )


def test_a_block_has_lanes_of_one_width() -> None:
    mixed = of(("BF16", 4), ("U8", 0), ("F16", 4), ("F32", 4), ("I32", 0), ("BF16", 4))
    for counts in ([2, 1, 1], [1, 1, 1, 1]):
        manifest.check_blocks(manifest.Stream(counts, [1] * len(counts)).seal(), mixed, "it")
    for counts in ([4], [3, 1], [1, 2, 1], [2, 2]):
        with pytest.raises(Corrupt, match=r"it is corrupt.*two widths"):
            manifest.check_blocks(manifest.Stream(counts, [1] * len(counts)).seal(), mixed, "it")


def test_a_context_block_has_one_dtype() -> None:
    mixed = of(("BF16", 4), ("BF16", 4), ("F16", 4))
    for counts, codecs in (([2, 1], [manifest.CONTEXT] * 2), ([1, 2], [manifest.CONTEXT, kernels.SPARSE])):
        manifest.check_blocks(manifest.Stream(counts, codecs).seal(), mixed, "it")
    for counts in ([1, 2], [3]):
        with pytest.raises(Corrupt, match=r"it is corrupt.*CONTEXT"):
            manifest.check_blocks(manifest.Stream(counts, [manifest.CONTEXT] * len(counts)).seal(), mixed, "it")


def test_a_block_that_is_the_same_has_no_payload() -> None:
    def decoded(codec: int) -> Any:
        return manifest.decode(
            frame.encode(frame.MANIFEST, MANIFEST, [bytes(32), index([1], [codec], [3]), b"abc"]), "it"
        )

    assert decoded(kernels.RAW).patch.stream.lengths == [3]
    with pytest.raises(Corrupt, match=r"it.*SAME"):
        decoded(manifest.SAME)


def test_a_block_has_at_most_64_mib() -> None:
    many = of(*[("U8", CHUNK)] * 17, *[("U8", 1)] * 40)
    for counts in ([16, 1, 40], [1, 16, 40], [*[1] * 15, 42]):
        manifest.check_blocks(manifest.Stream(counts, [0] * len(counts)).seal(), many, "it")
    for counts in ([17, 40], [57], [1, 17, 39]):
        with pytest.raises(Corrupt, match=r"it is corrupt.*bytes"):
            manifest.check_blocks(manifest.Stream(counts, [0] * len(counts)).seal(), many, "it")


def test_a_pack_has_at_most_64_mib() -> None:
    for size in ((64 << 20) + 1, -1, 1 << 40):
        with pytest.raises(Corrupt, match="a pack's bytes"):
            read_manifest({**MANIFEST, "patch": {**MANIFEST["patch"], "packs": [[name_of("pack"), size]]}})


def file_row(**changes: Any) -> list[Any]:
    fields = {"path": "config.json", "kind": "file", "size": 3, "length": 3, "content": CONTENT, **changes}
    return list(fields.values())


GIB = 1 << 30


@pytest.mark.parametrize(
    "files",
    [
        [file_row(size=3 * GIB, length=3 * GIB)],
        [file_row(kind="weights", size=3 * GIB, length=3 * GIB)],
        [file_row(size=4)],
        [file_row(kind="weights", size=7, length=8)],
        [file_row(kind="weights", size=7, length=7)],
        [file_row(kind="link")],
        [file_row(kind=["file"])],
        [file_row(path=5)],
        [file_row(path="\ud800")],
        [file_row(content="x")],
        [file_row(), file_row(path="b", size=4, length=4)],
        [file_row(size=True, length=True)],
        [file_row(), *[file_row(path=f"{i}", content=f"{i:064}", size=64 << 20, length=64 << 20) for i in range(8)]],
    ],
)
def test_a_file_of_nonsense_is_corrupt(files: Any) -> None:
    with pytest.raises(Corrupt, match="the object"):
        read_layout({"files": files, "weightvc": "layout 1"})


def test_inline_contents_are_the_ones_of_files_once_and_few() -> None:
    read_layout(LAYOUT)
    for inline in ([ID], [CONTENT, CONTENT], [5], [[]], []):
        with pytest.raises(Corrupt, match="the object"):
            read_layout(LAYOUT, inline)
    n = layout.INLINE // layout.SMALL + 1
    files = [file_row(path=f"{i}", content=f"{i:064}", size=layout.SMALL, length=layout.SMALL) for i in range(n)]
    head = {"inline": [row[4] for row in files], "layout": json.dumps({"files": files, "weightvc": "layout 1"})}
    with pytest.raises(Corrupt, match="inline"):
        layout.decode(frame.encode(frame.LAYOUT, head, [b""] * n), "the object")


def test_contents_past_the_room_in_a_layout_become_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "INLINE", 10)
    contents = [b"abcd", b"efgh", b"ijkl"]
    stored = layout.make(Layout(tuple(LayoutFile(c.decode(), 4, c, False) for c in contents)))
    data, files = layout.encode(stored)
    assert len(files) == 1
    read = layout.decode(data, "it")
    assert len(read.contents) == 2
    ((content, file),) = files.items()
    assert layout.decode_file(content, 4, file, "it") in contents


def test_contents_too_large_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CONTENTS_LIMIT", 10)
    made = [LayoutFile(f"{i}", 4, bytes([i] * 4), False) for i in range(3)]
    layout.make(Layout(tuple(made[:2])))
    with pytest.raises(BadFile, match="12 bytes"):
        layout.make(Layout(tuple(made)))


def test_a_file_object_that_stands_for_more_is_corrupt() -> None:
    data = frame.encode(frame.FILE, {"weightvc": "file 1"}, [frame.compress(bytes(1 << 20))])
    digest = frame.digest(bytes(1 << 20)).hex()
    assert layout.decode_file(digest, 1 << 20, data, "it") == bytes(1 << 20)
    for length in (100, (1 << 20) - 1, (1 << 20) + 1):
        with pytest.raises(Corrupt, match="it"):
            layout.decode_file(digest, length, data, "it")


@pytest.mark.parametrize("kind", [frame.MANIFEST, frame.ROOT, frame.PAGE, frame.FILE, frame.LAYOUT])
def test_a_head_that_unpacks_to_too_much_is_corrupt(kind: str) -> None:
    limit = frame.HEAD_LIMITS[kind]
    packed = zstandard.ZstdCompressor().compress(b'{"x":"' + b"a" * (limit - 7) + b'"}')
    body = struct.pack("<I", len(packed)) + packed
    data = frame.header(kind) + (frame.digest(body) if kind == frame.ROOT else b"") + body
    with pytest.raises(Corrupt, match=f"over {limit} bytes"):
        frame.decode(kind, data, "the object")
    assert limit <= 32 << 20


@pytest.mark.parametrize("kind", frame.HEAD_LIMITS)
def test_a_head_that_readers_would_refuse_is_not_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(frame.HEAD_LIMITS, kind, 20)
    head = {"x": "a" * 12}
    assert frame.decode(kind, frame.encode(kind, head), "it")[0] == head
    with pytest.raises(Refused, match="21 bytes, 20 at most: "):
        frame.encode(kind, {"x": "a" * 13})


def test_a_root_of_too_many_branches_is_refused_and_says_what_to_delete() -> None:
    one = root.first("main", 5, {}).next(branches={f"b{i:06}": ID for i in range(220_000)})
    with pytest.raises(Refused, match="delete branches"):
        root.encode(one)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"message": "é" * 2049}, "message has 4098 bytes, 4096 at most"),
        ({"message": 5}, "message has to be a text"),
        ({"message": None}, "message has to be a text"),
        ({"message": "\ud800"}, "message has to be a text"),
        ({"author": "é" * 129}, "author has 258 bytes, 256 at most"),
        ({"author": 5}, "author has to be a text"),
        ({"author": "\udcff"}, "author has to be a text"),
    ],
)
def test_words_that_the_root_has_no_room_for_are_refused(words: dict[str, Any], complaint: str) -> None:
    first = root.first("main", 5, {})
    entry = Entry("branch", 2, 5, **{"author": "me", "message": "m", **words}, name="b", old=None, new=ID)
    with pytest.raises(Refused, match=complaint):
        first.next(tail=(entry,))
    with pytest.raises(Refused, match=complaint):
        made(**words)


def test_words_as_long_as_they_may_be_come_back() -> None:
    entry = Entry("branch", 2, 5, "é" * 128, "b", None, ID, "é" * 2048)
    one = root.first("main", 5, {}).next(tail=(entry,))
    assert root.decode(root.encode(one), "it").tail == (entry,)
    assert version.read(made(message="é" * 2048, author="é" * 128).record).author == "é" * 128


def test_a_long_message_of_somebody_else_is_not_in_the_way() -> None:
    long = Entry("branch", 2, 5, "me", "b", None, ID, "x" * 5000)
    one = root.decode(encoded(frame.ROOT, {**ROOT, "tail": [catalogue.to_json(long)]}), "it")
    entry = Entry("branch", 3, 5, "me", "c", None, ID, "")
    assert one.next(tail=(*one.tail, entry)).tail == (long, entry)
    assert one.next(branches={}).tail == (long,)


@pytest.mark.parametrize(
    "fields", [{"now": -1}, {"now": 10**18}, {"step": 1 << 63}, {"step": True}, {"run": "\ud800"}, {"run": 5}]
)
def test_a_record_that_readers_would_refuse_is_not_made(fields: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        made(**fields)

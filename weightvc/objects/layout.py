"""The layout: how a checkpoint's files lay, so that a checkout is byte for byte what was committed.

The layout's canonical record names each file's path, size, and the digest of its content: a side file's bytes,
or a weights file's first bytes (the length and the raw header), from which follow the places of its tensors.
Identity is the digest of the record. As a stored object it carries small contents along; large ones are file
objects, found through the manifest.
"""

from dataclasses import dataclass
from typing import Any, Final

from weightvc.errors import BadFile, Corrupt, Unsupported
from weightvc.objects import expect, frame
from weightvc.sources.base import Layout

SMALL: Final = 64 << 10
"""Content of at most so many bytes lies in the layout object, while INLINE has room."""
INLINE: Final = 32 << 20
"""Bytes of all contents in a layout object at most."""
FILE_LIMIT: Final = 64 << 20
"""Bytes of a side file at most."""
HEADER_LIMIT: Final = 100_000_000 + 8
"""Bytes before a weights file's tensors at most: the longest header that the safetensors format allows."""
CONTENTS_LIMIT: Final = 512 << 20
"""Bytes of all contents of a layout at most: readers and writers hold them in memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: for a weights file, `content` is the digest of the bytes before its tensor data."""

    path: str
    size: int
    content: str
    length: int
    weights: bool


@dataclass(slots=True)
class Stored:
    """A layout's record, digest, entries, and the contents at hand by digest."""

    record: str
    digest: str
    entries: list[Entry]
    contents: dict[str, frame.Buffer]


def make(layout: Layout) -> Stored:
    """The record of a source's layout, with all its contents. Raises BadFile if those are too large together."""
    entries: list[Entry] = []
    contents: dict[str, frame.Buffer] = {}
    for file in layout.files:
        content = frame.digest(file.content).hex()
        contents[content] = file.content
        entries.append(Entry(file.path, file.size, content, len(file.content), file.weights))
    if (total := sum(map(len, contents.values()))) > CONTENTS_LIMIT:
        raise BadFile(
            f"side files and headers have {total} bytes together, {CONTENTS_LIMIT} at most: leave some of them out"
        )
    record = frame.canonical(
        {
            "files": [[e.path, "weights" if e.weights else "file", e.size, e.length, e.content] for e in entries],
            "weightvc": "layout 1",
        }
    )
    return Stored(record.decode(), frame.digest(record).hex(), entries, contents)


def encode(stored: Stored) -> tuple[bytes, dict[str, bytes]]:
    """The layout object, and the file objects of large contents by digest."""
    inline: list[str] = []
    sections: list[frame.Buffer] = []
    files: dict[str, bytes] = {}
    room = INLINE
    for content, data in sorted(stored.contents.items()):
        if len(data) <= min(SMALL, room):
            room -= len(data)
            inline.append(content)
            sections.append(frame.compress(data))
        else:
            files[content] = frame.encode(frame.FILE, {"weightvc": "file 1"}, [frame.compress(data)])
    head: dict[str, Any] = {"inline": inline, "layout": stored.record}
    return frame.encode(frame.LAYOUT, head, sections), files


def decode(data: frame.Buffer, what: str) -> Stored:
    """Read a layout object, with the contents that it carries. Raises Corrupt naming `what`."""
    head, sections = frame.decode(frame.LAYOUT, data, what)
    try:
        record = expect.text(head["layout"], "the layout")
        fields = expect.parse(record)
        frame.check_type(fields["weightvc"], "layout 1", what)
        entries = [_entry(*one) for one in expect.array(fields["files"], "files")]
        lengths = {entry.content: entry.length for entry in entries}
        if any(lengths[entry.content] != entry.length for entry in entries):
            raise ValueError("a content has two lengths")
        if sum(lengths.values()) > CONTENTS_LIMIT:
            raise ValueError(f"its contents have over {CONTENTS_LIMIT} bytes")
        inline = expect.array(head["inline"], "inline")
        # Before any is made: a section of 20 bytes can stand for 64 KiB.
        if len(set(inline)) != len(inline) or sum(lengths[content] for content in inline) > INLINE:
            raise ValueError(f"its inline contents stand twice, or have over {INLINE} bytes")
        contents: dict[str, frame.Buffer] = {
            content: _content(content, lengths[content], section, what)
            for content, section in zip(inline, sections, strict=True)
        }
    except Unsupported:
        raise
    except expect.MALFORMED as error:
        raise Corrupt(f"{what} is corrupt: {error!r:.300}") from None
    return Stored(record, frame.digest(record.encode()).hex(), entries, contents)


def _entry(path: object, kind: object, size: object, length: object, content: object) -> Entry:
    """One of a record's files, checked; of what its path may be, whoever writes files takes care."""
    made = Entry(
        expect.text(path, "a path"),
        expect.integer(size, "a file's size"),
        expect.digest(content, "a file's content"),
        expect.integer(length, "a content's length", 0, (HEADER_LIMIT if kind == "weights" else FILE_LIMIT) + 1),
        kind == "weights",
    )
    if kind not in ("weights", "file"):
        raise ValueError(f"{made.path!r:.200} is neither weights nor file")
    if not 8 <= made.length <= made.size if made.weights else made.length != made.size:
        raise ValueError(f"{made.path!r:.200} has {made.size} bytes, and content of {made.length}")
    return made


def decode_file(content: str, length: int, data: frame.Buffer, what: str) -> bytes:
    """The content of a file object, checked against its digest. `length` is its entry's, and so within limits."""
    head, sections = frame.decode(frame.FILE, data, what)
    frame.check_type(head.get("weightvc"), "file 1", what)
    if len(sections) != 1:
        raise Corrupt(f"{what} is corrupt: {len(sections)} sections")
    return _content(content, length, sections[0], what)


def _content(content: str, length: int, section: frame.Buffer, what: str) -> bytes:
    data = frame.decompress(section, length, what)
    if len(data) != length or frame.digest(data).hex() != content:
        raise Corrupt(f"{what} is corrupt: a file's content is not what its digest says")
    return data

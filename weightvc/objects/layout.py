"""The layout: how a checkpoint's files lay, so that a checkout is byte for byte what was committed.

The layout's canonical record names each file's path, size, and the digest of its content: a side file's bytes,
or a weights file's first bytes (the length and the raw header), from which follow the places of its tensors.
Identity is the digest of the record. As a stored object it carries small contents along; large ones are file
objects, found through the manifest.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from weightvc.errors import Corrupt, Unsupported
from weightvc.objects import frame
from weightvc.sources.base import Layout

SMALL: Final = 64 << 10
"""Content of at most so many bytes lies in the layout object."""


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
    """The record of a source's layout, with all its contents."""
    entries: list[Entry] = []
    contents: dict[str, frame.Buffer] = {}
    for file in layout.files:
        content = frame.digest(file.content).hex()
        contents[content] = file.content
        entries.append(Entry(file.path, file.size, content, len(file.content), file.weights))
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
    for content, data in sorted(stored.contents.items()):
        if len(data) <= SMALL:
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
        record = head["layout"]
        fields = json.loads(record)
        frame.check_type(fields["weightvc"], "layout 1", what)
        entries = [
            Entry(path, size, content, length, kind == "weights")
            for path, kind, size, length, content in fields["files"]
        ]
        contents: dict[str, frame.Buffer] = {}
        for content, section in zip(head["inline"], sections, strict=True):
            contents[content] = _checked(content, frame.decompress(section, SMALL, what), what)
    except Unsupported:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{what} is corrupt: {error!r}") from None
    return Stored(record, frame.digest(record.encode()).hex(), entries, contents)


def decode_file(content: str, length: int, data: frame.Buffer, what: str) -> bytes:
    """The content of a file object, checked against its digest."""
    head, sections = frame.decode(frame.FILE, data, what)
    frame.check_type(head.get("weightvc"), "file 1", what)
    if len(sections) != 1:
        raise Corrupt(f"{what} is corrupt: {len(sections)} sections")
    return _checked(content, frame.decompress(sections[0], length, what), what)


def _checked(content: str, data: bytes, what: str) -> bytes:
    if frame.digest(data).hex() != content:
        raise Corrupt(f"{what} is corrupt: a file's content is not what its digest says")
    return data

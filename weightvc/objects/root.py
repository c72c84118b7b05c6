"""The root: the only object that changes."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from weightvc.errors import Corrupt, Unsupported
from weightvc.objects import catalogue, expect, frame, key, version
from weightvc.objects.catalogue import Entry, SegmentRef

RING: Final = 128
"""How many of the last swaps' write ids the root remembers: how far back an ambiguous swap can be decided."""
LIMIT: Final = 24 << 10
"""Bytes of the root past which the tail spills early: a poll reads all of it."""


@dataclass(frozen=True, slots=True)
class Root:
    """Branches and tags by name, the catalogue's tail and segments, the last write ids, the horizon."""

    repository: str
    sequence: int
    created: int
    default: str
    branches: Mapping[str, str]
    tags: str | None
    """Key of the page of tags."""
    tail: tuple[Entry, ...]
    segments: tuple[SegmentRef, ...]
    ring: tuple[str, ...]
    """Write ids of the last swaps, oldest first; the last one is this root's own."""
    horizon: int
    """Transactions that began before this sequence number may not publish."""
    probe: Mapping[str, Any]
    extra: Mapping[str, Any]
    """Fields of later writers, kept as they are."""
    collector: str | None = None
    """Key of the collector's page, if there is one."""
    retention: Mapping[str, Any] | None = None
    """The policy that `expire` goes by, if one is kept."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """By branch that was claimed, the epoch of who may write it: the sequence number of the root in which it was."""

    @property
    def write(self) -> str:
        """This root's own write id."""
        return self.ring[-1]

    def next(self, **changes: Any) -> "Root":
        """The root that replaces this one: next sequence number, fresh write id, and `changes`.

        Raises Refused if the newest entry of a changed tail has a message or author that the root has no room for.
        """
        tail = changes.get("tail", ())
        # Only what is new: an entry that stands there, or is rewritten, must never be in the way of the next.
        if tail and tail[-1] not in self.tail and tail[-1].sequence > self.sequence:
            version.check_words(tail[-1].message, tail[-1].author)
        ring = (*self.ring, secrets.token_hex(16))[-RING:]
        return replace(self, sequence=self.sequence + 1, ring=ring, **changes)


def first(default: str, now: int, probe: Mapping[str, Any]) -> Root:
    """The root of a new repository."""
    return Root(
        repository=secrets.token_hex(16),
        sequence=1,
        created=now,
        default=default,
        branches={},
        tags=None,
        tail=(),
        segments=(),
        ring=(secrets.token_hex(16),),
        horizon=0,
        probe=probe,
        extra={},
    )


def encode(root: Root) -> bytes:
    """The root as a stored object. Raises Refused if it is larger than readers accept."""
    # Fields that came later stand there only if they say something.
    later = {"collector": root.collector, "retention": root.retention, "writers": dict(root.writers) or None}
    return frame.encode(
        frame.ROOT,
        {
            **root.extra,
            **{name: value for name, value in later.items() if value is not None},
            "branches": dict(root.branches),
            "created": root.created,
            "default": root.default,
            "horizon": root.horizon,
            "probe": dict(root.probe),
            "repository": root.repository,
            "ring": list(root.ring),
            "segments": [[s.key, s.count] for s in root.segments],
            "sequence": root.sequence,
            "tags": root.tags,
            "tail": [catalogue.to_json(entry) for entry in root.tail],
            "weightvc": "root 1",
        },
    )


_OWN: Final = frozenset(
    [
        "branches",
        "collector",
        "created",
        "default",
        "horizon",
        "probe",
        "repository",
        "retention",
        "ring",
        "segments",
        "sequence",
        "tags",
        "tail",
        "weightvc",
        "writers",
    ]
)


def decode(data: frame.Buffer, what: str) -> Root:
    """Read a root. Raises Corrupt naming `what`."""
    head, _ = frame.decode(frame.ROOT, data, what)
    try:
        frame.check_type(head["weightvc"], "root 1", what)
        segments = tuple(
            [
                SegmentRef(key.checked(k, "segment"), expect.integer(count, "a segment's entries"))
                for k, count in expect.array(head["segments"], "segments")
            ]
        )
        ring = tuple([expect.random(one, "a write id") for one in expect.array(head["ring"], "ring")])
        if not ring:
            raise ValueError("ring is empty")
        return Root(
            repository=expect.random(head["repository"], "repository"),
            sequence=expect.integer(head["sequence"], "sequence", 1),
            created=expect.integer(head["created"], "created", 0, expect.TIME),
            default=expect.text(head["default"], "default"),
            branches=catalogue.named(head["branches"], "branches"),
            tags=None if head["tags"] is None else key.checked(head["tags"], "page"),
            tail=tuple([catalogue.from_json(fields, what) for fields in expect.array(head["tail"], "tail")]),
            segments=segments,
            ring=ring,
            horizon=expect.integer(head["horizon"], "horizon"),
            probe=expect.mapping(head["probe"], "probe"),
            extra={name: value for name, value in head.items() if name not in _OWN},
            collector=None if head.get("collector") is None else key.checked(head["collector"], "page"),
            retention=None if head.get("retention") is None else expect.mapping(head["retention"], "retention"),
            writers={
                expect.text(name, "a name"): expect.integer(epoch, "an epoch", 1)
                for name, epoch in expect.mapping(head.get("writers", {}), "writers").items()
            },
        )
    except Unsupported:
        raise
    except (Corrupt, *expect.MALFORMED) as error:
        raise frame.corrupt(what, error) from None

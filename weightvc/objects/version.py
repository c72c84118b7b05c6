"""A version's record, whose canonical bytes make its id, and what the catalogue knows of where it lies."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from weightvc.errors import Corrupt, Refused, Unsupported
from weightvc.objects import expect, frame

RECORD_LIMIT: Final = 8 << 10
"""Bytes of a record at most: it stands in the root for a while, which has to stay small."""
MESSAGE_LIMIT: Final = 4 << 10
"""Bytes of a message at most, for the same reason."""
AUTHOR_LIMIT: Final = 256
"""Bytes of an author at most."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A way to a version: from another one by a patch, or from nothing (`source` None) by a base.

    `nbytes` is what is fetched beside the manifest's digests; `changed` counts the elements that differ.
    """

    source: str | None
    nbytes: int
    changed: int


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable version. `id` is the blake3 of `record`, the canonical JSON that the other fields repeat."""

    id: str
    record: str = field(repr=False)
    tree: str
    """Digest of the tree, hex."""
    layout: str | None
    """Digest of the layout, hex; None for tensors that came from memory."""
    parents: tuple[str, ...]
    generation: int
    """The greatest of the parents' generations + 1; 0 without parents."""
    step: int | None
    run: str | None
    message: str
    author: str
    time: int
    """Microseconds since the epoch, UTC, by the writer's clock."""
    metadata: Mapping[str, Any]
    elements: int
    nbytes: int
    """Canonical bytes of the tree."""

    @property
    def short(self) -> str:
        """The first 12 digits of the id."""
        return self.id[:12]


def check_words(message: object, author: object) -> None:
    """Raise Refused unless message and author are texts, short enough to stand in the root."""
    for name, value, limit in (("message", message, MESSAGE_LIMIT), ("author", author, AUTHOR_LIMIT)):
        try:
            size = len(expect.text(value, name).encode())
        except ValueError:
            raise Refused(f"{name}={value!r:.100}: {name} has to be a text that UTF-8 can say") from None
        if size > limit:
            raise Refused(f"the {name} has {size} bytes, {limit} at most: shorten it")


def copied(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what was given as metadata. Raises Refused for what is no mapping."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise Refused(f"metadata={metadata!r:.100}: give a mapping of names to values")
    return dict(metadata or {})


def make(
    *,
    tree: str,
    layout: str | None,
    parents: Sequence[Version],
    step: int | None,
    run: str | None,
    message: str,
    author: str,
    metadata: Mapping[str, Any] | None,
    elements: int,
    nbytes: int,
    now: int | None = None,
) -> Version:
    """Make a version's record and id.

    Raises Refused for texts that are too long, labels or metadata that JSON cannot keep exactly, and a clock that
    is out of its mind.
    """
    if step is not None and (type(step) is not int or not 0 <= step < expect.INTEGER):
        raise Refused(f"step={step!r:.100}: a step is a whole number from 0, and below 2^63")
    try:
        expect.maybe_text(run, "run")
    except ValueError:
        raise Refused(f"run={run!r:.100}: a run is a text that UTF-8 can say") from None
    check_words(message, author)
    now = time.time_ns() // 1000 if now is None else now
    if not 0 <= now < expect.TIME:
        raise Refused(f"the clock says {now} microseconds since 1970: set it")
    labels = {k: v for k, v in (("run", run), ("step", step)) if v is not None}
    fields = {
        "author": author,
        "elements": elements,
        "generation": max((p.generation + 1 for p in parents), default=0),
        "labels": labels,
        "layout": layout,
        "message": message,
        "metadata": copied(metadata),
        "nbytes": nbytes,
        "parents": [p.id for p in parents],
        "time": now,
        "tree": tree,
        "weightvc": "version 1",
    }
    try:
        record = frame.canonical(fields)
        if expect.parse(record.decode()) != fields:
            raise ValueError("it does not come back the same from JSON")
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"metadata cannot be kept exactly as JSON: {error}; use strings and numbers") from None
    if len(record) > RECORD_LIMIT:
        raise Refused(
            f"the version's record has {len(record)} bytes, {RECORD_LIMIT} at most: "
            "put long texts and large metadata into a side file"
        )
    return read(record.decode())


def read(record: str, what: str = "a version's record") -> Version:
    """A version from its record. Raises Corrupt, or Unsupported for a newer one, naming `what`."""
    try:
        fields = expect.parse(expect.text(record, "the record"))
        frame.check_type(fields["weightvc"], "version 1", what)
        labels = expect.mapping(fields["labels"], "labels")
        step = labels.get("step")
        return Version(
            id=frame.digest(record.encode()).hex(),
            record=record,
            tree=expect.digest(fields["tree"], "tree"),
            layout=expect.maybe_digest(fields["layout"], "layout"),
            parents=tuple([expect.digest(one, "a parent") for one in expect.array(fields["parents"], "parents")]),
            generation=expect.integer(fields["generation"], "generation"),
            step=None if step is None else expect.integer(step, "step"),
            run=expect.maybe_text(labels.get("run"), "run"),
            message=expect.text(fields["message"], "message"),
            author=expect.text(fields["author"], "author"),
            time=expect.integer(fields["time"], "time", 0, expect.TIME),
            metadata=expect.mapping(fields["metadata"], "metadata"),
            elements=expect.integer(fields["elements"], "elements"),
            nbytes=expect.integer(fields["nbytes"], "nbytes"),
        )
    except Unsupported:
        raise
    except expect.MALFORMED as error:
        raise Corrupt(f"{what} is corrupt: {error!r}") from None

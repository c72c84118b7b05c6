"""A version's record, whose canonical bytes make its id, and what the catalogue knows of where it lies."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from weightvc.errors import Corrupt, Refused, Unsupported
from weightvc.objects import frame

RECORD_LIMIT: Final = 8 << 10
"""Bytes of a record at most: it stands in the root for a while, which has to stay small."""


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
    """Make a version's record and id. Raises Refused for labels or metadata that JSON cannot keep exactly."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise Refused(f"step={step!r}: a step is a whole number from 0")
    if run is not None and not isinstance(run, str):
        raise Refused(f"run={run!r}: a run is a string")
    if not isinstance(message, str):
        raise Refused(f"message={message!r}: a message is a string")
    labels = {k: v for k, v in (("run", run), ("step", step)) if v is not None}
    fields = {
        "author": author,
        "elements": elements,
        "generation": max((p.generation + 1 for p in parents), default=0),
        "labels": labels,
        "layout": layout,
        "message": message,
        "metadata": dict(metadata or {}),
        "nbytes": nbytes,
        "parents": [p.id for p in parents],
        "time": time.time_ns() // 1000 if now is None else now,
        "tree": tree,
        "weightvc": "version 1",
    }
    try:
        record = frame.canonical(fields)
        if json.loads(record) != fields:
            raise ValueError("it does not come back the same from JSON")
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"metadata cannot be kept exactly as JSON: {error}; use strings and numbers") from None
    if len(record) > RECORD_LIMIT:
        raise Refused(
            f"the version's record has {len(record)} bytes, {RECORD_LIMIT} at most: "
            "put long texts and large metadata into a side file"
        )
    return read(record.decode())


def read(record: str) -> Version:
    """A version from its record. Raises Corrupt if it is not one."""
    try:
        fields = json.loads(record)
        frame.check_type(fields["weightvc"], "version 1", "a version's record")
        labels = fields["labels"]
        return Version(
            id=frame.digest(record.encode()).hex(),
            record=record,
            tree=fields["tree"],
            layout=fields["layout"],
            parents=tuple(fields["parents"]),
            generation=fields["generation"],
            step=labels.get("step"),
            run=labels.get("run"),
            message=fields["message"],
            author=fields["author"],
            time=fields["time"],
            metadata=fields["metadata"],
            elements=fields["elements"],
            nbytes=fields["nbytes"],
        )
    except Unsupported:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Corrupt(f"a version's record is corrupt: {error!r}") from None

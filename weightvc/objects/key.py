"""Storage keys, which are never reused: kind/digest.begin-transaction-number.

The digest is of the object's content; `begin` is the root's sequence number when the transaction began;
the transaction is 128 random bits; the number counts its objects. So no upload can be mistaken for another
and a key that was deleted never lives again.
"""

import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from weightvc.errors import Corrupt
from weightvc.objects import frame

ROOT: Final = "root"
"""The one key whose object changes."""

OBJECT: Final = re.compile(
    r"(manifest|pack|schema|layout|file|segment|page)/([0-9a-f]{64})\.([0-9]{1,19})-([0-9a-f]{32})-([0-9]{1,9})"
)
"""Keys of what transactions upload."""
PIN: Final = re.compile(r"pin/[0-9a-f]{32}")
"""Keys of pins: a reader's lease or a writer's transaction."""
COPY: Final = re.compile(r"root\.d/([0-9]{19})-[0-9a-f]{32}")
"""Keys of copies of the root: its sequence number and its write id."""
PROBE: Final = re.compile(r"probe/[0-9a-f]{32}-[0-9a-z]{1,9}")
"""Keys of what is written to learn something of the store, and then deleted."""


class Key(NamedTuple):
    """A key taken apart."""

    kind: str
    digest: str
    begin: int
    transaction: str
    number: int


def parse(key: object, kind: str | None = None) -> Key:
    """Take a key apart; raises Corrupt unless it is one (of `kind`)."""
    match = OBJECT.fullmatch(key) if isinstance(key, str) else None
    if match is None or (kind is not None and match[1] != kind):
        raise Corrupt(f"{str(key)[:200]!r} is not the key of a {kind or 'weightvc'} object")
    return Key(match[1], match[2], int(match[3]), match[4], int(match[5]))


def checked(key: object, kind: str) -> str:
    """`key` itself, once it is seen to be one of `kind`; raises Corrupt."""
    parse(key, kind)
    return str(key)


def found(value: Any) -> Iterator[str]:
    """Whatever looks like a key in fields that are not known here: a later writer may mean it."""
    if isinstance(value, str):
        if OBJECT.fullmatch(value) is not None:
            yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from found(name)
            yield from found(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from found(one)


def check(key: str, data: frame.Buffer) -> None:
    """Raise Corrupt unless `data` is what `key` names."""
    if frame.digest(data).hex() != parse(key).digest:
        raise Corrupt(f"{key} is corrupt: its {len(data)} bytes are not what its name says")


def copy(sequence: int, write: str) -> str:
    """The key of a copy of the root."""
    return f"root.d/{sequence:019}-{write}"


class Transaction:
    """Makes the names of one transaction's objects."""

    def __init__(self, begin: int, ident: str | None = None, *, number: int = 0, step: int = 1) -> None:
        """Processes share one by its `ident`: each counts from a `number` of its own, in the same steps."""
        self.begin = begin
        self.id = secrets.token_hex(16) if ident is None else ident
        self._next = number
        self._step = step
        self._lock = threading.Lock()

    def key(self, kind: str, data: frame.Buffer) -> str:
        """A fresh key for `data`."""
        with self._lock:
            number = self._next
            self._next += self._step
        return f"{kind}/{frame.digest(data).hex()}.{self.begin}-{self.id}-{number}"

"""The shelf: immutable objects by key, from the cache or the store, checked before anybody sees them."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from weightvc.cache import Cache
from weightvc.errors import AccessDenied, Corrupt, KeyNotFound
from weightvc.objects import catalogue, frame, key, layout, manifest, schema
from weightvc.objects import root as roots
from weightvc.objects.catalogue import Catalogue, Entry, SegmentRef
from weightvc.objects.root import Root
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.protocol.meter import Meter
from weightvc.sources.header import collector_paused
from weightvc.stores.base import Store

T = TypeVar("T")
SCHEMAS_KEPT = 4
KEPT = {"manifest": 4, "schema": 4, "layout": 4, "segment": 64, "keys": 1024, "page": 4}
"""Decoded objects that are remembered, by kind: manifests are large, and segments are asked for again and again."""


class Shelf:
    """Reads objects; keeps the last decoded ones. Thread-safe."""

    def __init__(self, store: Store, cache: Cache | None) -> None:
        self.store = store
        self.cache = cache
        self._decoded: dict[str, OrderedDict[str, Any]] = {kind: OrderedDict() for kind in KEPT}
        self._schemas: dict[str, Schema] = {}
        self._lock = threading.Lock()
        self.meter = Meter()

    def metered(self, meter: Meter) -> Self:
        """This shelf, for a read of which `meter` is to tell how long its parts take."""
        made = copy.copy(self)
        made.meter = meter
        return made

    def get(self, name: str, *, keep: bool = True) -> frame.Buffer:
        """An object's bytes. `keep` puts it into the cache. Raises Corrupt, or what the store raises."""
        with self.meter.part("fetch"):
            if self.cache is None:
                return self._fetch(name)
            if keep:
                return self.cache.fetched(name, lambda: self._fetch(name))
            held = self.cache.get(name)
            return self._fetch(name) if held is None else held

    def _fetch(self, name: str) -> frame.Buffer:
        # Bytes may be bad on the way as well as at rest: only a second bad copy is called corrupt.
        for last in (False, True):
            got = self.store.get(name)
            assert got is not None
            try:
                with self.meter.part("verify"):
                    key.check(name, got.data)
            except Corrupt:
                if last:
                    raise
                continue
            return got.data
        raise AssertionError

    def put(self, transaction: key.Transaction, kind: str, data: frame.Buffer, *, keep: bool = True) -> str:
        """Upload an object under a fresh key, which is returned."""
        name = transaction.key(kind, data)
        self.store.put(name, bytes(data))
        if self.cache is not None and keep:
            self.cache.put(name, data)
        return name

    def _decode(self, name: str, kind: str, read: Callable[[frame.Buffer, str], T], what: str | None = None) -> T:
        """An object decoded, remembered among others of its kind, or as `what`."""
        held = self._decoded[what or kind]
        with self._lock:
            if name in held:
                held.move_to_end(name)
                found: T = held[name]
                return found
        data = self.get(key.checked(name, kind))
        with self.meter.part("decode"), collector_paused():
            made = read(data, name)
        with self._lock:
            self._remember(what or kind, name, made)
        return made

    def _remember(self, kind: str, name: str, made: Any) -> None:
        held = self._decoded[kind]
        held[name] = made
        held.move_to_end(name)
        while len(held) > KEPT[kind]:
            held.popitem(last=False)

    def schema(self, name: str, digest: str) -> Schema:
        """The schema under a key, whose digest is known. Raises Corrupt if it is another one."""
        with self._lock:
            known = self._schemas.get(digest)
            if known is not None:
                self._remember("schema", name, known)
                return known
        made = self._decode(name, "schema", schema.decode)
        if made.digest != digest:
            raise Corrupt(f"{name} is corrupt: it is not the schema {digest[:12]}")
        self.learn(made)
        return made

    def schema_at(self, name: str) -> Schema:
        """The schema under a key."""
        return self._decode(name, "schema", schema.decode)

    def schema_of(self, tensors: Sequence[TensorInfo]) -> Schema:
        """The schema of some tensors: the one at hand, if it is the same."""
        with self._lock:
            known = list(self._schemas.values())
        for one in known:
            if one.tensors == tensors:
                return one
        made = Schema(tensors)
        self.learn(made)
        return made

    def learn(self, made: Schema) -> None:
        """Remember a schema: nearly every version of a repository has the same."""
        with self._lock:
            self._schemas[made.digest] = made
            while len(self._schemas) > SCHEMAS_KEPT:
                self._schemas.pop(next(iter(self._schemas)))

    def manifest(self, name: str) -> manifest.Manifest:
        """The manifest under a key."""
        return self._decode(name, "manifest", manifest.decode)

    def layout(self, name: str) -> layout.Stored:
        """The layout under a key, with its small contents."""
        return self._decode(name, "layout", layout.decode)

    def segment(self, ref: SegmentRef) -> list[Entry]:
        """The entries of a segment."""
        return self._decode(ref.key, "segment", catalogue.decode_segment)

    def keys(self, ref: SegmentRef) -> catalogue.Keys:
        """What the entries of a segment name."""
        with self._lock:
            entries = self._decoded["segment"].get(ref.key)
        if entries is not None:
            return catalogue.keys_of(entries)
        return self._decode(ref.key, "segment", catalogue.decode_keys, "keys")

    def page(self, name: str) -> dict[str, Any]:
        """The head of a page."""
        return self._decode(name, "page", lambda data, what: frame.decode(frame.PAGE, data, what)[0])

    def catalogue(self, root: Root) -> Catalogue:
        """The catalogue of a root."""
        return Catalogue(root.tail, root.segments, self.segment, lambda error: self.newer(root, error).segments)

    def newer(self, root: Root, error: KeyNotFound | AccessDenied) -> Root:
        """The root that there is by now, for who went by an older one and missed an object that it names (`error` is
        one of MISSING).

        Raises KeyNotFound if there is none: then the object is lost; or the error itself where access was denied.
        """
        got = self.store.get(key.ROOT)
        assert got is not None
        now = roots.decode(got.data, f"{self.store.url}: root")
        if (now.repository, now.sequence) == (root.repository, root.sequence):
            if not isinstance(error, KeyNotFound):
                raise error
            raise KeyNotFound(f"{error}, though the root names it: run `weightvc fsck`") from None
        return now

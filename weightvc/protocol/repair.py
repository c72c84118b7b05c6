"""Repair: what is missing or bad is put there again, or the catalogue is led around it. Nothing is invented.

Where an object's own bytes are found (in a cache, or in a copy of the repository) they are put under its own key. A
key holds the digest of its object, so this is the upload of the writer once more: no other bytes can come to stand
there, readers find it where they look, and there is nothing to publish. It is safe beside a collector. What a root
names is on no list of the dead; and if the object is let go of while we write, what we wrote is one more upload that
nothing names, which the next collection finds. A fresh name would be worse: commits on the way refer to their
parent's schema, layout and files by key, and packs are kept by the transaction of their manifest, so that one bad
pack would cost a copy of all others.

Where the bytes are not to be found, but the weights are (in a checkout, in a cached tree, in a version with the same
tree, by another way), the version gets a new base, under fresh names, and its entry is written anew by one swap of
the root. Before that its tree has been compared with its digest. Killed anywhere before, all is as it was.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import cast

from weightvc.errors import Conflict, Corrupt, NotFound, Refused
from weightvc.objects import frame, key, layout, manifest
from weightvc.objects.catalogue import Entry, Place, SegmentRef, Way
from weightvc.objects.manifest import Manifest
from weightvc.objects.root import Root
from weightvc.objects.schema import Schema
from weightvc.objects.version import Edge
from weightvc.protocol import commit, rewrite, salvage, swap
from weightvc.protocol.fsck import described
from weightvc.protocol.refs import encode_tags
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.stock import Stock
from weightvc.protocol.stored import VersionSource
from weightvc.protocol.survey import Survey, files_of, learn_packs, led, survey, ways
from weightvc.sources.base import Layout, Source

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Repair:
    """One repair. `found` is brought up to date as things are mended; `done` says what was."""

    shelf: Shelf
    found: Survey
    stock: Stock
    progress: Progress | None = None
    done: list[str] = field(default_factory=list)
    _new: dict[str, tuple[Place, Place, str]] = field(default_factory=dict)
    _transaction: key.Transaction = field(default_factory=lambda: key.Transaction(0))

    def run(self) -> None:
        """Mend what can be mended. Raises Conflict if somebody else changed what was to be mended, Expired if the
        collector went past, and what the store raises; what was put there before stays, and is right."""
        again = {ref.key for ref in self.found.root.segments if ref.key in self.found.bad}
        self._objects()
        if again - self.found.bad.keys():
            self._look_again()
        if self._catalogue():
            self._look_again()
        self._objects()
        self._transaction = key.Transaction(self.found.root.sequence)
        self._lost()
        self._broken()
        self._publish()
        if self.done:
            self._look_again()

    def _look_again(self) -> None:
        """A new survey, in which what reading has found to be bad, and is as it was, stays bad."""
        before, now = self.found, survey(self.shelf)
        salvage.tell(now)
        for entry in now.entries.values():
            for way in ways(entry):
                for base in (True, False):
                    if (way.manifest, base) in before.packs:
                        now.packs[way.manifest, base] = before.packs[way.manifest, base]
        named = now.named()
        for name, fault in before.bad.items():
            if name in named:
                now.bad.setdefault(name, fault)
        now.notes[:] = dict.fromkeys([*before.notes, *now.notes])
        self.found = now

    # Objects whose own bytes are found

    def _objects(self) -> None:
        found = self.found
        again = True
        while again:
            again = False
            for name in sorted(found.bad):
                if name != key.ROOT and self._again(name):
                    again = True
                    for entry in found.entries.values():
                        for way in ways(entry):
                            if way.manifest == name:
                                learn_packs(found, entry, way)

    def _again(self, name: str) -> bool:
        """Put an object's own bytes under its key, if they are found, and read them back."""
        found = self.found
        data = self.stock.object(name)
        if data is None and key.parse(name).kind in ("schema", "layout", "file"):
            data = self.stock.made().get(key.parse(name).digest)
        if data is None:
            return False
        key.check(name, data)
        self.shelf.store.put(name, bytes(data))
        fault = found.bad.pop(name)
        try:
            found.shelf.get(name, keep=False)
        except (Corrupt, NotFound):
            found.notes.append(f"{name} was put there again, and does not read back: look at the store")
            return False
        found.listed[name] = len(data)
        self.done.append(f"{name} ({fault}): put there again")
        return True

    # The catalogue

    def _catalogue(self) -> bool:
        """Segments and the page of tags, told by manifests and operations; whether anything was done."""
        found, root = self.found, self.found.root
        lost = [ref for ref in root.segments if ref.key in found.bad]
        tags = root.tags if root.tags in found.bad else None
        collector = root.collector if root.collector in found.bad else None
        if not lost and tags is None and collector is None:
            return False
        transaction = key.Transaction(root.sequence)
        told = found.told
        page = self._page(transaction, told) if tags is not None else None
        placed = self._segments(transaction, lost, told)

        def make(now: Root) -> Root:
            if not {ref.key for ref in lost} <= {ref.key for ref in now.segments}:
                raise Conflict("the catalogue was written anew meanwhile: run fsck again")
            segments = tuple(new for ref in now.segments for new in placed.get(ref.key, [ref]))
            return now.next(
                segments=segments,
                tags=page if now.tags == tags else now.tags,
                collector=None if now.collector == collector else now.collector,
            )

        swap.change(self.shelf, make, transaction)
        if lost and len(told) < sum(ref.count for ref in lost):
            found.notes.append(
                "what is not known any more of lost segments: moves of branches and tags (their reflogs), and "
                "versions that nothing was made on"
            )
        for ref in lost:
            count = sum(new.count for new in placed[ref.key])
            self.done.append(f"{ref.key}: {count} of its {ref.count} operations were found again, and catalogued")
        if tags is not None:
            self.done.append(f"{tags}: the tags were set again from the operations that set them")
        if collector is not None:
            self.done.append(f"{collector}: the collector begins anew")
        return True

    def _segments(
        self, transaction: key.Transaction, lost: list[SegmentRef], told: list[Entry]
    ) -> dict[str, list[SegmentRef]]:
        """The segments that take the place of each lost one."""
        found = self.found
        placed: dict[str, list[SegmentRef]] = {}
        rest = list(told)
        for i, ref in enumerate(found.root.segments):
            if ref not in lost:
                continue
            # What happened before the next part that can be read begins; the last one takes the rest.
            after = [one for one in found.root.segments[i + 1 :] if one not in lost]
            border = found.shelf.segment(after[0])[0].sequence if after else None
            mine = [entry for entry in rest if border is None or entry.sequence < border or ref is lost[-1]]
            rest = [entry for entry in rest if entry not in mine]
            placed[ref.key] = rewrite.put(self.shelf, transaction, mine) if mine else []
        return placed

    def _page(self, transaction: key.Transaction, told: list[Entry]) -> str:
        found = self.found
        operations = sorted([*found.others, *told], key=lambda entry: entry.sequence)
        here, deleted = salvage.tags(operations)
        known = found.entries.keys() | {entry.new for entry in operations if entry.version is not None}
        for name in [name for name, ident in here.items() if ident not in known]:
            found.notes.append(f"the tag {name!r} named version {here.pop(name)[:12]}, which is not known any more")
        return self.shelf.put(transaction, "page", encode_tags(here, deleted))

    # Versions that get another way

    def _lost(self) -> None:
        """Give a base to versions that no way leads to, if their weights are found: the oldest first, since patches
        lead on from them."""
        found = self.found
        tried: set[str] = set()
        again = True
        while again:
            again = False
            readable = found.readable()
            twins = {_tree(found.entries[ident]): ident for ident in readable}
            lost = [entry for ident, entry in found.entries.items() if ident not in readable and ident not in tried]
            for entry in sorted(lost, key=_generation):
                tried.add(entry.new or "")
                if self._rebuild(entry, twins.get(_tree(entry))):
                    again = True
                    break

    def _rebuild(self, entry: Entry, twin: str | None) -> bool:
        found = self.found
        tree = _tree(entry)
        source: Source | None
        if twin is not None:
            refs = found.refs()
            with closing(VersionSource(found.shelf, refs, refs.entry(twin), whole=True)) as other:
                if self._base(entry, cast(Source, other), [], f"the same weights in version {twin[:12]}"):
                    return True
        if (source := self.stock.source(tree)) is not None and self._base(entry, source, [], "a checkout"):
            return True
        assert entry.place is not None
        if entry.place.schema in found.bad:
            return False
        try:
            schema = found.shelf.schema(entry.place.schema, self._schema_digest(entry.place.schema))
        except (Corrupt, NotFound):
            return False
        source = self.stock.cached(tree, schema)
        return source is not None and self._base(entry, source, [], "a cached tree")

    def _schema_digest(self, name: str) -> str:
        from weightvc.objects import schema

        return schema.decode(self.found.shelf.get(name, keep=False), name).digest

    def _broken(self) -> None:
        """Lead the catalogue around what is broken of versions that have another way."""
        found = self.found
        readable = found.readable() if found.bad else {}
        for ident in readable:
            entry = found.entries[ident]
            whole = [
                way
                for way in ways(entry)
                if not any(found.broken(entry, way, base=edge.source is None) for edge in way.edges)
            ]
            if len(whole) == len(ways(entry)):
                continue
            assert entry.place is not None
            first = next((way for way in whole if self._ends(way, ident)), None)
            if first is not None:
                kept = [first, *(way for way in whole if way is not first)]
                self._enter(entry, led(entry.place, kept), "led around what is bad, by another way")
                continue
            refs = found.refs()
            with closing(VersionSource(found.shelf, refs, refs.entry(ident), whole=True)) as other:
                self._base(entry, cast(Source, other), whole, "another way")

    def _ends(self, way: Way, ident: str) -> bool:
        """Whether whoever follows first ways only, from this one on, comes to a base."""
        seen: set[str | None] = {ident}
        while True:
            sources = [edge.source for edge in way.edges]
            if None in sources:
                return True
            if not sources or sources[0] in seen:
                return False
            seen.add(sources[0])
            below = self.found.entries.get(sources[0] or "")
            if below is None:
                return False
            way = ways(below)[0]

    def _base(self, entry: Entry, source: Source, kept: Iterable[Way], of: str) -> bool:
        """Store a version whole, under fresh names, if `source` has its weights; `kept` are ways that stay."""
        found, version, old = self.found, entry.version, entry.place
        assert version is not None
        assert old is not None
        schema = Schema(source.tensors)
        before = self.shelf.store.stats.bytes_written
        build = commit.Build(
            self.shelf, source, schema, None, self._transaction, base=True, codec="small", progress=self.progress
        )
        try:
            tree, base, _ = build.run()
        except (Corrupt, NotFound, Refused) as error:
            found.notes.append(f"version {version.short} could not be made of {of}: {error}")
            return False
        finally:
            build.drop()
        assert base is not None
        if tree.digest != version.tree:
            found.notes.append(f"version {version.short} could not be made of {of}: its weights are others")
            return False
        place = self._beside(entry, source, schema)
        files = self._contents(place)
        same = {place.schema, place.layout, *files.values()} == {old.schema, old.layout, *old.files}
        body = manifest.encode(
            Manifest(version, entry.name, place.schema, schema.digest, place.layout, files, tree.digests, base, None)
        )
        place = replace(
            place,
            manifest=self.shelf.put(self._transaction, "manifest", body),
            files=tuple(files.values()),
            packs=len(base.packs),
            edges=(Edge(None, base.nbytes, schema.elements),),
            ways=tuple(kept) if same else (),
        )
        place = replace(place, nbytes=self.shelf.store.stats.bytes_written - before)
        self._enter(entry, place, f"stored whole again, from {of}")
        return True

    def _beside(self, entry: Entry, source: Source, schema: Schema) -> Place:
        """The place with another schema or layout where its own are bad and `source` has them."""
        found, place, version = self.found, entry.place, entry.version
        assert place is not None
        assert version is not None
        if place.schema in found.bad:
            place = replace(place, schema=self.shelf.put(self._transaction, "schema", schema.encode()))
        if any(name in found.bad for name in files_of(place)) and (laid := _layout(source)) is not None:
            stored = layout.make(laid)
            if stored.digest == version.layout:
                data, bodies = layout.encode(stored)
                files = [self.shelf.put(self._transaction, "file", body) for body in bodies.values()]
                name = self.shelf.put(self._transaction, "layout", data)
                place = replace(place, layout=name, files=tuple(files))
        return place

    def _contents(self, place: Place) -> dict[str, str]:
        """The file objects of a place by the digest of their content; those that cannot be read are left out."""
        out = {}
        for name in place.files:
            try:
                _, sections = frame.decode(frame.FILE, self.found.shelf.get(name, keep=False), name)
                content = frame.decompress(sections[0], layout.HEADER_LIMIT, name)
            except (Corrupt, NotFound, IndexError):
                continue
            out[frame.digest(content).hex()] = name
        return out

    def _enter(self, entry: Entry, place: Place, how: str) -> None:
        """Have an entry written anew. It counts as done once it is published."""
        ident = entry.new or ""
        assert entry.place is not None
        first = self._new[ident][0] if ident in self._new else entry.place
        self._new[ident] = (first, place, f"version {described(entry)}: {how}")
        self.found.entries[ident] = replace(entry, place=place)

    def _publish(self) -> None:
        if not self._new:
            return
        entered: set[str] = set()

        def edit(entry: Entry) -> Entry | None:
            new = self._new.get(entry.new or "")
            if new is None or entry.place != new[0]:
                return None
            old, place, _ = new
            entered.add(entry.new or "")
            gone = {key.parse(way.manifest).transaction for way in old.all_ways}
            gone -= {key.parse(way.manifest).transaction for way in place.all_ways}
            return replace(entry, place=place, released=tuple(dict.fromkeys([*entry.released, *sorted(gone)])))

        def make(root: Root) -> Root:
            entered.clear()
            tail, segments = rewrite.rewritten(self.shelf, root, self._transaction, edit)
            return root.next(tail=tail, segments=segments)

        swap.change(self.shelf, make, self._transaction)
        for ident, (_, _, how) in self._new.items():
            if ident in entered:
                self.done.append(how)
            else:
                self.found.notes.append(
                    f"version {ident[:12]} was changed by somebody else meanwhile: run fsck again"
                )


def _layout(source: Source) -> Layout | None:
    try:
        return source.layout
    except (Corrupt, NotFound):
        return None  # of another version, and as bad


def _tree(entry: Entry) -> str:
    assert entry.version is not None
    return entry.version.tree


def _generation(entry: Entry) -> int:
    assert entry.version is not None
    return entry.version.generation


def needed(found: Survey) -> list[str]:
    """What would be needed to mend what is still bad."""
    out = []
    for damage in found.damages():
        if damage.key == key.ROOT:
            out.append(
                "root: a branch or tag that names what is there (`weightvc reset`, `weightvc tag -d`); and for "
                "versions without a way, checkouts of them (--from)"
            )
            continue
        what = f"{damage.key}: its own bytes, from a cache or a copy of the repository (--from)"
        hurt = [*damage.lost[:1], *damage.elsewhere[:1]]
        if hurt and key.parse(damage.key).kind in ("manifest", "pack"):
            one = hurt[0]
            tree = _tree(found.entries[one.id])
            what += f"; or a checkout of version {described(one)}, the weights of tree {tree[:12]}"
        elif damage.files:
            what += f"; or the files of version {described(damage.files[0])}"
        out.append(what)
    return out

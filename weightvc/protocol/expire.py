"""Expiry: which versions retention lets go of, and in which order: all reasoning about the graph is here.

A version that no rule keeps is let go of in two stages. While a kept version is reached by its patch it stays as a
stepping stone: marked as expired, still readable as a step, promised to nobody. Once nothing kept needs it, its entry
becomes "expired": the record stays, so that log and ancestry do, and no key does, so that the collector may come.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from weightvc.errors import Corrupt, Refused
from weightvc.objects import retention
from weightvc.objects.catalogue import EXPIRED, Entry, Place, Way
from weightvc.objects.key import Transaction
from weightvc.objects.retention import Policy
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.protocol import live, pins
from weightvc.protocol.plan import needed
from weightvc.protocol.refs import tag_page
from weightvc.protocol.rewrite import rewritten
from weightvc.protocol.shelf import Shelf

SKEW: Final = 86400
"""Seconds that a writer's clock may be ahead of the store's before it is not believed."""
State = Literal["kept", "stone", "expired"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a version: `rule` says what keeps it, or why it goes."""

    version: Version
    state: State
    rule: str
    nbytes: int
    """Bytes that it has stored."""
    branch: str | None
    """The branch that it was committed to."""


@dataclass(slots=True)
class Expiry:
    """What a run decided, newest version first."""

    decisions: list[Decision] = field(default_factory=list)
    policy: Policy = field(default_factory=Policy)
    changed: int = 0
    """Entries that were written anew."""
    released: int = 0
    """Bytes that the collector may take now."""


@dataclass(slots=True)
class _History:
    """The catalogue, taken apart."""

    entries: list[Entry]
    """Oldest first."""
    versions: dict[str, Entry]
    times: dict[str, float]
    """When versions came, in seconds: no earlier than anything before them."""
    dropped: list[tuple[float, str]]
    """Heads and tags that were moved or deleted, and when; the newest first."""


def _history(entries: list[Entry], now: float) -> _History:
    found = _History(entries, {}, {}, [])
    latest = 0.0
    for entry in entries:
        # A clock that is behind must not make a version older than what was there before it, and one that is far
        # ahead is not believed.
        said = entry.time / 1e6
        if said <= now + SKEW:
            latest = max(latest, said)
        at = latest if said <= now + SKEW else now
        if entry.version is not None:
            found.versions[entry.version.id] = entry
            found.times[entry.version.id] = at
        elif entry.old is not None:
            found.dropped.append((at, entry.old))
    found.dropped.reverse()
    return found


def decide(
    entries: Sequence[Entry],
    branches: Mapping[str, str],
    tags: Mapping[str, str],
    leased: Mapping[str, str],
    rules: Policy,
    now: float,
) -> tuple[dict[str, tuple[State, str]], dict[str, Way]]:
    """What becomes of each version that is there, and why; and the ways by which those that stay are read. `entries`
    are the whole catalogue, oldest first; `leased` has the pins of versions; `now` is in seconds.

    Raises Corrupt for a version that is to be kept and that nothing leads to.
    """
    history = _history(list(entries), now)
    kept: dict[str, str] = {}
    for ident, pin in leased.items():
        kept[ident] = f"lease {pin}"
    reachable: set[str] = set()
    for name in sorted(branches):
        own = rules.of(name)
        for at, made in enumerate(_ancestors(history, [branches[name]])):
            reachable.add(made.id)
            age = now - history.times[made.id]
            rule = f"head of {name}" if at == 0 else f"no rules for {name}" if own is None else None
            if own is not None and at > 0 and (found := own.keeps(made, at, age)) is not None:
                rule = f"{found} of {name}"
            if rule is not None and history.versions[made.id].expired is None:
                kept.setdefault(made.id, rule)
    for name, head in branches.items():
        kept[head] = f"head of {name}"
    # What only tags lead to has no branch: the general rules, as far as they do not count from a head.
    general = rules.branches.get(retention.ALL)
    for made in _ancestors(history, tags.values(), reachable):
        rule = "no rules for what tags lead to" if general is None else None
        if general is not None and (
            found := replace(general, last=None).keeps(made, 0, now - history.times[made.id])
        ):
            rule = f"{found} of tags"
        if rule is not None and history.versions[made.id].expired is None:
            kept.setdefault(made.id, rule)
    for name in sorted(tags):
        kept[tags[name]] = f"tag {name}"
    _keep_unreachable(history, reachable, rules, now, kept)
    there = {ident: entry for ident, entry in history.versions.items() if entry.place is not None}
    kept = {ident: rule for ident, rule in kept.items() if ident in there}
    steps = ways(there, kept)
    decided: dict[str, tuple[State, str]] = {}
    for ident in there:
        if ident in kept:
            decided[ident] = "kept", kept[ident]
        elif ident in steps:
            decided[ident] = "stone", "others are patched from it"
        else:
            decided[ident] = "expired", "no rule keeps it" if ident in reachable else "nothing leads to it"
    return decided, steps


def _ancestors(history: _History, heads: Iterable[str], known: set[str] | None = None) -> Iterable[Version]:
    """Versions and what they descend from, the greatest generations first, without those `known`, to which they are
    added: so a walk from each of many heads costs no more than what it finds."""
    seen = set() if known is None else known
    heap: list[tuple[int, int, str]] = []

    def push(ident: str) -> None:
        entry = history.versions.get(ident)
        if ident not in seen and entry is not None and entry.version is not None:
            seen.add(ident)
            heapq.heappush(heap, (-entry.version.generation, -entry.sequence, ident))

    for head in heads:
        push(head)
    while heap:
        made = history.versions[heapq.heappop(heap)[2]].version
        assert made is not None
        yield made
        for parent in made.parents:
            push(parent)


def _keep_unreachable(
    history: _History, reachable: set[str], rules: Policy, now: float, kept: dict[str, str]
) -> None:
    """Keep what nothing leads to any more for a while after that came to be so."""
    lost = {ident for ident in history.versions if ident not in reachable}
    since = {ident: history.times[ident] for ident in lost}
    seen = set(reachable)
    for at, ident in history.dropped:
        for made in _ancestors(history, [ident], seen):
            since[made.id] = max(since[made.id], at)
    for ident in lost:
        if history.versions[ident].expired is not None:
            continue
        if rules.unreachable is None:
            kept.setdefault(ident, "no rule for what nothing leads to")
        elif now - since[ident] < rules.unreachable:
            kept.setdefault(ident, f"unreachable for less than {retention.duration(rules.unreachable)}")


# Ways


def ways(there: Mapping[str, Entry], kept: Iterable[str]) -> dict[str, Way]:
    """By which manifest each version is read that is kept or is a step to one that is, so that few steps are kept.

    Followed from version to version, these ways end at a base. Raises Corrupt for a kept version that has no way.
    """
    wanted = set(kept)
    found = needed(there.values(), wanted)
    for ident in sorted(wanted.difference(found)):
        raise Corrupt(
            f"version {ident[:12]} is to be kept, and no base or patches lead to it: nothing is let go of: run "
            "`weightvc fsck`"
        )
    return {ident: step.way for ident, step in found.items()}


def let_go(entry: Entry, sequence: int) -> Entry:
    """The entry of a version that nothing needs: with its record, and no key."""
    return replace(
        entry,
        op=EXPIRED,
        place=None,
        expired=sequence if entry.expired is None else entry.expired,
        released=_released(entry, ()),
        extra={},
    )


def _released(entry: Entry, left: Iterable[Way]) -> tuple[str, ...]:
    still = set(live.transactions(way.manifest for way in left))
    let = dict.fromkeys([*entry.released, *live.transactions(live.named(entry))])
    return tuple(one for one in let if one not in still)


def trimmed(entry: Entry, stays: Callable[[str], bool], main: Way | None) -> Entry:
    """The entry of a version that stays, without the ways that start from a version which goes. With `main`, that is
    the way that stands first, for readers that know of no other."""
    place = entry.place
    assert place is not None
    usable = [
        way
        for way in place.all_ways
        if way is main or way == main or any(edge.source is None or stays(edge.source) for edge in way.edges)
    ]
    first = main if main is not None else usable[0] if usable else place.all_ways[0]
    rest = tuple(way for way in usable if way != first)
    if (first, *rest) == place.all_ways:
        return entry
    new = Place(first.manifest, place.schema, place.layout, place.files, first.packs, first.edges, first.nbytes, rest)
    return replace(entry, place=new, released=_released(entry, (first, *rest)))


def grounded(there: Mapping[str, Entry]) -> set[str]:
    """Those versions that are reached from a base by first ways alone."""
    good: set[str] = set()
    for start in there:
        path: list[str] = []
        on_path: set[str] = set()
        at = start
        while at not in good and at not in on_path and at in there:
            path.append(at)
            on_path.add(at)
            place = there[at].place
            assert place is not None
            if any(edge.source is None for edge in place.edges):
                good.update(path)
                break
            source = next((edge.source for edge in place.edges), None)
            if source is None:
                break
            at = source
        else:
            if at in good:
                good.update(path)
    return good


# Run


def plan(
    shelf: Shelf, root: Root, transaction: Transaction, rules: Policy, now: float, *, force: bool = False
) -> tuple[Expiry, Root]:
    """What becomes of the versions of a root, and the root with that done, if it is the one that is swapped out: its
    tail and segments differ where anything changes, its sequence number does not yet.

    Raises Refused without branches, unless forced; Corrupt, NotFound and StoreError for what cannot be read.
    """
    if not root.branches and not force:
        raise Refused(
            f"{shelf.store.url} has no branches, and so nothing to keep: make one (`weightvc branch`), or use --force"
        )
    entries = [*(entry for ref in root.segments for entry in shelf.segment(ref)), *root.tail]
    tags = tag_page(shelf, root)[0]
    # After the root: see collect.mark.
    held = pins.read(shelf.store, now)
    decided, chosen = decide(entries, root.branches, tags, held.versions, rules, now)
    edits = _edits(entries, decided, chosen, {*root.branches.values(), *tags.values()}, root.sequence + 1)
    result = Expiry(policy=rules, changed=len(edits))
    for entry in reversed(entries):
        if entry.version is None or entry.place is None:
            continue
        state, rule = decided[entry.version.id]
        nbytes = sum(way.nbytes for way in entry.place.all_ways)
        result.decisions.append(Decision(entry.version, state, rule, nbytes, entry.name))
        new = edits.get(_name(entry))
        if new is not None:
            left = 0 if new.place is None else sum(way.nbytes for way in new.place.all_ways)
            result.released += nbytes - left
    if not edits:
        return result, root
    tail, segments = rewritten(shelf, root, transaction, lambda entry: edits.get(_name(entry)))
    return result, replace(root, tail=tail, segments=segments)


def _name(entry: Entry) -> tuple[int, str]:
    return entry.sequence, entry.version.id if entry.version is not None else ""


def _edits(
    entries: Iterable[Entry],
    decided: Mapping[str, tuple[State, str]],
    chosen: Mapping[str, Way],
    heads: set[str],
    sequence: int,
) -> dict[tuple[int, str], Entry]:
    """The entries that change, and what they become."""
    old = [entry for entry in entries if entry.version is not None and entry.place is not None]
    new: dict[str, Entry] = {}
    edits: dict[tuple[int, str], Entry] = {}

    def stays(ident: str) -> bool:
        return ident in decided and decided[ident][0] != "expired"

    for entry in old:
        ident = _name(entry)[1]
        state = decided[ident][0]
        if state == "expired":
            edits[_name(entry)] = let_go(entry, sequence)
            continue
        if state == "stone" and entry.expired is None:
            entry = replace(entry, expired=sequence)
        elif ident in heads and entry.expired is not None:
            entry = replace(entry, expired=None)
        new[ident] = trimmed(entry, stays, None)
    firm = grounded(new)
    for entry in old:
        ident = _name(entry)[1]
        if ident in new:
            made = new[ident] if ident in firm else trimmed(new[ident], stays, chosen[ident])
            if made != entry:
                edits[_name(entry)] = made
    return edits

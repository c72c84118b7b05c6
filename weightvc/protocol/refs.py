"""Refs: which names branches and tags may have, and what an expression like main@{step=121}~2 means.

NAME            a branch, else a tag
ID              a full version id, or at least 4 digits that only one version begins with
REF@{k=v,…}     the newest version in REF's first-parent history whose labels (step, run) are these
REF@{n}         where the branch pointed n moves ago
REF~n           the nth first parent
HEAD, @         the default branch
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from weightvc.errors import BadName, BranchMoved, Corrupt, Expired, Fenced, RefNotFound, WeightvcError
from weightvc.objects import frame
from weightvc.objects.catalogue import CLAIM, COMMIT, EXPIRED, Catalogue, Entry
from weightvc.objects.root import Root
from weightvc.objects.version import Version
from weightvc.protocol.shelf import Shelf
from weightvc.stores.base import MISSING

NAME_LIMIT: Final = 120
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*(/[A-Za-z0-9_][A-Za-z0-9._+=-]*)*")
_SUFFIX: Final = re.compile(r"~(?P<n>[0-9]{0,9})|\^|@\{(?P<at>[^{}]*)\}")
_ID: Final = re.compile(r"[0-9a-f]{4,64}")
_FULL: Final = re.compile(r"[0-9a-f]{64}")
_COUNT: Final = re.compile(r"[0-9]{1,9}")


def check_name(name: str, what: str = "branch") -> str:
    """`name` itself, if a branch or tag may have it. Every store takes the same names, and no two collide.

    Raises BadName for anything but parts of ASCII letters, digits and _ . + = - between single slashes, for a
    part that begins with . or - or ends with . or .lock, for HEAD, a full version id, and over 120 characters.
    """
    fault = None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fault = "use letters, digits and _ . + = - in parts between single slashes, none beginning with . or -"
    elif len(name) > NAME_LIMIT:
        fault = f"it has {len(name)} characters, {NAME_LIMIT} at most"
    elif any(part.endswith((".lock", ".")) or ".." in part for part in name.split("/")):
        fault = "no part may end in .lock or . or hold .."
    elif name.upper() == "HEAD" or re.fullmatch(r"[0-9a-fA-F]{64}", name):
        fault = "it would be taken for something else"
    if fault is not None:
        raise BadName(f"{name!r:.200} cannot name a {what}: {fault}")
    return name


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an expression means: the version's entry, and the branch if the expression is a branch's bare name."""

    entry: Entry
    branch: str | None


class Refs:
    """Resolves expressions against one root."""

    def __init__(self, shelf: Shelf, root: Root) -> None:
        self._shelf = shelf
        self._go_by(root)

    def _go_by(self, root: Root) -> None:
        self._root = root
        self.sequence = root.sequence
        self.catalogue: Catalogue = self._shelf.catalogue(root)

    def tags(self) -> dict[str, str]:
        """Tags and the versions that they name; of the newest root, if the page has been collected since."""
        try:
            return tag_page(self._shelf, self._root)[0]
        except MISSING as error:
            self._go_by(self._shelf.newer(self._root, error))
        return tag_page(self._shelf, self._root)[0]

    def name(self, branch: str) -> str:
        """The name of a branch that exists or once did; HEAD is the default one. Raises RefNotFound."""
        name = self._root.default if branch in ("HEAD", "@") else branch
        if name not in self._root.branches and next(self.moves(name), None) is None:
            raise RefNotFound(f"there is no branch {name!r:.200}: see `weightvc branch`")
        return name

    def head(self, branch: str) -> str | None:
        """The id of a branch's head, or None."""
        return self._root.branches.get(branch)

    @property
    def unread(self) -> int:
        """Segments of the catalogue that have not been read yet."""
        return self.catalogue.unread

    def find(self, ident: str, most: int | None = None) -> Entry | None:
        """The entry of a version, or None; reads segments for it, `most` at most if that is given."""
        return self.catalogue.find(ident, most)

    def entry(self, ident: str) -> Entry:
        """The entry of a version that the root refers to."""
        found = self.find(ident)
        if found is None:
            raise Corrupt(f"version {ident[:12]} is referred to and not in the catalogue")
        return found

    def resolve(self, expression: str | Version) -> Resolved:
        """What an expression, or a version by its id, means. Raises RefNotFound, or BadName for what is neither."""
        if isinstance(expression, Version):
            expression = expression.id
        if not isinstance(expression, str) or not expression:
            raise BadName(f"{expression!r:.200} is not a ref: name a branch, a tag or a version id")
        match = _SUFFIX.search(expression)
        base = expression[: match.start()] if match else expression
        suffixes = expression[match.start() :] if match else ""
        found = self._base(base, expression)
        branch = found.branch
        at = 0
        while at < len(suffixes):
            match = _SUFFIX.match(suffixes, at)
            if match is None:
                raise BadName(
                    f"{expression!r:.200}: {suffixes[at:]!r:.100} cannot be read: a ref ends in ~n, @{{n}} or "
                    "@{step=n}"
                )
            if match["at"] is None:
                found = Resolved(self._back(found.entry, int(match["n"] or 1), expression), None)
            elif _COUNT.fullmatch(match["at"]):
                if branch is None or at > 0:
                    raise BadName(f"{expression!r:.200}: @{{n}} follows the name of a branch")
                found = Resolved(self._moves_ago(branch, int(match["at"])), None)
            else:
                found = Resolved(self._labelled(found.entry, match["at"], expression), None)
            at = match.end()
        return found

    def _base(self, name: str, expression: str) -> Resolved:
        if name in ("HEAD", "@", ""):
            name = self._root.default
        if name in self._root.branches:
            return Resolved(self.entry(self._root.branches[name]), name)
        # A full id names no tag: it is found even where the page of tags cannot be read.
        full = _FULL.fullmatch(name) is not None
        if self._root.tags is not None and not full and (tagged := self.tags().get(name)) is not None:
            return Resolved(self.entry(tagged), None)
        if _ID.fullmatch(name):
            if full:
                found = self.catalogue.find(name)
                matches = [found] if found is not None else []
            else:
                matches = self.catalogue.matching(name)
            if len(matches) == 1:
                return Resolved(matches[0], None)
            if matches:
                ids = ", ".join(entry.new[:12] for entry in matches[:5] if entry.new)
                raise RefNotFound(f"{name!r} begins {len(matches)} version ids ({ids}): give more digits")
        if name == self._root.default:
            raise RefNotFound(f"the branch {name!r} has no version yet: make one with `weightvc commit`")
        branches = ", ".join(sorted(self._root.branches)[:10]) or "none"
        raise RefNotFound(
            f"{expression!r:.200} is no branch, tag or version here (branches: {branches}): see `weightvc log --all`"
        )

    def _back(self, entry: Entry, count: int, expression: str) -> Entry:
        for back in range(count):
            assert entry.version is not None
            if not entry.version.parents:
                raise RefNotFound(
                    f"{expression!r:.200} goes back past the first version ({entry.version.short}, ~{back}): see "
                    "`weightvc log`"
                )
            entry = self.entry(entry.version.parents[0])
        return entry

    def _moves_ago(self, branch: str, count: int) -> Entry:
        values = [entry.new for entry in self.moves(branch)]
        if count >= len(values):
            raise RefNotFound(
                f"the reflog of {branch!r} has {len(values)} entries, @{{{count}}} is past its end: see "
                f"`weightvc reflog {branch}`"
            )
        ident = values[count]
        if ident is None:
            raise RefNotFound(f"{branch!r} did not exist at @{{{count}}}: see `weightvc reflog {branch}`")
        return self.entry(ident)

    def _labelled(self, entry: Entry, text: str, expression: str) -> Entry:
        wanted: dict[str, str] = {}
        for part in text.split(","):
            name, separator, value = part.partition("=")
            if not separator or name.strip() not in ("step", "run"):
                raise BadName(f"{expression!r:.200}: between @{{ and }} stands a number, step=N or run=NAME")
            wanted[name.strip()] = value.strip()
        for candidate in self.history(entry):
            assert candidate.version is not None
            has = {"step": candidate.version.step, "run": candidate.version.run}
            if all(has[name] is not None and str(has[name]) == value for name, value in wanted.items()):
                return candidate
        raise RefNotFound(
            f"{expression!r:.200}: no version in that history is labelled {text:.100}: see `weightvc log`"
        )

    def history(self, entry: Entry) -> Iterator[Entry]:
        """`entry` and its first parents."""
        while True:
            yield entry
            assert entry.version is not None
            if not entry.version.parents:
                return
            entry = self.entry(entry.version.parents[0])

    def ancestors(self, entry: Entry) -> Iterator[Entry]:
        """`entry` and everything that it descends from, the greatest generations first."""
        import heapq

        def item(e: Entry) -> tuple[int, int, str]:
            assert e.version is not None
            return -e.version.generation, -e.sequence, e.version.id

        heap, seen = [item(entry)], {entry.new}
        while heap:
            current = self.entry(heapq.heappop(heap)[2])
            yield current
            assert current.version is not None
            for parent in current.version.parents:
                if parent not in seen:
                    seen.add(parent)
                    heapq.heappush(heap, item(self.entry(parent)))

    def descends(self, entry: Entry, ancestor: str) -> bool:
        """Whether `ancestor` is `entry` or among what it descends from."""
        goal = self.entry(ancestor)
        assert goal.version is not None
        for candidate in self.ancestors(entry):
            assert candidate.version is not None
            if candidate.version.id == ancestor:
                return True
            if candidate.version.generation < goal.version.generation:
                return False
        return False

    def moves(self, branch: str) -> Iterator[Entry]:
        """Every operation that moved a branch, newest first: its reflog."""
        for entry in self.catalogue:
            if entry.name == branch and entry.op in (COMMIT, EXPIRED, "branch", "reset", "delete", "restore"):
                yield entry


def promised(entry: Entry) -> Entry:
    """`entry` itself, if its version is there to be read: raises Expired if retention has let it go."""
    if entry.gone:
        raise Expired(
            f"version {(entry.new or '')[:12]} has expired: retention let it go (`weightvc expire`); `weightvc log` "
            "shows which versions are left. What has to stay is kept by a tag"
        )
    return entry


def tag_page(shelf: Shelf, root: Root) -> tuple[dict[str, str], dict[str, str]]:
    """Tags, and deleted tags with what they named, so that the name is not given to another version by mistake."""
    if root.tags is None:
        return {}, {}
    page = shelf.page(root.tags)
    frame.check_type(page.get("weightvc"), "tags 1", root.tags)
    return _ids(page.get("tags"), root.tags), _ids(page.get("deleted"), root.tags)


def _ids(named: Any, what: str) -> dict[str, str]:
    if not isinstance(named, dict) or not all(isinstance(i, str) and _FULL.fullmatch(i) for i in named.values()):
        raise Corrupt(f"{what} is corrupt: it does not map tags to version ids")
    return dict(named)


def encode_tags(tags: dict[str, str], deleted: dict[str, str]) -> bytes:
    """The page of tags as a stored object."""
    return frame.encode(frame.PAGE, {"deleted": deleted, "tags": tags, "weightvc": "tags 1"})


def check_epoch(shelf: Shelf, root: Root, branch: str, epoch: int | None) -> None:
    """Raise Fenced unless the branch is claimed by the writer with this epoch (None: by nobody)."""
    claimed, by = root.writers.get(branch), ""
    if claimed == epoch:
        return
    if claimed is None:
        why = "nobody holds it any more (it was deleted, or the root was rebuilt): claim() it again to go on"
    else:
        # Found near the end, if at all: what cannot be read must not be in the way of saying no.
        with contextlib.suppress(WeightvcError):
            recent = takewhile(lambda entry: entry.sequence >= claimed, shelf.catalogue(root))
            by = next((f" by {e.author}" for e in recent if e.op == CLAIM and e.sequence == claimed), "")
        why = f"it was claimed{by}, in operation {claimed}, and is written by that process now: end this one"
    raise Fenced(f"the branch {branch!r} is not ours to write: {why}", branch=branch, epoch=epoch, claimed=claimed)


_AGAIN: Final = "commit on top with --rebase (on_conflict='rebase', no expect), or load it or check it out first"


def moved(branch: str, expected: str | None, head: str | None, mend: str = _AGAIN) -> BranchMoved:
    """The error for a branch whose head is another one than expected; `mend` says what to do once one has looked."""
    here = head[:12] if head else "no version"
    there = expected[:12] if expected else "no version"
    return BranchMoved(
        f"the branch {branch!r} moved: its head is {here}, and this change was made against {there}: see "
        f"`weightvc log`, then {mend}",
        branch=branch,
        expected=expected,
        head=head,
    )

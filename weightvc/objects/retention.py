"""The policy of retention: which versions a repository keeps, branch by branch, and what is left lying for how long.

The policy is kept in the root, or given once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from weightvc.errors import Refused, Unsupported
from weightvc.objects import expect
from weightvc.objects.version import Version

ALL: Final = "*"
"""The rules of branches that have none of their own. No branch can have this name."""
UNREACHABLE: Final = 30 * 86400
"""Seconds that a version stays which no branch and no tag leads to any more, unless told."""
GRACE: Final = 3600.0
"""Seconds between noting and condemning, and between condemning and deleting, unless told."""
LEASE: Final = 3600
"""Seconds that a pin lives after it was last written, unless told."""
LIMIT: Final = 4096
"""Bytes of JSON that a kept policy may have: every poll reads it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept of one branch: a version that any of these keeps. Its head is kept whatever they say."""

    last: int | None = None
    """So many of the newest versions, at least 1."""
    within: int | None = None
    """Versions younger than so many seconds."""
    every: int | None = None
    """Versions whose generation is a multiple of this."""
    every_step: int | None = None
    """Versions whose label `step` is a multiple of this."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Versions whose metadata has one of these values under its name."""

    def keeps(self, made: Version, at: int, age: float) -> str | None:
        """The rule that keeps a version, `at` places behind the head and `age` seconds old, or None."""
        if self.last is not None and at < self.last:
            return f"last {self.last}"
        if self.within is not None and age < self.within:
            return f"within {duration(self.within)}"
        if self.every is not None and made.generation % self.every == 0:
            return f"every {self.every}"
        if self.every_step is not None and made.step is not None and made.step % self.every_step == 0:
            return f"every step {self.every_step}"
        for name, value in self.meta.items():
            if name in made.metadata and _same(made.metadata[name], value):
                return f"meta {name}={json.dumps(value)}"
        return None


def _same(one: Any, other: Any) -> bool:
    # True is no 1, and 1.0 no 1: JSON says them differently.
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules by branch, "*" for all others, and for how long (seconds) what nothing leads to any more is kept.

    A branch without rules keeps all of its versions; `unreachable` None keeps all that is not reachable.
    """

    branches: Mapping[str, Rules] = field(default_factory=dict)
    unreachable: int | None = None

    def of(self, branch: str) -> Rules | None:
        """The rules of a branch, or None."""
        return self.branches.get(branch, self.branches.get(ALL))


_RULES: Final = ("last", "within", "every", "every_step", "meta")


def check(policy: Policy) -> Policy:
    """`policy` itself. Raises Refused for a rule that keeps nothing, or numbers that are none."""
    for branch, rules in policy.branches.items():
        if rules == Rules():
            raise Refused(f"the policy of {branch!r} keeps nothing but the head: say how many with --keep-last 1")
        for name in ("last", "within", "every", "every_step"):
            value = getattr(rules, name)
            if value is not None and (type(value) is not int or not 1 <= value < expect.INTEGER):
                raise Refused(f"{name}={value!r:.100}: a whole number, at least 1")
    value = policy.unreachable
    if value is not None and (type(value) is not int or not 0 <= value < expect.INTEGER):
        raise Refused(f"unreachable={value!r:.100}: seconds, 0 at least")
    try:
        fields = to_json(policy)
        if json.loads(json.dumps(fields, allow_nan=False)) != fields:
            raise ValueError
    except (TypeError, ValueError, RecursionError):
        raise Refused("the metadata to keep has to be what JSON keeps exactly") from None
    if len(json.dumps(fields)) > LIMIT:
        raise Refused(f"the policy is over {LIMIT} bytes, and every poll would read it: make it shorter")
    return policy


def to_json(policy: Policy) -> dict[str, Any]:
    """A policy as the root holds it; rules that are not there are left out."""
    branches = {}
    for branch, rules in policy.branches.items():
        fields = {name: getattr(rules, name) for name in _RULES}
        branches[branch] = {k: dict(v) if k == "meta" else v for k, v in fields.items() if v is not None and v != {}}
    return {"branches": branches, "unreachable": policy.unreachable}


def from_json(fields: Mapping[str, Any]) -> Policy:
    """A policy from the root. Raises Unsupported for a rule that is not known here: it may keep a version."""
    try:
        unknown = set(fields) - {"branches", "unreachable"}
        branches = {}
        for branch, rules in expect.mapping(fields["branches"], "branches").items():
            unknown |= set(expect.mapping(rules, branch)) - set(_RULES)
            if unknown:
                break
            expect.mapping(rules.get("meta", {}), "meta")
            branches[branch] = Rules(**rules)
        if unknown:
            raise Unsupported(f"the policy of retention has {sorted(unknown)[0]!r:.100}: upgrade weightvc")
        return check(Policy(branches, fields["unreachable"]))
    except Unsupported:
        raise
    except (Refused, *expect.MALFORMED) as error:
        raise Refused(
            f"the policy in the root cannot be read ({error}): save another (`weightvc expire --save`)"
        ) from None


def duration(seconds: int) -> str:
    """Seconds as a user would write them: 90s, 10m, 7d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"

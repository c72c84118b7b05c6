"""What compaction is asked to do, as it is kept in the root."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from weightvc.errors import Corrupt, Refused
from weightvc.objects import expect

FIELD: Final = "compaction"
"""The root's field."""
SHARE_LIMIT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Policy:
    """When compaction stores a version whole, and whether it writes patches back."""

    share: int = 50
    """A base is due where the patches that lead to a version from the last base outweigh so many percent of it."""
    base_every: int = 1024
    """And where the last base is so many versions back."""
    reverse: bool = False
    """Whether each patch gets one that leads back."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("share", self.share, 1, SHARE_LIMIT),
            ("base_every", self.base_every, 4, expect.INTEGER - 1),
        ):
            if type(value) is not int or not least <= value <= most:
                raise Refused(f"{name}={value!r:.50}: a whole number from {least} to {most}")
        if type(self.reverse) is not bool:
            raise Refused(f"reverse={self.reverse!r:.50}: true or false")


def of(extra: Mapping[str, Any]) -> Policy:
    """The policy that a root's fields say; what they do not say is as usual. Raises Corrupt."""
    fields = extra.get(FIELD)
    if fields is None:
        return Policy()
    try:
        known = expect.mapping(fields, FIELD)
        return Policy(**{name: known[name] for name in ("share", "base_every", "reverse") if name in known})
    except (Refused, *expect.MALFORMED) as error:
        raise Corrupt(f"root: the policy of compaction is corrupt: {error}") from None


def to_json(policy: Policy, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A root's fields with a policy among them; fields of later writers are kept."""
    old = extra.get(FIELD)
    fields = dict(old) if isinstance(old, Mapping) else {}
    fields |= {"share": policy.share, "base_every": policy.base_every, "reverse": policy.reverse}
    return {**extra, FIELD: fields}

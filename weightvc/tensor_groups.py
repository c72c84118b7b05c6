"""Groups of tensors that mean something only together, as a quantised weight and its scales do."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final

from weightvc.errors import Refused

_SCALE: Final = re.compile(r"(.+?)_(?:global_)?(?:scale|zero_point)(?:_inv|_2)?")
_PARTS: Final = re.compile(r"(.+)\.(?:qweight|qzeros|scales|g_idx)")


def by_name(name: str) -> str:
    """As checkpoints of quantised models name them: X, X_scale, X_scale_inv, X_zero_point; X.qweight, X.scales, …"""
    match = _SCALE.fullmatch(name) or _PARTS.fullmatch(name)
    return match[1] if match else name


class TensorGroups:
    """Which tensors move together."""

    def __init__(self, groups: "Mapping[str, Hashable] | Callable[[str], Hashable] | None" = None) -> None:
        """`groups` gives the group of a tensor's name; None, or nothing in a mapping, for one that is alone. If it is
        not given, by_name() does. Raises Refused for what is neither mapping nor function."""
        if isinstance(groups, Mapping):
            self._of: Callable[[str], Any] = groups.get
        elif groups is None or callable(groups):
            self._of = groups or by_name
        else:
            raise Refused(f"groups={groups!r:.100}: give a mapping or a function from a tensor's name to its group")

    def whole(self, changed: Iterable[str], names: Iterable[str]) -> list[str]:
        """Of `names`, those that are in `changed` or in a group with one that is; the members of a group together.

        Raises Refused for a group that cannot be hashed.
        """
        chosen = set(changed)
        members: dict[Any, list[str]] = {}
        for name in names:
            group = self._of(name)
            try:
                members.setdefault((group is None, name if group is None else group), []).append(name)
            except TypeError:
                raise Refused(
                    f"groups gave {group!r:.100} for tensor {name!r:.200}: give a name or a number"
                ) from None
        return [name for some in members.values() if not chosen.isdisjoint(some) for name in some]

"""Options: what a commit is asked for, checked before anything is opened, copied or exported."""

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from weightvc.errors import Refused
from weightvc.history import HEAD
from weightvc.objects import version
from weightvc.protocol import coder
from weightvc.protocol.refs import check_name

if TYPE_CHECKING:
    from weightvc.sources.transform import Transform

Labels = tuple[str, int | None, str | None, Mapping[str, Any] | None]
"""Message, step, run and metadata."""


class Sharded(NamedTuple):
    """What is asked of a commit that all ranks make."""

    branch: str
    labels: Labels
    base: bool
    codec: str
    dtype: Any
    transform: "Transform | None"

    @property
    def same(self) -> dict[str, str]:
        """What has to be the same on all ranks, as a message shows it. What else there is, rank 0 says."""
        from weightvc.sources.cast import target

        _, step, run, _ = self.labels
        labels = {} if self.transform is None else self.transform.labels
        return {
            "step": repr(step),
            "run": repr(run),
            "branch": repr(self.branch),
            "base": repr(bool(self.base)),
            "codec": repr(self.codec),
            "dtype": "None" if self.dtype is None else target(self.dtype),
            "transform": " ".join(labels.values()) or "none",
        }


def labels(
    author: str,
    *,
    branch: str,
    message: str,
    step: Any,
    run: str | None,
    metadata: Mapping[str, Any] | None,
    dtype: Any,
    transform: Any,
    codec: str,
    on_conflict: str = "raise",
    **_: Any,
) -> Labels:
    """What a version says of itself, in copies. Raises Refused, BadName."""
    from weightvc.sources.transform import checked

    said = version.make(
        tree="0" * 64,
        layout=None,
        parents=(),
        step=step_of(step),
        run=run,
        message=message,
        author=author,
        metadata=checked(transform, dtype, metadata),
        elements=0,
        nbytes=0,
    )
    check_choices(on_conflict, codec)
    if branch != HEAD:
        check_name(branch)
    return said.message, said.step, said.run, said.metadata


def behind(author: str, *, dtype: Any, names: Any, queue: Any, when_full: Any, **asked: Any) -> Labels:
    """What labels() gives, of options of commit_async(): all of these are checked that can be without a source."""
    from weightvc.publisher import check_queue
    from weightvc.sources.cast import target
    from weightvc.sources.module import check_names

    made = labels(author, dtype=dtype, **asked)
    if dtype is not None:
        target(dtype)
    check_names(names)
    check_queue(queue, when_full)
    return made


def sharded(author: str, *, branch: str, base: bool, codec: str, dtype: Any, transform: Any, **asked: Any) -> Sharded:
    """What options of commit_sharded() ask for. Raises Refused, BadName."""
    made = labels(author, branch=branch, codec=codec, dtype=dtype, transform=transform, **asked)
    return Sharded(branch, made, base, codec, dtype, transform)


def check_choices(on_conflict: str, codec: str) -> None:
    """Raise Refused for what commit() has no meaning for."""
    if on_conflict not in ("raise", "rebase"):
        raise Refused(f'on_conflict={on_conflict!r:.100}: give "raise" or "rebase"')
    if codec not in coder.POLICIES:
        raise Refused(f"codec={codec!r:.100}: give one of {', '.join(coder.POLICIES)}")


def step_of(step: Any) -> Any:
    """A step as an int, if it is an integer of another kind, such as numpy's; else itself, to be refused."""
    if isinstance(step, bool):
        return step
    try:
        return operator.index(step)
    except TypeError:
        return step

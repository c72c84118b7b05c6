"""Everything weightvc raises, as one tree, grouped by what a caller would do next.

    WeightvcError
    ├── NotFound        ask for something else        (also a LookupError)
    │   ├── KeyNotFound       no object under this key
    │   ├── RefNotFound       no branch, tag, version or label like this
    │   └── TensorNotFound    no tensor of this name in the version
    ├── Conflict        look again, then retry or rebase
    │   ├── BranchMoved       the branch has another head than expected
    │   ├── Fenced            another writer has claimed the branch: this one has to stop
    │   ├── GroupNotReady     a host is missing or differs: no host of the group has moved
    │   ├── KeyExists         create-if-absent met an object
    │   ├── PreconditionFailed    compare-and-swap met another ETag
    │   └── QueueFull         as many commits wait as may: nothing was taken
    ├── StateUnknown    a write may or may not have landed: read, then decide
    │   └── GroupSplit        hosts of a group hold different versions
    ├── Expired         what was asked for existed and was collected
    ├── Corrupt         stored or local bytes are not what their digest says: repair or fall back
    ├── Refused         fix the input                 (also a ValueError)
    │   ├── BadTensor         a tensor, dtype or shape that cannot be kept
    │   ├── BadFile           a checkpoint file or directory that is malformed or unsafe
    │   ├── BadName           a ref, path or key that cannot be used
    │   ├── UnsafeStore       a store that does not keep its promises
    │   └── Unsupported       written by a newer weightvc: upgrade
    ├── NotPublished    commits behind the trainer have failed: see each, then go on
    ├── EngineError     a serving engine failed a call: look at it, then activate again
    └── StoreError      the store or the network: retry later     (also an OSError)
        ├── AccessDenied      the credentials do not allow it
        └── Unavailable       refused, throttled, timed out or cut short, after retries

`exit_code` is the command line's exit status for the kind; docs/cli.md lists them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self


class WeightvcError(Exception):
    """Base of all errors; `exit_code` is what the command line exits with."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Those that are made with keywords cannot be made again of their text alone, which is how exceptions are
        # unpickled; and ranks tell each other what failed by pickles.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[WeightvcError], args: tuple[Any, ...], known: dict[str, Any]) -> WeightvcError:
    made = kind.__new__(kind, *args)
    made.__dict__.update(known)
    return made


class WeightvcWarning(UserWarning):
    """Something that works and is probably not what was meant."""


class NotFound(WeightvcError, LookupError):
    """Something that was named does not exist."""

    exit_code = 3


class KeyNotFound(NotFound):
    """The store has no object under this key."""


class RefNotFound(NotFound):
    """No branch, tag, version id or label matches."""


class TensorNotFound(NotFound):
    """The version has no tensor of this name."""


class Conflict(WeightvcError):
    """Somebody else changed the state first; nothing was overwritten."""

    exit_code = 4


class BranchMoved(Conflict):
    """The branch's head is not the one that this change was made against.

    `branch`, `expected` and `head` are the branch and the version ids (None: no such branch).
    """

    def __init__(self, message: str, *, branch: str, expected: str | None, head: str | None) -> None:
        super().__init__(message)
        self.branch = branch
        self.expected = expected
        self.head = head


class Fenced(Conflict):
    """Another writer has claimed the branch since this one wrote to it.

    `branch` is the branch; `epoch` and `claimed` are the epochs of this writer and of the one who may write (None:
    nobody had claimed it, or nobody has).
    """

    def __init__(self, message: str, *, branch: str, epoch: int | None, claimed: int | None) -> None:
        super().__init__(message)
        self.branch = branch
        self.epoch = epoch
        self.claimed = claimed


class KeyExists(Conflict):
    """create() found an object under the key."""


class PreconditionFailed(Conflict):
    """swap() found another ETag (or no object) under the key."""


class QueueFull(Conflict):
    """As many commits wait to be published as may: this one was not taken."""


class GroupNotReady(Conflict):
    """No host of the group has moved, or all were brought back; `reasons` says what kept which host, by its name."""

    def __init__(self, message: str, *, reasons: Mapping[str, str]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)


class StateUnknown(WeightvcError):
    """A write's outcome could not be learnt: it may have landed. Read before writing again."""

    exit_code = 5


class GroupSplit(StateUnknown):
    """Hosts of a group hold different versions, or may: `holds` has each host's version id (None: not known)."""

    def __init__(self, message: str, *, holds: Mapping[str, str | None]) -> None:
        super().__init__(message)
        self.holds = dict(holds)


class Expired(WeightvcError):
    """A version or transaction that retention or collection has passed."""

    exit_code = 6


class Corrupt(WeightvcError):
    """Bytes differ from what their digest, length or format promises."""

    exit_code = 7


class Refused(WeightvcError, ValueError):
    """The input cannot be accepted as it is; nothing was written."""

    exit_code = 8


class BadTensor(Refused):
    """A tensor, dtype or shape that cannot be kept bit for bit."""


class BadFile(Refused):
    """A checkpoint file or directory that is malformed, unsafe, or changed while it was read."""


class BadName(Refused):
    """A branch, tag, path or key that cannot be used."""


class UnsafeStore(Refused):
    """The store ignores conditions that the protocol relies on."""


class Unsupported(Refused):
    """A format or codec that a newer weightvc wrote: upgrade to read it."""


class NotPublished(WeightvcError):
    """Commits that were to be made behind the caller have failed; the next one on the branch has their changes too.

    `failures` has what was to be published (as "step 7") and the error, of each; `exit_code` is the first one's.
    """

    def __init__(self, message: str, *, failures: Sequence[tuple[str, BaseException]]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.exit_code = getattr(failures[0][1], "exit_code", 1)

    @classmethod
    def of(cls, failures: Sequence[tuple[str, BaseException]]) -> Self:
        """The error that tells of some failures."""
        told = "; ".join(f"{label} was not published: {error or type(error).__name__}" for label, error in failures)
        return cls(told, failures=failures)


class EngineError(WeightvcError):
    """A serving engine refused a call, failed in it, or did not answer.

    `engine` and `call` name both. `serves` is the id of the version that it serves now, None if that is not known:
    then the next activate() loads a version as a whole. `paused` says whether it holds its requests (None: not
    known).
    """

    exit_code = 10

    def __init__(
        self, message: str, *, engine: str, call: str, serves: str | None, paused: bool | None = False
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.call = call
        self.serves = serves
        self.paused = paused


class StoreError(WeightvcError, OSError):
    """The store could not do it now."""

    exit_code = 9


class AccessDenied(StoreError):
    """The credentials do not allow this operation (or hide a missing key)."""


class Unavailable(StoreError):
    """Throttled, timed out, cut short or unreachable, after the retries that were safe."""

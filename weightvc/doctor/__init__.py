"""The doctor: looks at a store, the repository in it and this host, and says what is wrong and what mends it.

Each check is a function of a Case that yields findings; one that may not look, or fails, ends none of the others.
What is written for a try has names under probe/, which are deleted at once, and which the collector deletes a day
after a process was killed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from weightvc.doctor import access, directory, host, repository
from weightvc.doctor.case import Case
from weightvc.doctor.finding import READER, Finding, problem, skipped
from weightvc.errors import AccessDenied, WeightvcError
from weightvc.protocol.shelf import Shelf

__all__ = ["Finding", "examine"]

Check = Callable[[Case], Iterator[Finding]]
_READS: Final[Sequence[Check]] = (repository.catalogue, access.speed, repository.pull)
"""Checks that read no more than a reader has to."""


def examine(shelf: Shelf, *, read_only: bool, nbytes: int) -> Iterator[Finding]:
    """The findings, one after the other as they are made. `nbytes` has the object by which throughput is measured."""
    case = Case(shelf, nbytes, barred="--read-only" if read_only else "")
    before, after = _of_kind(shelf.store.url)
    checks = (
        *before,
        access.store,
        repository.root,
        repository.catalogue,
        access.rights,
        *after,
        access.conditions,
        access.checksums,
        access.speed,
        repository.pull,
        repository.pins,
        repository.probes,
    )
    for check in checks:
        if case.usable:
            yield from _tried(check, case)
    for check in (host.cache, host.compiled, host.versions):
        yield from _tried(check, case)


def _of_kind(url: str) -> tuple[Sequence[Check], Sequence[Check]]:
    """The checks that one kind of store has alone: those before it is read, and those after."""
    if url.startswith("s3://"):
        # boto3 is loaded by now.
        from weightvc.doctor import bucket

        return [bucket.bucket], [bucket.lifecycle, bucket.versioning, bucket.uploads]
    if "://" not in url:
        return [directory.directory], [directory.locks, directory.rename, directory.space]
    return [], [access.elsewhere]


def _tried(check: Check, case: Case) -> Iterator[Finding]:
    try:
        yield from check(case)
    except AccessDenied as error:
        # What a reader needs, and is denied, may be missing: S3 says so to who may not list.
        if check in _READS:
            yield problem(check.__name__, type(error), str(error))
        else:
            yield skipped(check.__name__, READER)
    except WeightvcError as error:
        yield problem(check.__name__, type(error), str(error))

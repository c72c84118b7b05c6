"""Checks of any store: what may be done there, whether it keeps its promises, and how fast it is."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

from weightvc.doctor.case import Case
from weightvc.doctor.finding import Finding, amount, ok, problem, skipped, span, warning
from weightvc.errors import AccessDenied, Conflict, Corrupt, KeyNotFound, Unavailable, UnsafeStore
from weightvc.objects import key
from weightvc.stores.probe import probe

TRIES: Final = 5
"""Small requests of which the median is told."""
SMALL: Final = 1 << 10
SOME: Final = 64 << 10
WORTH: Final = 1 << 20
"""Bytes from which a read says something of throughput."""
SLOW: Final = 0.5
"""Seconds of a small read from which polling and pulling suffer."""
_RIGHTS: Final = ("read", "list", "write", "delete")


def store(case: Case) -> Iterator[Finding]:
    """Whether the store answers, and lets the root be read."""
    try:
        case.found = case.store.get(key.ROOT)
    except KeyNotFound:
        pass
    except (AccessDenied, Unavailable) as error:
        case.usable = False
        yield problem("store", type(error), str(error))
        return
    case.rights.add("read")
    yield ok("store", f"{case.store.url} answers")


def rights(case: Case) -> Iterator[Finding]:
    """What the identity may do. Nothing is written for it: the write is one whose condition cannot hold."""
    try:
        next(iter(case.store.list("probe/")), None)
        case.rights.add("list")
    except AccessDenied:
        pass
    except Unavailable:
        if case.bucket:
            raise
    if not case.barred:
        _to_change(case)
    may = [what for what in _RIGHTS if what in case.rights]
    lacks = [what for what in _RIGHTS if what not in case.rights]
    says = f"may {', '.join(may)}"
    if case.barred:
        says += f"; writing was not tried: {case.barred}"
    elif not lacks:
        says += ": all that maintain needs"
    elif "write" in may:
        says += f", not {' or '.join(lacks)}: enough to commit; init, expire, gc and maintain need all"
    else:
        says += f", not {' or '.join(lacks)}: enough for a reader"
    yield ok("rights", says, **{what: what in may for what in _RIGHTS})


def _to_change(case: Case) -> None:
    name = f"probe/{secrets.token_hex(16)}-rights"
    try:
        case.store.swap(name, b"rights", "0" * 32)
        case.rights.add("write")
    except AccessDenied:
        pass
    except Conflict:
        case.rights.add("write")
    except UnsafeStore:
        # A bucket is asked further; what else has no conditional writes is there to be read.
        if case.bucket:
            case.rights.add("write")
    # Nothing ever had this name, unless it landed in spite of its condition.
    if not case.store.delete([name]):
        case.rights.add("delete")


def elsewhere(case: Case) -> Iterator[Finding]:
    """A place that is neither a bucket of S3 nor a directory."""
    yield skipped("bucket", "not s3://, so its lifecycle rules, versioning and uploads are not looked at")


def conditions(case: Case) -> Iterator[Finding]:
    """The parallel probe that init makes."""
    if case.store.conditional:
        yield ok("conditions", "writers take a lock in turn: no conditional requests to try")
    elif why := case.untried:
        yield skipped("conditions", why)
    elif "list" not in case.rights:
        yield skipped("conditions", "not allowed to list, which is fine for a trainer")
    else:
        found = probe(case.store)
        yield ok("conditions", f"of {found['writers']} writers at once one won, {found['rounds']} times over")


def checksums(case: Case) -> Iterator[Finding]:
    """Whether what was written is what is read, as a whole and in part."""
    if why := case.untried:
        yield skipped("checksums", why)
        return
    data = os.urandom(SOME)
    with _names(case) as name:
        where = name("digest")
        case.store.put(where, data)
        whole, part = case.store.get(where), case.store.get(where, start=1000, length=1000)
        if whole is None or whole.data != data or part is None or part.data != data[1000:2000]:
            what = "a part" if whole is not None and whole.data == data else "what"
            yield problem(
                "checksums",
                Corrupt,
                f"{what} that is read is not what was written",
                "look at proxies on the way, and at the store; then `weightvc fsck --read-data`",
            )
            return
        if case.bucket:
            from weightvc.doctor.bucket import keeps_damaged

            if keeps_damaged(case.store, name("damaged"), data):
                yield warning(
                    "checksums",
                    "the server keeps a body that is not what its Content-MD5 says: only who reads it sees damage",
                    "`weightvc fsck --read-data=5%` every night, or another server",
                )
                return
    yield ok("checksums", "what is written is what is read, as a whole and in part")


def speed(case: Case) -> Iterator[Finding]:
    """Time of small requests, and throughput of a large one."""
    numbers: dict[str, float] = {}
    if not case.untried:
        yield from _by_writing(case, numbers)
    elif case.found is not None:
        _by_reading(case, numbers)
    if case.request is None:
        yield skipped("speed", case.untried)
        return
    says = f"a small read takes {span(case.request)}"
    if "put_seconds" in numbers:
        says += f", a small write {span(numbers['put_seconds'])}"
    if case.throughput is not None:
        says += f"; reads bring {amount(case.throughput)}/s"
    if "write_bytes_per_second" in numbers:
        says += f", writes take {amount(numbers['write_bytes_per_second'])}/s"
    if case.request >= SLOW:
        mend = "hosts near the store, or a mirror near the hosts: `weightvc mirror`"
        yield warning("speed", says, mend, **numbers)
    else:
        yield ok("speed", says, **numbers)


def _by_writing(case: Case, numbers: dict[str, float]) -> Iterator[Finding]:
    """Write and read small objects and a large one."""
    data, place = os.urandom(case.nbytes), case.store
    with _names(case) as name:
        small = [name(f"small{i}") for i in range(TRIES)]
        numbers["put_seconds"] = median([_took(place.put, one, data[:SMALL])[0] for one in small])
        case.request = numbers["get_seconds"] = median([_took(place.get, one)[0] for one in small])
        large = name("large")
        write, _ = _took(place.put, large, data)
        read, got = _took(place.get, large)
    if got.data != data:
        mend = "look at proxies on the way, and at the store"
        yield problem("large", Corrupt, f"{amount(len(data))} are not read as they were written", mend)
        return
    case.throughput = numbers["read_bytes_per_second"] = len(data) / read
    numbers |= {"bytes": len(data), "write_bytes_per_second": len(data) / write}
    yield ok("large", f"an object of {amount(len(data))} goes in one request; nothing is uploaded in parts")


def _by_reading(case: Case, numbers: dict[str, float]) -> None:
    """The same by what lies there, for who may not write."""
    case.request = numbers["get_seconds"] = median([_took(case.store.get, key.ROOT)[0] for _ in range(TRIES)])
    if case.cold is None:
        return
    way = case.cold.steps[0].way
    stream = case.shelf.manifest(way.manifest).base
    largest = stream.packs[0][0] if stream is not None and stream.packs else way.manifest
    took, got = _took(case.store.get, largest, start=0, length=case.nbytes)
    if len(got.data) >= min(WORTH, case.nbytes):
        case.throughput = numbers["read_bytes_per_second"] = len(got.data) / took
        numbers["bytes"] = len(got.data)


def _took(work: Callable[..., object], *arguments: object, **options: object) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work(*arguments, **options)
    return time.perf_counter() - began, result


@contextmanager
def _names(case: Case) -> Iterator[Callable[[str], str]]:
    """Makes names for what is written for a try; all of it is deleted at the end."""
    token = secrets.token_hex(16)
    made: list[str] = []

    def name(what: str) -> str:
        made.append(f"probe/{token}-{what}")
        return made[-1]

    try:
        yield name
    finally:
        case.left |= case.store.delete(made).keys()

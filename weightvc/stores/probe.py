"""Find out whether a store keeps its promises: some servers accept conditional writes and ignore the condition."""

import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - racers wait for each other
from functools import partial
from typing import Any

from weightvc.errors import Conflict, KeyNotFound, Refused, StateUnknown, Unavailable, UnsafeStore
from weightvc.stores.base import Got, Store

_MEND = (
    "two writers could overwrite each other there. Use a store with atomic conditional writes: Amazon S3, "
    "Ceph 16 or later, SeaweedFS 4, or a local directory"
)


def probe(store: Store, writers: int = 4, rounds: int = 3) -> dict[str, Any]:
    """Race `writers` threads on each of `rounds` small keys under probe/, and delete these again.

    Returns what was found, as JSON values. A store that is conditional by construction is not touched. Raises
    UnsafeStore, with the reason, if the store breaks a promise; AccessDenied, Unavailable if it cannot be asked;
    Refused when the interpreter ends, which leaves nobody threads.
    """
    if store.conditional:
        return {"conditional": "by construction"}
    token = secrets.token_hex(16)
    keys = [f"probe/{token}-{i}" for i in range(rounds)]
    try:
        with ThreadPoolExecutor(rounds) as threads:  # at once, since losers of a race may be kept waiting
            try:
                raced = threads.map(partial(_round, store, writers), keys)
            except RuntimeError as error:
                raise Refused(f"{store.url} cannot be probed ({error}): do it before the main thread ends") from None
            list(raced)
        listed = {one.key for one in store.list(f"probe/{token}")}
        if listed != set(keys):
            raise UnsafeStore(f"{store.url} does not list what was just written there: {_MEND}")
        store.delete(keys[:1])
        _must_not_revive(store, keys[0])
    finally:
        store.delete(keys)
    return {"conditional": "probed", "writers": writers, "rounds": rounds}


def _round(store: Store, writers: int, key: str) -> None:
    etag = _race(store, key, "create-if-absent", partial(store.create, key), writers)
    _must_refuse(store, key, "create of a key that exists", partial(store.create, key, b"again"))
    _race(store, key, "swap", partial(store.swap, key, etag=etag), writers)
    _must_refuse(store, key, "swap from an old ETag", partial(store.swap, key, b"again", etag))


def _race(store: Store, key: str, what: str, write: Callable[[bytes], str], writers: int) -> str:
    """Let `writers` threads write at once; exactly one may win. Returns the ETag that it left."""
    bodies = [f"{what} {i} {secrets.token_hex(8)}".encode() for i in range(writers)]
    start = threading.Barrier(writers)

    def one(body: bytes) -> str | Exception:
        start.wait()
        try:
            return write(body)
        except (Conflict, StateUnknown, Unavailable) as error:
            return error

    with ThreadPoolExecutor(writers) as threads:
        outcomes = list(threads.map(one, bodies))
    try:
        got = store.get(key)
    except KeyNotFound:
        got = None
    winners = [body for body, outcome in zip(bodies, outcomes) if isinstance(outcome, str)]
    if got is not None and got.data in bodies and got.data not in winners:
        outcome = outcomes[bodies.index(got.data)]
        if isinstance(outcome, Conflict):
            raise UnsafeStore(f"{store.url}: a {what} was refused and done all the same: {_MEND}")
        winners.append(got.data)  # its reply was lost
    if len(winners) > 1:
        raise UnsafeStore(f"{store.url} let {len(winners)} of {writers} parallel writers win one {what}: {_MEND}")
    if not winners:
        _nobody(store, what, outcomes)
    if got is None or got.data != winners[0]:
        raise UnsafeStore(f"{store.url} does not give back what a {what} wrote: {_MEND}")
    if isinstance(etag := outcomes[bodies.index(winners[0])], str) and etag != got.etag:
        raise UnsafeStore(f"{store.url} gives another ETag for a read than for the write before it: {_MEND}")
    return got.etag


def _nobody(store: Store, what: str, outcomes: Iterable[str | Exception]) -> None:
    """No writer won: the store is out of reach, or it refuses them all."""
    for outcome in outcomes:
        if isinstance(outcome, StateUnknown | Unavailable):
            raise Unavailable(f"{store.url} could not be probed: {outcome}") from outcome
    raise UnsafeStore(f"{store.url} refused every one of several parallel writers of a {what}: {_MEND}")


def _must_refuse(store: Store, key: str, what: str, write: Callable[[], str]) -> None:
    before = _read(store, key)
    try:
        write()
    except Conflict:
        pass
    except StateUnknown as error:
        raise Unavailable(f"{store.url} could not be probed: {error}") from error
    else:
        raise UnsafeStore(f"{store.url} ignores the condition of a write: it accepted a {what}: {_MEND}")
    if _read(store, key).data != before.data:
        raise UnsafeStore(f"{store.url} refused a {what} and did it all the same: {_MEND}")


def _must_not_revive(store: Store, key: str) -> None:
    try:
        store.swap(key, b"again", "0" * 32)
    except Conflict:
        return
    except StateUnknown as error:
        raise Unavailable(f"{store.url} could not be probed: {error}") from error
    raise UnsafeStore(f"{store.url} ignores the condition of a write: it accepted a swap of a deleted key: {_MEND}")


def _read(store: Store, key: str) -> Got:
    got = store.get(key)
    assert got is not None  # no unless_etag was given
    return got

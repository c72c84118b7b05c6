"""The store's clock: what ages are told by. The clocks of hosts differ; a store stamps what is written to it."""

import secrets

from weightvc.errors import Unavailable
from weightvc.stores.base import Store


def marker() -> str:
    """The key of an object that is written only to see its time."""
    return f"probe/{secrets.token_hex(16)}-now"


def now(store: Store) -> float:
    """Seconds since the epoch by the store's clock: a small object is written, listed and deleted.

    Raises Unavailable if the store does not list it, AccessDenied.
    """
    name = marker()
    store.put(name, b"now")
    try:
        for one in store.list(name):
            if one.key == name:
                return one.modified
    finally:
        store.delete([name])
    raise not_listed(store)


def not_listed(store: Store) -> Unavailable:
    """The error for a listing that lacks what was written before it began."""
    return Unavailable(
        f"{store.url} does not list what was just written there: nothing is collected from listings that are not "
        "complete; try again"
    )

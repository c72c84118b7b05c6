"""What a decoded object's fields have to be. An object is anybody's bytes: its key vouches for no meaning.

Each function returns the value that it was given, or raises ValueError saying what `name` is not. Decoders turn
that, and all else in MALFORMED, into Corrupt with the object's name.
"""

import json
import re
import struct
from typing import Any, Final, NoReturn

INTEGER: Final = 1 << 63
"""Integers are below this, so that any language and any file offset can hold them."""
TIME: Final = 253_370_764_800_000_000
"""The year 9999, in microseconds since the epoch: no calendar here knows a later time."""

MALFORMED: Final = (
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ValueError,
    OverflowError,
    RecursionError,
    struct.error,
)
"""What nonsense makes a decoder raise."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_RANDOM: Final = re.compile(r"[0-9a-f]{32}")
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def _finite(literal: str) -> float:
    value = float(literal)
    if value - value != 0:
        raise ValueError(f"a number is out of range: {literal[:40]}")
    return value


def _constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")


_JSON: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_constant)


def parse(text: str) -> Any:
    """JSON without the infinities, NaNs and lone surrogates that Python's reader lets through."""
    value = _JSON.decode(text)
    if _SURROGATE.search(text) is not None:
        # Also in fields that are not known here: whoever changes the root writes those again.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def text(value: Any, name: str) -> str:
    """A string that UTF-8 can say."""
    if type(value) is not str:
        raise ValueError(f"{name} is not a text")
    if not value.isascii():
        value.encode()
    return value


def maybe_text(value: Any, name: str) -> str | None:
    """A text or null."""
    return None if value is None else text(value, name)


def integer(value: Any, name: str, low: int = 0, end: int = INTEGER) -> int:
    """An integer in [low, end). true and 1.0 are none."""
    if type(value) is not int or not low <= value < end:
        raise ValueError(f"{name} is not an integer from {low} to {end - 1}")
    return value


def digest(value: Any, name: str) -> str:
    """A digest or version id: 64 lower-case hexadecimal digits."""
    if type(value) is not str or _DIGEST.fullmatch(value) is None:
        raise ValueError(f"{name} is not 64 hexadecimal digits")
    return value


def maybe_digest(value: Any, name: str) -> str | None:
    """A digest or null."""
    return None if value is None else digest(value, name)


def random(value: Any, name: str) -> str:
    """A repository's id or a write id: 32 lower-case hexadecimal digits."""
    if type(value) is not str or _RANDOM.fullmatch(value) is None:
        raise ValueError(f"{name} is not 32 hexadecimal digits")
    return value


def array(value: Any, name: str) -> list[Any]:
    """A JSON array."""
    if type(value) is not list:
        raise ValueError(f"{name} is not an array")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if type(value) is not dict:
        raise ValueError(f"{name} is not an object")
    return value

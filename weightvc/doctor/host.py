"""Checks of this host: its cache, its compiled code, and what is installed."""

import os
import platform
import secrets
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from weightvc import __version__
from weightvc.doctor.case import Case
from weightvc.doctor.finding import Finding, amount, ok, skipped, warning

PACKAGES: Final = ("torch", "numpy", "numba", "boto3", "fsspec", "blake3", "zstandard", "click")


def cache(case: Case) -> Iterator[Finding]:
    """Whether the cache keeps what was fetched. It needs no locks."""
    kept = case.shelf.cache
    if kept is None:
        yield skipped("cache", "turned off: each process fetches all that it wants")
        return
    place = kept.directory.absolute()
    if why := _unwritable(place):
        mend = "the right to write there, or another place: WEIGHTVC_CACHE=DIR"
        yield warning("cache", f"{place} keeps nothing ({why}): each process fetches all that it wants", mend)
        return
    free = _free(place)
    whole = case.newest.version.nbytes if case.newest is not None and case.newest.version is not None else 0
    if lacks := kept.lacks(whole):
        yield warning("cache", lacks, "--cache-limit SIZE, WEIGHTVC_CACHE_LIMIT, or a larger disk", free=free)
    elif free < whole:
        says = f"{place} has {amount(free)} free, and a version takes {amount(whole)}"
        yield warning("cache", says, "make room there, or another place: WEIGHTVC_CACHE=DIR", free=free)
    else:
        yield ok("cache", f"{place} can be written to, {amount(free)} free; it needs no locks", free=free)


def _unwritable(place: Path) -> str:
    """Why files cannot be made and renamed there; empty if they can. A directory that is not there is not made."""
    there = _nearest(place)
    if there != place:
        return "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"
    made = [place / f".tmp-{secrets.token_hex(8)}" for _ in range(2)]
    try:
        os.close(os.open(made[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        made[0].rename(made[1])
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for one in made:
            with suppress(OSError):
                one.unlink()
    return ""


def _free(place: Path) -> int:
    status = os.statvfs(_nearest(place))
    return status.f_bavail * status.f_frsize


def _nearest(place: Path) -> Path:
    """`place`, or the nearest directory above it that is there."""
    return next(one for one in (place, *place.parents) if os.path.lexists(one))


def compiled(case: Case) -> Iterator[Finding]:
    """Where compiled code is kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from weightvc_kernels import hash_kernels
    place = hash_kernels.hash_pieces.stats.cache_path
    if not place:
        says = "compiled code cannot be kept: every process compiles for some seconds"
        yield warning("compiled", says, "set NUMBA_CACHE_DIR to a directory that can be written to")
    elif any(Path(place).glob("*.nbc")):
        yield ok("compiled", f"code is kept in {place}", place=place)
    else:
        says = f"nothing is compiled yet; the first pull or commit will do it, once, in {place}"
        yield ok("compiled", f"{says}; `python -m weightvc_kernels` does it ahead", place=place)


def versions(case: Case) -> Iterator[Finding]:
    """What is installed."""
    found = {"weightvc": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    said = ", ".join(f"{name} {number or 'not installed'}" for name, number in found.items())
    yield ok("versions", f"{said}; {platform.platform()}", **found)

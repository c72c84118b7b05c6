"""Paths of a checkpoint's files: relative, "/"-separated, and safe to create on any system.

Tensor names are not paths: they are kept exactly and never become file names.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from weightvc.errors import BadFile, BadName

MARKER: Final = ".weightvc"
"""The file that says what a checked-out directory holds, and the directory that is a repository: never committed."""

MAX_PART = 255
"""Bytes of UTF-8 that one part of a path may have: what common file systems take."""

MAX_PATH = 1024
"""Bytes of UTF-8 that a whole path may have: systems take 1024 to 4096 with what stands before it."""

_DRIVE = re.compile(r"[A-Za-z]:")


def check_relative(path: str) -> str:
    """Return `path` if it is a safe relative path, else raise BadName saying what is wrong with it."""
    fault = _fault(path)
    if fault:
        shown = path if len(path) <= 200 else path[:200] + "..."
        raise BadName(f"{shown!r} cannot be a file's path in a checkpoint: {fault}; rename it")
    return path


def _fault(path: str) -> str:
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if not path:
        return "it is empty"
    if len(encoded) > MAX_PATH:
        return f"it is longer than {MAX_PATH} bytes"
    if path.startswith("/"):
        return "it is absolute"
    if "\\" in path:
        return "it has a backslash"
    if any(unicodedata.category(char) == "Cc" for char in path):
        return "it has a control character"
    for part in path.split("/"):
        if not part:
            return 'a part between two "/" is empty'
        if part in (".", ".."):
            return f"it has {part!r} in it"
        if part.lower() == MARKER:
            return f"{MARKER} is weightvc's own"
        if _DRIVE.match(part):
            return f"{part[:2]!r} is a drive letter"
        if len(part.encode()) > MAX_PART:
            return f"a part is longer than {MAX_PART} bytes"
    return ""


def weights_of(component: str) -> str:
    """The path of the weights file that a component's tensors from memory are written to."""
    return f"{component}/model.safetensors" if component else "model.safetensors"


def check_files(paths: Sequence[str]) -> None:
    """Refuse paths that cannot be a checkpoint's files, alone (BadName) or together (BadFile)."""
    for path in paths:
        check_relative(path)
    check_together(paths)


def check_together(paths: Iterable[str]) -> None:
    """Refuse paths that some file systems cannot tell apart, or that need a file to be a folder.

    Each path must have passed check_relative(). Raises BadFile naming both paths.
    """
    # Folders count as well: "A/x" and "a/y" would end in one folder on a system that ignores case.
    spelled: dict[str, tuple[str, bool]] = {}
    previous: str | None = None
    for path in sorted(paths):
        if path == previous:
            raise BadFile(f"{path!r} stands twice: leave one out")
        previous = path
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth])
            is_file = depth == len(parts)
            other, other_is_file = spelled.setdefault(_folded(prefix), (prefix, is_file))
            if other != prefix:
                raise BadFile(
                    f"{other!r} and {prefix!r} differ only in case or Unicode form and would be one file on "
                    "some systems: rename one"
                )
            if other_is_file != is_file:
                raise BadFile(f"{prefix!r} is both a file and a folder: rename one")


def _folded(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())

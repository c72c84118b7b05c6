"""Files that commands write beside their work: looked at before it, and put in place whole."""

import os
from contextlib import suppress

from weightvc.errors import AccessDenied, Refused


def check_writable(path: str, where: str) -> None:
    """Raise Refused or AccessDenied, for the file `path`, if `where` is not there or may not be written."""
    if not os.path.exists(where):
        raise Refused(f"{path} cannot be written: there is no directory {where}: make it, or name another file")
    if not os.access(where, os.W_OK) or (where != path and not os.path.isdir(where)):
        raise AccessDenied(f"{path} cannot be written: {where} may not be written to: choose another file")


def write_atomically(path: str, text: str) -> None:
    """Put a text in the place of a file, which readers see old or new. Raises OSError."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(beside)
        raise

"""State dicts that torch.save wrote: loaded with weights_only, so that no code in them runs."""

import os
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

from weightvc.errors import BadFile
from weightvc.sources.base import Layout
from weightvc.sources.local import LocalFiles
from weightvc.sources.memory import MemorySource, open_tensors
from weightvc.sources.remote import RemoteFiles

_CHUNK = 8 << 20


def open_pickled(location: str) -> "PickledSource":
    """Open a .pt, .pth or .bin file, local or at a URL, that holds a flat `{name: tensor}`; no layout.

    A file at a URL is downloaded to a temporary one. Raises BadFile for anything else in the file, above all
    for a pickle that would run code; BadTensor; AccessDenied, Unavailable.
    """
    from weightvc.sources.files import is_url

    if not is_url(location):
        return PickledSource(location, location)
    remote = RemoteFiles(location)
    remote.keep([""])
    descriptor, copy = tempfile.mkstemp(prefix="weightvc-", suffix=os.path.splitext(location)[1])
    try:
        with os.fdopen(descriptor, "wb") as file:
            size = remote.sizes[""]
            for start in range(0, size, _CHUNK):
                file.write(remote.read("", start, min(start + _CHUNK, size)))
        remote.check()
        source = PickledSource(copy, location)
    finally:
        # The tensors' mapping keeps the bytes; nothing has to be removed later.
        os.unlink(copy)
    return source


class PickledSource(MemorySource):
    """Tensors of a torch.save file. Made by open_pickled()."""

    def __init__(self, path: str, where: str) -> None:
        """`where` is what the user calls the file at `path`."""
        self._files = LocalFiles(path)
        self._files.keep([""])
        self._copied = path != where
        source = open_tensors(_flat(_load(path, where), where), where)
        super().__init__(list(source.tensors), source._values, source._lying)
        self.layout: Layout | None = None

    def check(self) -> None:
        """Raise BadFile if the file is not the one that was opened."""
        if not self._copied:
            self._files.check()

    def close(self) -> None:
        """Release the file; idempotent."""
        super().close()
        self._files.close()


def _load(path: str, where: str) -> Any:
    import torch

    try:
        # Only the zip format can be mapped; the older one is read whole.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:
        # Whatever an unpickler meets in a hostile file: there is no closed list.
        # torch begins with how to load it all the same.
        lines = str(error).strip().split("\n")
        reason = next((line for line in lines if "WeightsUnpickler" in line), lines[0]).strip()[:300]
        raise BadFile(
            f"{where}: torch.load(weights_only=True) refuses it, and a pickle that could run code is never "
            f"loaded: save the tensors alone, as safetensors ({type(error).__name__}: {reason})"
        ) from None


def _flat(loaded: Any, where: str) -> Mapping[str, Any]:
    import torch

    if not isinstance(loaded, Mapping):
        raise BadFile(f"{where}: holds a {type(loaded).__name__}, not a state dict: save the state dict itself")
    others = [key for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if others:
        shown = ", ".join(f"{key!r} ({type(loaded[key]).__name__})" for key in others[:10])
        raise BadFile(
            f"{where}: is not a flat state dict: {shown}{', ...' * (len(others) > 10)} are no tensors: "
            "save the state dict alone"
        )
    return loaded

"""What a commit can be made from: files, directories and URLs, tensors in memory, torch modules."""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightvc.errors import Refused
from weightvc.sources.base import Layout, LayoutFile, Source, TensorInfo

if TYPE_CHECKING:
    from weightvc.sources.transform import Transform

__all__ = ["Layout", "LayoutFile", "Source", "TensorInfo", "open_source"]


def open_source(
    source: Any,
    *,
    names: Any = "hf",
    dtype: Any = None,
    name: str | None = None,
    exclude: Iterable[str] = (),
    side_files: bool = True,
    transform: "Transform | None" = None,
) -> Source:
    """Open whatever can be committed; close() the result.

    `source` is a path or URL (a .safetensors file, a directory, a .pt file), a mapping of names to torch
    tensors or numpy arrays (or of components to such mappings), a torch.nn.Module, or a Source. `names` is
    for modules (see open_module), `name`, `exclude` and `side_files` for files (see open_files). `dtype` has floating
    tensors read as "bfloat16", "float16" or "float32" (or the torch.dtype of that name).
    `transform` makes tensors of what was opened, and is called here.
    Raises Refused (BadFile, BadTensor, BadName) and, for URLs, StoreError; and what the transform raises.
    """
    from weightvc.sources import cast as casting

    if dtype is not None:
        casting.target(dtype)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    is_file = isinstance(source, str | os.PathLike)
    if not is_file and (name is not None or exclude):
        raise Refused("`name` and `exclude` are for files: leave them out for tensors and modules")
    check_kind(source, names)
    opened: Source
    if is_file:
        from weightvc.sources.files import open_files

        opened = open_files(source, name=name, exclude=exclude, side_files=side_files)
    elif _is_module(source):
        from weightvc.sources.module import open_module

        opened = open_module(source, names)
    elif isinstance(source, Mapping):
        from weightvc.sources.memory import open_tensors

        opened = open_tensors(source)
    else:
        opened = source
    if transform is not None:
        try:
            return transform.apply(opened)
        finally:
            if opened is not source:
                opened.close()
    if dtype is None:
        return opened
    try:
        return casting.cast(opened, dtype)
    except BaseException:
        opened.close()
        raise


def check_kind(source: Any, names: Any = "hf") -> None:
    """Raise Refused for what is nothing that can be committed, and for `names` that are not for it. Opens nothing."""
    if _is_module(source):
        from weightvc.sources.module import check_names

        check_names(names)
        return
    if names != "hf":
        raise Refused("`names` is for torch modules: leave it out, or rename the tensors yourself")
    is_source = all(hasattr(source, part) for part in ("tensors", "layout", "read", "check", "close"))
    if not is_source and not isinstance(source, str | os.PathLike | Mapping):
        raise Refused(
            f"a {type(source).__module__}.{type(source).__qualname__} cannot be committed: give a path, URL, "
            "a mapping of names to tensors, or a torch module"
        )


def _is_module(source: Any) -> bool:
    # Loaded by now if the source is one; half loaded in another thread, it may lack nn yet.
    kind = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return kind is not None and isinstance(source, kind)

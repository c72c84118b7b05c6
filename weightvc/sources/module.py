"""torch modules: what save_pretrained would write, or the state dict under given names."""

import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from weightvc.errors import BadTensor, Refused, StoreError
from weightvc.sources.base import ReadsRuns, Source
from weightvc.sources.files import open_files
from weightvc.sources.header import shown
from weightvc.sources.memory import gather_fault, open_tensors

Names = str | Callable[[str], str]


def open_module(module: Any, names: Names = "hf") -> Source:
    """Open a torch.nn.Module.

    names="hf": of a transformers or PEFT model, exactly the directory that its save_pretrained writes (names,
    dtypes, config), by way of a temporary directory: it needs as much disk as the weights have. Of any other
    module, its state dict without repeated tied tensors, as safetensors.torch.save_model would keep them.
    names="as-is": the state dict. A function: the state dict, each name mapped by it.
    Raises BadTensor; Refused for other `names`; StoreError if the temporary directory cannot be written.
    """
    check_names(names)
    if callable(names):
        return open_tensors(_renamed(module.state_dict(), names), "the state dict")
    if names == "as-is":
        return open_tensors(module.state_dict(), "the state dict")
    module = _unwrapped(module)
    if _is_pretrained(module):
        return _open_saved(module)
    return open_tensors(_untied(module.state_dict()), "the state dict")


def check_names(names: Any) -> None:
    """Raise Refused for what is no way to name a module's tensors."""
    if not callable(names) and names not in ("hf", "as-is"):
        raise Refused(f'names={names!r:.100}: give "hf", "as-is" or a function from name to name')


def _renamed(state: dict[str, Any], names: Callable[[str], str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in state.items():
        new = names(name)
        if type(new) is not str:
            raise BadTensor(f"names gave {new!r} for tensor {shown(name)}: it must give a str")
        if new in result:
            raise BadTensor(f"names gave {shown(new)} for both {shown(origin[new])} and {shown(name)}: mend it")
        result[new] = value
        origin[new] = name
    return result


def _unwrapped(module: Any) -> Any:
    """The module inside torch.compile's and data parallel wrappers, whose prefixes no checkpoint has."""
    while type(module).__name__ in ("OptimizedModule", "DistributedDataParallel", "DataParallel"):
        module = getattr(module, "_orig_mod", None) or module.module
    return module


def _is_pretrained(module: Any) -> bool:
    # A model of these libraries cannot exist before its module is loaded.
    for library, kind in (
        ("transformers.modeling_utils", "PreTrainedModel"),
        ("peft.peft_model", "PeftModel"),
    ):
        found = getattr(sys.modules.get(library), kind, None)
        if found is not None and isinstance(module, found):
            return True
    return False


def _untied(state: dict[str, Any]) -> dict[str, Any]:
    """Of tensors that are one and the same memory, keep the least name: safetensors' own choice.

    Views that overlap but differ are all kept: each has bytes of its own to restore.
    """
    import torch

    kept: dict[Any, str] = {}
    for name, value in sorted(state.items()):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() and not value.is_meta:
            flags = (value.is_conj(), value.is_neg())
            where = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), flags)
            kept.setdefault(where, name)
        else:
            kept[name] = name
    chosen = set(kept.values())
    return {name: value for name, value in state.items() if name in chosen}


class SavedSource:
    """A model's files in a temporary directory, which goes when the source is closed or forgotten."""

    def __init__(self, source: Source, directory: str) -> None:
        """`source` is open over the files in `directory`."""
        self._source = source
        self.tensors = source.tensors
        self.layout = source.layout
        self._remove = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of `tensors[index]`."""
        return self._source.read(index, start, stop)

    def read_run(self, first: int, last: int) -> memoryview | bytes:
        """Canonical bytes of `tensors[first:last]`, one after the other."""
        assert isinstance(self._source, ReadsRuns)
        return self._source.read_run(first, last)

    def check(self) -> None:
        """Raise BadFile if somebody changed the temporary files."""
        self._source.check()

    def close(self) -> None:
        """Remove the temporary directory; idempotent."""
        self._source.close()
        self._remove()


def _open_saved(module: Any) -> Source:
    _check_gathered(module)
    kind = type(module).__name__
    directory = tempfile.mkdtemp(prefix="weightvc-")
    try:
        try:
            # The only stable way: conversions and the choice among tied names are internal to the libraries.
            module.save_pretrained(directory)
        except OSError as error:
            raise StoreError(f"saving {kind} to {directory}: {error}: make space, or set TMPDIR") from error
        except Exception as error:
            raise BadTensor(f"{kind}.save_pretrained failed ({error}): mend it, or use names='as-is'") from error
        return SavedSource(open_files(directory), directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _check_gathered(module: Any) -> None:
    offloaded = hasattr(module, "hf_device_map")
    faults = []
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        fault = gather_fault(value)
        if fault and not (offloaded and value.is_meta):
            faults.append(f"{shown(name)}: {fault}")
    if faults:
        raise BadTensor(f"{type(module).__name__} has what cannot be saved: {'; '.join(faults[:10])}")

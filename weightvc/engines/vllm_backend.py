"""The part that runs in each vLLM worker: a WeightTransferEngine that loads versions from this host's slots.

It imports vLLM, so only vLLM imports it, by the factory. It needs no network and no credentials: a slot was verified
when it was built, and its marker says which version it is.

An update is either *sparse*, the elements that a file of changes has, by vLLM's checkpoint-patch loader; or *dense*,
all of a slot, by the layerwise reload that a restart would do. Sparse is taken only on top of the very version that
the file starts from, wholly loaded before, and its outcome is looked at: that loader marks unchanged elements with
NaN, and relies on every write of a model's loader being a plain copy. Where one is not, it says so or leaves NaNs
behind; both make it dense, in the same update and from then on. A dense load needs nothing to be right before it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightvc.engines import changes
from weightvc.protocol.checkout import read_marker
from weightvc.sources.memory import to_torch

_log = logging.getLogger("weightvc")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The directory with the slots, on the host of each worker."""

    directory: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version's id."""

    version: str


class WeightvcEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads versions from slots into `self.model`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directory: Path | None = None
        self._holds: str | None = None
        self._sparse = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Where the slots are. May be called before each update."""
        self._directory = Path(init_info.directory)

    def start_weight_update(self) -> None:
        """Nothing yet: whether layers are reloaded is known with the version."""

    def finish_weight_update(self) -> None:
        """Nothing more: an update ends whole, or raises."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version. Raises ValueError where this host has no such slot; RuntimeError before any init."""
        if self._directory is None:
            raise RuntimeError("weightvc: call init_weight_transfer_engine with the directory of the slots first")
        version = update_info.version
        slot = self._directory / version[:12]
        marker = read_marker(slot) if slot.is_dir() else None
        if marker is None or marker.version != version:
            raise ValueError(
                f"weightvc: {slot} does not hold version {version[:12]} on this host: stage it here, too"
            )
        held, self._holds = self._holds, None
        # Who asks again for what is held does not trust it: there is no file of changes for that.
        if not self._load_sparse(slot, held, version):
            self._load_dense(slot)
        self._holds = version

    def shutdown(self) -> None:
        """Nothing is open."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """A trainer commits to the repository instead."""
        raise NotImplementedError("weightvc: commit to the repository, and let weightvc follow it on each host")

    def _load_sparse(self, slot: Path, held: str | None, version: str) -> bool:
        """Whether the changes from `held` came in, as far as can be seen."""
        if held is None or not self._sparse:
            return False
        try:
            from vllm.model_executor.model_loader import checkpoint_weight_patch as loader
        except ImportError:
            self._sparse = False  # an older vLLM
            return False
        try:
            found = changes.read(changes.file_of(slot, held, version), held, version)
            if found is None or any(changes.dense_for(change) for change in found):
                return False
            if self._nans(self.model.named_parameters()):
                return False  # marks would not be told from what is there
            before = self._nans(self.model.named_buffers())
            patches = [_patch(loader, change, self.device) for change in found]
            loader.load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)
            after = self._nans(self.model.named_buffers())
            if not self._nans(self.model.named_parameters()) and all(n <= before.get(k, 0) for k, n in after.items()):
                return True
            what = "the model's loader wrote marks of unchanged elements into its weights"
        except (
            Exception
        ) as error:  # whatever a model's loader raises: weights may be half written, and dense mends it
            what = f"{type(error).__name__}: {error}"
        _log.warning("vLLM cannot load changes into this model, so each version is loaded as a whole: %s", what)
        self._sparse = False
        return False

    def _nans(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """How many NaNs each tensor has, of those that have any."""
        floats = [(name, t) for name, t in named if t.is_floating_point() and t.element_size() > 1 and t.numel()]
        counts = {name: torch.isnan(tensor).sum() for name, tensor in floats}
        return {name: int(count) for name, count in counts.items() if count}

    def _load_dense(self, slot: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # What a layer derives after loading is made where a start would make it.
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(changes.tensors(slot))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)


def _patch(loader: Any, change: changes.Change, device: torch.device) -> Any:
    # A copy: torch warns of memory that cannot be written to, as what is mapped.
    values = to_torch(change.dtype, (change.values.size,), bytearray(change.values))
    return loader.CheckpointWeightPatch(
        name=change.name,
        shape=change.shape,
        dtype=values.dtype,
        values=values.to(device),
        indices=torch.from_numpy(change.positions.copy()).to(device),
    )

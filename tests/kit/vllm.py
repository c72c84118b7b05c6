"""A stand-in for the parts of vLLM that a weight-transfer backend meets in a worker, as modules under vLLM's names.

    vllm.install(monkeypatch)
    worker = vllm.Worker(vllm.Model(weights), backend_class)

Modelled on what vLLM's modules of these names do, for one worker on the CPU:

- base, factory: the abstract engine, and its registry, which refuses a name twice;
- checkpoint_weight_patch: sparse patches become tensors of the full shape, NaN where nothing changes, and while the
  model loads them, Tensor.copy_ leaves alone what is NaN. Dense and sparse ones cannot be mixed, NaNs are refused;
- reload: while layers are reloaded, what they had is gone, so who loads only a part of a model leaves garbage.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch

I = TypeVar("I")  # noqa: E741
U = TypeVar("U")


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC, Generic[I, U]):
    init_info_cls: type
    update_info_cls: type
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...


class Factory:
    registry: dict[str, tuple[str, str]]

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls.registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.registry[name] = module, class_name


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


def load_checkpoint_weight_patches(
    model: Any, patches: Iterable[CheckpointWeightPatch], *, validate_unique_indices: bool = True
) -> set[str]:
    patches = list(patches)
    sparse = {patch.indices is not None for patch in patches}
    if len(sparse) > 1:
        raise ValueError("dense and sparse patches cannot be mixed")
    if sparse != {True}:
        return set(model.load_weights([(p.name, p.values.view(p.shape)) for p in patches]))
    named = []
    for patch in patches:
        assert patch.indices is not None
        if not patch.dtype.is_floating_point:
            raise TypeError(f"{patch.name}: a floating dtype is needed")
        if patch.indices.dtype not in (torch.int32, torch.int64) or patch.indices.shape != patch.values.shape:
            raise TypeError(f"{patch.name}: bad indices")
        if torch.isnan(patch.values).any():
            raise ValueError(f"{patch.name}: NaN values")
        flat = torch.full((math.prod(patch.shape),), math.nan, dtype=patch.dtype)
        flat.index_copy_(0, patch.indices.long(), patch.values)
        named.append((patch.name, flat.view(patch.shape)))
    plain = torch.Tensor.copy_

    def masked(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not (destination.is_floating_point() and source.is_floating_point() and destination.shape == source.shape):
            raise NotImplementedError("a same-shaped floating-point copy is needed")
        source = source.to(destination.dtype)
        return plain(destination, torch.where(torch.isnan(source), destination, source))

    torch.Tensor.copy_ = masked  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            return set(model.load_weights(named))
    finally:
        torch.Tensor.copy_ = plain  # type: ignore[method-assign]


def initialize_layerwise_reload(model: "Model") -> None:
    model.events.append("reload")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(torch.uint8).fill_(0x7E)


def finalize_layerwise_reload(model: "Model", model_config: Any) -> None:
    model.events.append("reloaded")


class Model(torch.nn.Module):
    """A model with parameters like its checkpoint's, but `q` and `k` are rows of one, as in a fused projection.

    `odd` says of a tensor that its loader does not write it by one plain copy: "setitem" (it assigns to a slice),
    "shape" (it copies to another shape), "raise".
    """

    def __init__(self, weights: dict[str, torch.Tensor], odd: dict[str, str] | None = None) -> None:
        super().__init__()
        self.odd = odd or {}
        self.events: list[str] = []
        self.shapes = {name: value.shape for name, value in weights.items()}
        self.held = torch.nn.ParameterDict()
        fused = [weights[name] for name in ("q", "k") if name in weights]
        if fused:
            self._add("qk", torch.cat(fused))
        for name, value in weights.items():
            if name not in ("q", "k"):
                self._add(name.replace(".", "_"), value)

    def _add(self, name: str, like: torch.Tensor) -> None:
        zeros = torch.zeros(like.shape, dtype=like.dtype)
        self.held[name] = torch.nn.Parameter(zeros, requires_grad=False)

    def _place(self, name: str) -> torch.Tensor:
        if name not in ("q", "k"):
            found: torch.Tensor = self.held[name.replace(".", "_")].data
            return found
        rows = self.shapes["q"][0]
        return self.held["qk"].data[:rows] if name == "q" else self.held["qk"].data[rows:]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, value in weights:
            place = self._place(name)
            match self.odd.get(name):
                case "setitem":
                    place[...] = value
                case "shape":
                    place.unsqueeze(0).copy_(value)
                case "raise":
                    raise KeyError(name)
                case _:
                    place.copy_(value)
            loaded.add(name)
        return loaded

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """What it holds, by the names of the checkpoint."""
        return {name: self._place(name) for name in self.shapes}


class Worker:
    """A worker: it opens a session for an update, which a failure leaves open."""

    def __init__(self, model: Model, backend: Any) -> None:
        self.model = model
        self.active = False
        config = SimpleNamespace(model_config=None, parallel_config=None)
        self.engine = backend(None, config, torch.device("cpu"), model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.init_info_cls(**init_info))

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("a weight update is already active")
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update first")
        self.engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update first")
        self.engine.finish_weight_update()
        self.active = False


def install(monkeypatch: pytest.MonkeyPatch) -> type[Factory]:
    """Put the modules in place for a test; the registry of backends, empty."""

    class Fresh(Factory):
        registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    here = sys.modules[__name__]
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": nullcontext},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            name: getattr(here, name)
            for name in ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Fresh},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.checkpoint_weight_patch": {
            "CheckpointWeightPatch": CheckpointWeightPatch,
            "load_checkpoint_weight_patches": load_checkpoint_weight_patches,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize_layerwise_reload,
            "finalize_layerwise_reload": finalize_layerwise_reload,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "weightvc.engines.vllm_backend", raising=False)
    return Fresh

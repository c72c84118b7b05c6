"""vLLM, over the HTTP of its server in development mode (VLLM_SERVER_DEV_MODE=1), and the registration of our
backend.

The server is told a version's id and nothing else. Each of its workers finds the weights on its host, in the slots:
see weightvc/engines/vllm_backend.py. Requests and answers are those of vLLM's rlhf and cache routers.
"""

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightvc.engines.base import CALL, LOAD, HttpEngine, Load
from weightvc.engines.http import CallFailed

if TYPE_CHECKING:
    from weightvc.client import Update

BACKEND = "weightvc"
FOLDER = ".changes"
"""Where files of changes lie, beside the slots."""
_PAUSES = {"in_place": "keep", "retract": "keep", "drain": "wait"}


class VLLM(HttpEngine):
    """A vLLM server on this host, or the first of one that spans hosts, started with
    `--weight-transfer-config '{"backend": "weightvc"}'`.

    `mode` is what becomes of requests in work: "retract" preempts them and resets the prefix cache, so that they go
    on with the new weights; "drain" lets them end, while new ones wait or are answered with 503; "in_place" freezes
    them with their caches, for which each request has to carry `cache_salt` with the version's id
    (`cache_keys=True`).

    With `changes` (the default), what differs from the version before is compared beforehand and written beside the
    slots, and workers load only that where vLLM's sparse loader can take it; else they load the version as a whole.
    """

    kind = "vLLM"

    def __init__(
        self,
        url: str,
        *,
        mode: str = "retract",
        key: str | None = None,
        cache_keys: bool = False,
        changes: bool = True,
        timeout: float = CALL,
        load_timeout: float = LOAD,
    ) -> None:
        """Nothing is asked yet. `timeout` is for a call that loads nothing, `load_timeout` for one that does, and for
        requests to end, in seconds. Raises Refused."""
        super().__init__(url, mode=mode, key=key, cache_keys=cache_keys, timeout=timeout, load_timeout=load_timeout)
        self._changes = changes

    def _version(self) -> Any:
        found = self.http.get("/weight_info", self._timeout)
        return found.get("weight_version") if isinstance(found, dict) else None

    def _set_version(self, text: str) -> None:
        self.http.post("/update_weight_version", self._timeout, {"new_version": text})

    def _pause(self, mode: str) -> tuple[float, float]:
        began = time.monotonic()
        # The default would abort every request.
        wait = self._load_timeout if mode == "drain" else self._timeout
        self.http.post("/pause", wait, mode=_PAUSES[mode])
        if mode == "drain":
            stopped = time.monotonic()
            self.http.post("/reset_prefix_cache", self._timeout)
            return stopped, stopped - began
        if mode == "retract":
            # A pause that keeps requests keeps their caches, too.
            self.http.post("/reset_prefix_cache", self._timeout, reset_running_requests="true")
        return began, 0.0

    def _resume(self) -> None:
        self.http.post("/resume", self._timeout)

    def _prepare(self, update: "Update", path: Path) -> str:
        if not self._changes:
            return ""
        old = self._load_of(update.start, path)
        if old is None:
            return "the version before is not in its slot any more"
        from weightvc.engines import changes

        return changes.write(old.path, path, old.version, update.version.id)

    def _load(self, load: Load) -> str:
        if load.over is None:
            # Without changes, workers load the version as a whole, whatever they believe to hold.
            shutil.rmtree(load.path.parent / FOLDER, ignore_errors=True)
            # A failed update leaves its session open, and no other can begin then.
            with contextlib.suppress(CallFailed):
                self.http.post("/finish_weight_update", self._timeout, {})
        # Known to a server that runs; one that was started again has to hear it.
        init = {"init_info": {"directory": str(load.path.parent)}}
        self.http.post("/init_weight_transfer_engine", self._timeout, init)
        self.http.post("/start_weight_update", self._timeout, {})
        self.http.post("/update_weights", self._load_timeout, {"update_info": {"version": load.version}})
        self.http.post("/finish_weight_update", self._load_timeout, {"weight_version": load.version})
        if load.over is not None and self._changes:
            from weightvc.engines import changes

            if changes.file_of(load.path, load.over, load.version).exists():
                return "changes"
        return "disk"


def register() -> None:
    """Make the backend known to vLLM in this process. It is an entry point of `vllm.general_plugins`, which every
    process of vLLM calls; call it yourself where plugins are switched off (VLLM_PLUGINS). May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "weightvc.engines.vllm_backend", "WeightvcEngine")

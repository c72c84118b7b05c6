"""SGLang, over the HTTP of its server.

It reloads a directory (`/update_weights_from_disk`), or is given the tensors that changed by shared memory
(`/update_weights_from_tensor`). Requests, answers and their meaning are those of SGLang's http_server.py and
io_struct.py.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weightvc.engines.base import CALL, LOAD, HttpEngine, Load
from weightvc.engines.http import CallFailed
from weightvc.errors import Refused

if TYPE_CHECKING:
    from weightvc.client import Update

BUCKET: Final = 512 << 20
"""Bytes of tensors in one call, about."""
_SLOWEST: Final = 1.0

Serialize = Callable[[Sequence[tuple[str, Any]]], str]
"""Named torch tensors as a text from which an SGLang worker rebuilds them: base64 of a pickle with their memory's
name."""


class SGLang(HttpEngine):
    """An SGLang server on this host, or the first of one that spans hosts.

    `mode` is what becomes of requests in work: "retract" puts them back into the queue and flushes the prefix cache,
    so that they go on with the new weights; "drain" waits until there are none, and flushes; "in_place" freezes them
    with their caches, for which each request has to carry `extra_key` with the version's id (`cache_keys=True`).

    With `tensors`, changed tensors are handed over by shared memory instead of reloading the directory. That takes
    SGLang in this environment too (its serializer is used), and `tp`, the number of its workers on this host; a model
    that derives weights from others when it loads also needs `load_format`, the name of a loader that SGLang was
    started with (`--custom-weight-loader`).
    """

    kind = "SGLang"

    def __init__(
        self,
        url: str,
        *,
        mode: str = "retract",
        key: str | None = None,
        cache_keys: bool = False,
        tensors: bool = False,
        tp: int = 1,
        load_format: str | None = None,
        serialize: Serialize | None = None,
        timeout: float = CALL,
        load_timeout: float = LOAD,
    ) -> None:
        """Nothing is asked yet. `timeout` is for a call that loads nothing, `load_timeout` for one that does, and for
        requests to end, in seconds. Raises Refused."""
        super().__init__(url, mode=mode, key=key, cache_keys=cache_keys, timeout=timeout, load_timeout=load_timeout)
        if tp < 1:
            raise Refused(f"tp={tp!r}: the number of SGLang's workers, 1 or more")
        self._serialize = (serialize or _serializer()) if tensors else None
        self._tp = tp
        self._load_format = load_format
        self._changed: tuple[str, str, list[str]] | None = None
        """The tensors that differ between two versions, by their ids."""

    def _version(self) -> Any:
        try:
            found = self.http.get("/model_info", self._timeout)
        except CallFailed as error:
            if error.status != 404:
                raise
            found = self.http.get("/get_model_info", self._timeout)  # what it was called before
        return found.get("weight_version") if isinstance(found, dict) else None

    def _set_version(self, text: str) -> None:
        # Unless it is told not to, this call aborts all requests.
        body = {"new_version": text, "abort_all_requests": False}
        self.http.post("/update_weight_version", self._timeout, body)

    def _pause(self, mode: str) -> tuple[float, float]:
        began = time.monotonic()
        if mode != "drain":
            self._stop(mode)
            if mode == "retract":
                self._flush()
            return began, 0.0
        # A flush succeeds only where no request is in work, and does no harm where there is one. One more may come
        # before the pause: the second flush tells.
        wait = 0.02
        while True:
            stopped = None
            try:
                self._flush()
                stopped = time.monotonic()
                self._stop("in_place")
                self._flush()
                return stopped, stopped - began
            except CallFailed as error:
                if error.call != "GET /flush_cache" or error.status != 400:
                    raise
                if stopped is not None:
                    self._resume()
                if time.monotonic() + wait > began + self._load_timeout:
                    raise CallFailed(
                        error.call,
                        f"requests were in work for {self._load_timeout:g} s: send none for a while, or use "
                        "another mode",
                        status=400,
                    ) from error
            time.sleep(wait)
            wait = min(_SLOWEST, wait * 1.5)

    def _stop(self, mode: str) -> None:
        self.http.post("/pause_generation", self._timeout, {"mode": mode})

    def _flush(self) -> None:
        try:
            self.http.get("/flush_cache", self._timeout)
        except CallFailed as error:
            if self.mode == "retract" and error.status == 400:
                raise CallFailed(
                    error.call,
                    "refused: this SGLang does not flush its prefix cache while retracted requests wait. "
                    "Use mode 'drain', or 'in_place' with cache keys, or a release that does",
                    status=400,
                ) from error
            raise

    def _resume(self) -> None:
        self.http.post("/continue_generation", self._timeout, {})

    def _prepare(self, update: "Update", path: Path) -> str:
        if self._serialize is None:
            return ""
        old = self._load_of(update.start, path)
        if old is None:
            return "the version before is not in its slot any more"
        key = old.version, update.version.id
        if self._changed is None or self._changed[:2] != key:
            from weightvc.engines import changes

            names = changes.differing(old.path, path)
            if names is None:
                return "names, dtypes or shapes changed"
            self._changed = *key, names
        return ""

    def _load(self, load: Load) -> str:
        if (
            self._serialize is not None
            and self._changed is not None
            and self._changed[:2] == (load.over, load.version)
        ):
            self._give(load, self._changed[2], self._serialize)
            return "tensors"
        # Flushing is done by now, or keys keep old prefixes apart: asked to do it while requests wait, SGLang dies.
        body = {"model_path": str(load.path), "weight_version": load.version, "flush_cache": False}
        self.http.post("/update_weights_from_disk", self._load_timeout, body)
        return "disk"

    def _give(self, load: Load, names: Sequence[str], serialize: Serialize) -> None:
        buckets = list(_buckets(load.path, names)) or [()]
        for number, bucket in enumerate(buckets, 1):
            named = [(name, tensor) for name, tensor in _read(load.path, bucket)]
            text = serialize(named)
            body: dict[str, Any] = {"serialized_named_tensors": [text] * self._tp, "flush_cache": False}
            if self._load_format is not None:
                body["load_format"] = self._load_format
            if number == len(buckets):
                body["weight_version"] = load.version
            self.http.post("/update_weights_from_tensor", self._load_timeout, body)
            del named  # what the workers have read from may go now


def _buckets(directory: Path, names: Sequence[str]) -> Iterator[Sequence[str]]:
    from weightvc.sources import open_source

    with closing(open_source(directory)) as source:
        sizes = {tensor.name: tensor.nbytes for tensor in source.tensors if not tensor.component}
    bucket: list[str] = []
    filled = 0
    for name in names:
        if bucket and filled + sizes[name] > BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += sizes[name]
    if bucket:
        yield bucket


def _read(directory: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from weightvc.engines import changes

    return changes.tensors(directory, set(names))


def _serializer() -> Serialize:
    """SGLang's own, of this environment. Its pickles hold names of shared memory, not tensors."""
    try:
        from sglang.srt.utils import MultiprocessingSerializer
    except ImportError as error:
        raise Refused(
            "tensors=True needs SGLang's serializer: install sglang beside weightvc, or leave tensors out to reload "
            f"the directory ({error})"
        ) from error

    def serialize(named: Sequence[tuple[str, Any]]) -> str:
        import torch.multiprocessing

        sharing: Any = torch.multiprocessing
        # By default torch shares memory by descriptors, which only its own child processes can be given.
        before = sharing.get_sharing_strategy()
        sharing.set_sharing_strategy("file_system")
        try:
            return str(MultiprocessingSerializer.serialize(list(named), output_str=True))
        finally:
            sharing.set_sharing_strategy(before)

    return serialize

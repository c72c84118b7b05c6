"""An engine that is moved by functions of yours."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from weightvc.engines.base import Engine, Pause, check_mode
from weightvc.errors import EngineError, WeightvcError
from weightvc.history import said

if TYPE_CHECKING:
    from weightvc.client import Update


class Callback(Engine):
    """`load(update)` brings the engine to a staged update: `update.path` is its directory, `update.version` its
    version.

    Without `load`, the update's target is what is served: live tensors in this process, which are written between
    `pause` and `resume`. `pause(mode)` has to see to it that requests in work and the prefix cache are as `mode` says
    (SGLang and VLLM tell what the modes are); `resume()` lets them go on.
    """

    def __init__(
        self,
        load: "Callable[[Update], object] | None" = None,
        *,
        pause: Callable[[str], object] | None = None,
        resume: Callable[[], object] | None = None,
        mode: str = "retract",
        cache_keys: bool = False,
        name: str = "the engine of the callback",
    ) -> None:
        """Raises Refused for a mode that is none, and for in_place without cache keys."""
        check_mode(mode, cache_keys)
        self.name = name
        self.mode = mode
        self._load = load
        self._stop = pause
        self._start = resume
        self._serves: str | None = None
        self._lock = threading.Lock()

    def serving(self) -> str | None:
        """What was loaded last; None before that, and after a load that failed."""
        return self._serves

    def prepare(self, update: "Update") -> None:
        """Stage an update."""
        if not update.staged:
            update.stage()

    def activate(self, update: "Update") -> Pause:
        """Pause, load, resume; then move the target. It is resumed whatever happens.

        Raises EngineError for what a function raised, and what Update.activate() raises.
        """
        with self._lock:
            self.prepare(update)
            before = self._serves
            stopped = time.monotonic()
            self._do("pause", update, before, lambda: self._stop(self.mode) if self._stop is not None else None)
            try:
                began = time.monotonic()
                self._serves = None
                if self._load is None:
                    update.activate()
                else:
                    self._do("load", update, None, lambda: self._load(update) if self._load is not None else None)
                self._serves = update.version.id
                loaded = time.monotonic()
            finally:
                self._do("resume", update, self._serves, lambda: self._start() if self._start is not None else None)
            pause = Pause(self.mode, "callback", "", 0.0, loaded - began, began - stopped + time.monotonic() - loaded)
            if self._load is not None:
                update.activate()
            return pause

    def _do(self, call: str, update: "Update", serves: str | None, function: Callable[[], object]) -> None:
        try:
            function()
        except WeightvcError:
            raise
        except Exception as error:
            raise EngineError(
                f"{self.name}: {call} failed for {said(update.version)} ({type(error).__name__}: {error}); it is "
                "tried again by the next activate()",
                engine=self.name,
                call=call,
                serves=serves,
                paused=None if call == "resume" else False,
            ) from error

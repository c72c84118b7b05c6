"""What engines have in common: how one is moved to a version that was staged, and what is known after a failure.

An activation is: hold the engine's requests, load, let go on, ask what is served. Three rules keep it honest:

- Until weights may have changed, any failure lets the engine go on with what it served.
- From then on the engine says of itself that it is moving, and no longer that it serves a version. So whoever looks
  next, this process or another, loads a version as a whole.
- After a failed load the version before is loaded again, as a whole. If that fails too, nothing is known: the engine
  stays paused, since a mix of two versions would serve wrong answers that look right.
"""

import contextlib
import re
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from weightvc.engines.http import CallFailed, Http
from weightvc.errors import EngineError, Refused
from weightvc.history import said
from weightvc.protocol.checkout import read_marker

if TYPE_CHECKING:
    from weightvc.client import Client, Update

MODES: Final = ("in_place", "retract", "drain")
MOVING: Final = "moving:"
"""What an engine's weight_version begins with while weights are written to it."""
CALL: Final = 30.0
"""Seconds for a call that loads nothing."""
LOAD: Final = 600.0
"""Seconds for a load, and for requests to end."""

_ID: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pause:
    """How an activation held an engine up, in seconds. Requests that came meanwhile waited for `total`."""

    mode: str
    way: str
    """How the weights came in: "disk", "tensors", "changes", "callback"; "none" if it served the version already."""
    why: str = ""
    """Why they did not come in the fast way, where one was asked for."""
    drain: float = 0.0
    """Before the pause, while requests that had begun could end."""
    reload: float = 0.0
    """Of the pause, the load of the weights."""
    swap: float = 0.0
    """All the rest of it: stop, flush, go on."""

    @property
    def total(self) -> float:
        """The pause: `reload` and `swap`."""
        return self.reload + self.swap


class Engine(ABC):
    """A serving engine. One thread at a time moves it."""

    name: str
    """What errors call it."""

    @abstractmethod
    def serving(self) -> str | None:
        """The id of the version that it serves; None if it is another, or half of one. Raises EngineError."""

    @abstractmethod
    def prepare(self, update: "Update") -> None:
        """Stage an update, and what this engine needs for it: all that can be done while it serves.

        activate() does it if nobody did. Raises Refused, and what Update.stage() raises.
        """

    @abstractmethod
    def activate(self, update: "Update") -> Pause:
        """Move the engine to a version, then the update's target.

        Raises EngineError, Refused, and what Update.activate() raises: the engine serves the version then, and the
        target is moved by the next try.
        """

    def behind(self, client: "Client") -> bool:
        """Whether it serves another version than the client's target holds, as after it was started again.

        For Client.follow(also=…). False while it does not answer.
        """
        held = client._holds()
        with contextlib.suppress(EngineError):
            return held is not None and self.serving() != held
        return False


def check_mode(mode: str, cache_keys: bool) -> None:
    """Raise Refused for a mode that is none, and for in_place where old prefixes would serve new requests."""
    if mode not in MODES:
        raise Refused(f"mode {mode!r:.50}: one of {', '.join(MODES)} is wanted")
    if mode == "in_place" and not cache_keys:
        raise Refused(
            "mode 'in_place' leaves what old weights computed in the prefix cache, where new requests find it: send "
            "each request with a cache key of the version that is served (SGLang: extra_key, vLLM: cache_salt) and "
            "say so with cache_keys=True (--cache-keys), or use 'retract' or 'drain'"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A version to load: its directory, and the one whose weights the engine has, if the load may build on that."""

    version: str
    path: Path
    over: str | None = None


class HttpEngine(Engine):
    """An engine behind HTTP that loads from slots (weightvc.Slots). What differs is in the hooks below."""

    kind = "engine"

    def __init__(
        self, url: str, *, mode: str, key: str | None, cache_keys: bool, timeout: float, load_timeout: float
    ) -> None:
        check_mode(mode, cache_keys)
        if not (timeout > 0 and load_timeout > 0):
            raise Refused(f"timeout={timeout!r}, load_timeout={load_timeout!r}: seconds, over 0")
        self.http = Http(url, key)
        self.name = f"{self.kind} {self.http.url}"
        self.mode = mode
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._lock = threading.Lock()
        self._unknown = False
        self._marks = True
        """Whether it can be marked, as far as is known."""

    # Hooks: what an engine is asked, each raising CallFailed.

    @abstractmethod
    def _version(self) -> Any:
        """What it calls the version that it serves."""

    @abstractmethod
    def _pause(self, mode: str) -> tuple[float, float]:
        """Stop generation in a mode, with nothing of old weights in its prefix cache unless keys keep that apart.

        When the call began that stopped it, by time.monotonic(), and seconds before that in which requests ended.
        """

    @abstractmethod
    def _resume(self) -> None:
        """Let it go on; harmless where it does."""

    @abstractmethod
    def _load(self, load: Load) -> str:
        """Load a version, and let the engine call it by its id. How, as Pause.way says it."""

    def _mark(self, text: str) -> None:
        """Let the engine call what it serves by another name."""
        try:
            self._set_version(text)
            # One that says yes and keeps another name, or a part of it, has no mark to be known by.
            self._marks = self._version() == text
        except CallFailed as error:
            if error.status not in (404, 405):
                raise
            self._marks = False  # it has no such call; what is not known is remembered here alone

    @abstractmethod
    def _set_version(self, text: str) -> None: ...

    def _prepare(self, update: "Update", path: Path) -> str:
        """Get ready for the fast way. Why it is not open, or ""."""
        return ""

    # What they have in common

    def serving(self) -> str | None:
        """The id of the version that it serves; None if it is another, or half of one. Raises EngineError."""
        return self._asked()[0]

    def _asked(self) -> tuple[str | None, bool]:
        """What it serves, and whether it may have half of a version."""
        try:
            found = self._version()
        except CallFailed as error:
            raise self._error(error, None, "nothing was changed", paused=None) from error
        text = found if isinstance(found, str) else ""
        half = text.startswith(MOVING) if self._marks else self._unknown
        return text if _ID.fullmatch(text) and not self._unknown else None, half

    def prepare(self, update: "Update") -> None:
        """Stage an update, and what this engine needs for it. Raises Refused, and what Update.stage() raises."""
        self._prepare(update, self._slot(update))

    def activate(self, update: "Update") -> Pause:
        """Move the engine to a version, then the update's target. Raises EngineError, Refused; see Engine."""
        with self._lock:
            path = self._slot(update)
            served, half = self._asked()
            if served == update.version.id:
                # It may have been left paused: by a process that was killed, or by an answer that was lost.
                self._go_on(served)
                pause = Pause(self.mode, "none")
            else:
                pause = self._move(update, path, served, half)
            update.activate()
            return pause

    def _slot(self, update: "Update") -> Path:
        """The directory of a staged update; staged first if it was not."""
        if not update.staged:
            update.stage()
        if update.path is None or Path(update.path).name != update.version.short:
            raise Refused(
                f"{self.name} loads from a directory a version, since engines keep caches by path: make the client "
                'with into=weightvc.Slots("DIR")'
            )
        return Path(update.path)

    def _move(self, update: "Update", path: Path, served: str | None, half: bool) -> Pause:
        version = update.version
        why = self._prepare(update, path)
        before = update.start
        old = self._load_of(before, path) if before not in (None, version.id) else None
        try:
            # By half of a version no request may end.
            stopped, drained = self._pause("retract" if half and self.mode == "drain" else self.mode)
            self._mark(MOVING + version.id)
        except CallFailed as error:
            if half:
                self._stays(error, said(version))
            self._after_no_change(error, served, said(version))
        except BaseException:
            if not half:
                with contextlib.suppress(CallFailed):
                    self._resume()
            raise
        began = time.monotonic()
        self._unknown = True
        try:
            over = before if served is not None and served == before else None
            way = self._load(Load(version.id, path, over))
        except CallFailed as error:
            self._after_failed_load(error, old, said(version))
        except Exception as error:  # on this side of the call: a slot that cannot be read, a serializer
            failed = CallFailed("load", f"{type(error).__name__}: {error}", status=0)
            self._after_failed_load(failed, old, said(version))
        self._unknown = False
        loaded = time.monotonic()
        self._go_on(version.id)
        swap = began - stopped + time.monotonic() - loaded
        try:
            found = self._version()
        except CallFailed as error:
            raise self._error(
                error, version.id, "the weights are in, and it goes on; the next activate() asks again"
            ) from error
        if found != version.id:
            self._unknown = True
            raise EngineError(
                f"{self.name} was given {said(version)} and says that it serves another: somebody else moves it "
                "too, or it was started again meanwhile; the next activate() loads a version as a whole",
                engine=self.name,
                call="ask for the version",
                serves=None,
            )
        return Pause(self.mode, way, why if way == "disk" else "", drained, loaded - began, swap)

    def _load_of(self, ident: str | None, beside: Path) -> Load | None:
        if ident is None:
            return None
        path = beside.with_name(ident[:12])
        marker = read_marker(path) if path.is_dir() else None
        return Load(ident, path) if marker is not None and marker.version == ident else None

    def _go_on(self, serves: str) -> None:
        try:
            self._again(self._resume)
        except CallFailed as error:
            raise self._error(
                error, serves, "the weights are in, and it may still hold its requests", paused=None
            ) from error

    def _again(self, call: Any) -> None:
        """A call that may be repeated, three times at most."""
        for last in (False, False, True):
            try:
                call()
                return
            except CallFailed as error:
                if last or error.status in (401, 403):
                    raise

    def _after_no_change(self, error: CallFailed, served: str | None, what: str) -> NoReturn:
        """No weight has changed: let it go on."""
        paused: bool | None = False
        try:
            self._again(self._resume)
            with contextlib.suppress(CallFailed):
                if served is not None:
                    self._mark(served)
        except CallFailed:
            paused = None
        note = "its weights are as they were" + ("" if paused is False else ", and it may still hold its requests")
        raise self._error(error, served, f"{note}; {what} is tried by the next activate()", paused=paused) from error

    def _after_failed_load(self, error: CallFailed, old: Load | None, what: str) -> NoReturn:
        """Weights may be of two versions by now: load the one before as a whole."""
        if old is not None and error.status is not None:
            with contextlib.suppress(CallFailed):
                self._load(replace(old, over=None))
                self._unknown = False
                note = f"{what} did not come in, and {old.version[:12]} was loaded again"
                try:
                    self._again(self._resume)
                except CallFailed:
                    raise self._error(error, old.version, f"{note}; it may still hold its requests", None) from error
                raise self._error(error, old.version, f"{note}: it goes on with that") from error
        self._stays(error, what)

    def _stays(self, error: CallFailed, what: str) -> NoReturn:
        raise self._error(
            error,
            None,
            f"what it has of {what} is not known, so it stays paused: look at its log, start it again if it is gone; "
            "the next activate() loads a version as a whole and lets it go on",
            paused=True,
        ) from error

    def _error(self, error: CallFailed, serves: str | None, note: str, paused: bool | None = False) -> EngineError:
        what = f"it serves {serves[:12]}" if serves is not None else "which version it serves is not known"
        return EngineError(
            f"{self.name}: {error}; {note} ({what})",
            engine=self.name,
            call=error.call,
            serves=serves,
            paused=paused,
        )

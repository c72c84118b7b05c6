"""One JSON call to an engine over HTTP.

The standard library does: calls are few, to one host, and none may be repeated, redirected or sent through a proxy
that an environment variable names.
"""

import http.client
import json
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from weightvc.errors import Refused

LIMIT: Final = 1 << 20
"""Bytes of an answer that are read."""
SHOWN: Final = 300


class CallFailed(Exception):
    """A call that did not do what it should. `status` is what was answered; None where nothing was."""

    def __init__(self, call: str, what: str, *, status: int | None = None) -> None:
        super().__init__(f"{call}: {what}")
        self.call = call
        self.what = what
        self.status = status


class Http:
    """Calls to the engine at a URL, with a bearer token if it wants one."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises Refused for a URL that is none, and for a key that no header can have."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or "@" in parts.netloc:
            raise Refused(
                f"{url!r:.200} is not an engine's URL: give it as http://HOST:PORT, and a key as key=… "
                "(WEIGHTVC_ENGINE_KEY)"
            )
        if parts.query or parts.fragment:
            raise Refused(f"{url!r:.200}: leave out what comes after the path")
        if key is not None and (not key.isascii() or not key.isprintable()):
            raise Refused("key: a bearer token is printable ASCII in one line")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._where = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str, timeout: float) -> Any:
        """The answer to a GET: JSON, or a text where it is none. Raises CallFailed, also for `"success": false`."""
        return self._call("GET", path, None, timeout)

    def post(self, path: str, timeout: float, body: Any = None, **query: str) -> Any:
        """The answer to a POST of JSON. Raises CallFailed as get()."""
        return self._call("POST", f"{path}?{urlencode(query)}" if query else path, body, timeout)

    def _call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        call = f"{method} {path.partition('?')[0]}"
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._where, timeout=timeout)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise CallFailed(call, f"cannot be reached ({error})") from error
            try:
                data = None if body is None else json.dumps(body).encode()
                headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
                connection.request(method, self._prefix + path, data, headers)
                reply = connection.getresponse()
                raw = reply.read(LIMIT)
            except TimeoutError as error:
                raise CallFailed(call, f"no answer within {timeout:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise CallFailed(call, f"the connection broke ({error or type(error).__name__})") from error
        finally:
            connection.close()
        text = raw.decode("utf-8", "replace")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = text
        if not 200 <= reply.status < 300:
            hint = ": give its API key as key=…" if reply.status in (401, 403) else f": {_shown(answer)}"
            raise CallFailed(call, f"status {reply.status}{hint}", status=reply.status)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise CallFailed(call, f"failed: {_shown(answer)}", status=reply.status)
        return answer


def _shown(answer: Any) -> str:
    if isinstance(answer, dict):
        for field in ("message", "error", "detail"):
            if isinstance(answer.get(field), str):
                answer = answer[field]
                break
    text = " ".join(str(answer).split())
    return f"{text[:SHOWN]}…" if len(text) > SHOWN else text

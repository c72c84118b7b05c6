"""Stand-ins for serving engines: loopback servers that speak the HTTP of SGLang and of vLLM, as far as we use it.

    with SGLangServer() as engine:
        adapter = SGLang(engine.url)
        engine.faults["/flush_cache"] = "500"

They load real weights, from the directory or the tensors that they are told, and `engine.digest()` is of those bits.
They have requests in work and a prefix cache: `begin(prompt, key)` is a request, and `end()` of it says by which
weights it was answered; a prefix that old weights left behind is found again, as in the real ones.

A fault is met by all calls of a path until it is removed: "500", "false" (an answer that says so), "hang" (until
`release()`), "die" (the connection breaks, nothing is done), "late" (done, and the connection breaks), "half" (half
of the weights are loaded, then 500), "404".
"""

import base64
import contextlib
import hashlib
import json
import pickle
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode() + raw(value))
    return found.hexdigest()


@dataclass
class Request:
    """A request in work: `by` are the digests of the weights that its tokens were computed by."""

    prompt: str
    key: str
    by: set[str] = field(default_factory=set)


class Server:
    """What both have in common: HTTP, faults, requests in work, the prefix cache."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.version = "default"
        self.paused = False
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.cache: dict[tuple[str, str], str] = {}
        self.faults: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        self.died = ""
        self._released = threading.Event()
        self._lock = threading.Lock()

    # The network

    def __enter__(self) -> Self:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Its port refuses connections from now on."""
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    def release(self) -> None:
        """Let go of what hangs."""
        self._released.set()

    def paths(self) -> list[str]:
        """The paths that were called."""
        return [path for path, _ in self.calls]

    def answer(self, method: str, path: str, query: dict[str, str], body: Any, token: str | None) -> tuple[int, Any]:
        """Status and answer; None for a broken connection."""
        self.calls.append((path, body if body is not None else query))
        if self.key is not None and token != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        fault = self.faults.get(path)
        match fault:
            case "500":
                return 500, {"error": {"message": "no luck"}, "message": "something broke"}
            case "404":
                return 404, {"detail": "Not Found"}
            case "false":
                return 200, {"success": False, "message": "it did not work"}
            case "hang":
                self._released.wait(60)
            case "die":
                return 0, None
        with self._lock:
            status, answer = self.do(method, path, query, body, half=fault == "half")
        return (0, None) if fault == "late" else (status, answer)

    def do(self, method: str, path: str, query: dict[str, str], body: Any, *, half: bool) -> tuple[int, Any]:
        raise NotImplementedError

    # The engine

    def digest(self) -> str:
        raise NotImplementedError

    def begin(self, prompt: str, key: str = "") -> Request:
        """A request comes in."""
        request = Request(prompt, key)
        self._compute(request)
        self.running.append(request)
        return request

    def end(self, request: Request) -> set[str]:
        """It ends; the digests of the weights that answered it."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        request.by.add(self.digest())
        return request.by

    def ask(self, prompt: str, key: str = "") -> set[str]:
        """A request from its begin to its end."""
        return self.end(self.begin(prompt, key))

    def _compute(self, request: Request) -> None:
        now = self.digest()
        request.by = {self.cache.setdefault((request.key, request.prompt), now), now}

    def go_on(self) -> None:
        self.paused = False
        for request in self.waiting:
            self._compute(request)
        self.running += self.waiting
        self.waiting.clear()

    def retract(self) -> None:
        self.waiting += self.running
        self.running.clear()
        for request in self.waiting:
            request.by.clear()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            token = self.headers.get("Authorization")
            body = json.loads(data) if data else None
            status, answer = server.answer(self.command, parts.path, query, body, token)
            if not status:
                self.close_connection = True
                return
            text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            with contextlib.suppress(OSError):  # who asked may have given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        do_GET = do_POST = _serve

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler


class SGLangServer(Server):
    """SGLang: weights by the names of the checkpoint. `flushes_retracted` is what its releases differ in."""

    def __init__(self, key: str | None = None, *, flushes_retracted: bool = True, old: bool = False) -> None:
        super().__init__(key)
        self.flushes_retracted = flushes_retracted
        self.old = old
        self.weights: dict[str, torch.Tensor] = {}
        self.taken: list[list[str]] = []
        """Names of the tensors that each load had."""

    def digest(self) -> str:
        return digest(self.weights)

    def do(self, method: str, path: str, query: dict[str, str], body: Any, *, half: bool) -> tuple[int, Any]:
        match method, path:
            case "GET", "/model_info" | "/get_model_info" if not (self.old and path == "/model_info"):
                return 200, {"model_path": "x", "weight_version": self.version}
            case "GET", "/flush_cache":
                return self._flush()
            case "POST", "/pause_generation":
                self.paused = True
                assert body["mode"] in ("in_place", "retract"), "abort would lose requests"
                if body["mode"] == "retract":
                    self.retract()
                return 200, "OK"
            case "POST", "/continue_generation":
                self.go_on()
                return 200, "OK"
            case "POST", "/update_weight_version":
                assert body["abort_all_requests"] is False, "the default aborts all requests"
                self.version = body["new_version"]
                return 200, {"success": True}
            case "POST", "/update_weights_from_disk":
                found: dict[str, torch.Tensor] = {}
                for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                    found |= load_file(file)
                return self._take(found, body, half)
            case "POST", "/update_weights_from_tensor":
                named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
                return self._take({name: value.clone() for name, value in named}, body, half)
        return 404, {"detail": "Not Found"}

    def _flush(self) -> tuple[int, str]:
        if self.running or (self.waiting and not self.flushes_retracted):
            return 400, "not flushed\n"
        self.cache.clear()
        return 200, "Cache flushed.\n"

    def _take(self, found: dict[str, torch.Tensor], body: Any, half: bool) -> tuple[int, Any]:
        if not found and "serialized_named_tensors" not in body:
            return 400, {"success": False, "message": "Failed to update weights: no files"}
        names = sorted(found)
        self.taken.append(names)
        for name in names[: len(names) // 2] if half else names:
            self.weights[name] = found[name]
        if half:
            return 500, {"success": False, "message": "CUDA out of memory"}
        if body.get("flush_cache", True) and self._flush()[0] != 200:
            self.died = "Cache flush failed after updating weights"
            return 0, None
        if body.get("weight_version"):
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded"}


class VLLMServer(Server):
    """vLLM: HTTP before workers, each a model and a weight transfer engine (tests/kit/vllm.py)."""

    def __init__(self, workers: list[Any], key: str | None = None) -> None:
        super().__init__(key)
        self.workers = workers

    def digest(self) -> str:
        found = {digest(worker.model.checkpoint()) for worker in self.workers}
        return found.pop() if len(found) == 1 else "workers differ"

    def do(self, method: str, path: str, query: dict[str, str], body: Any, *, half: bool) -> tuple[int, Any]:
        try:
            return 200, self._do(method, path, query, body, half)
        except _NotFound:
            return 404, {"detail": "Not Found"}
        except Exception as error:
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    def _do(self, method: str, path: str, query: dict[str, str], body: Any, half: bool) -> Any:
        match method, path:
            case "GET", "/weight_info":
                return {"weight_version": self.version}
            case "POST", "/update_weight_version":
                self.version = body["new_version"]
                return {"success": True, "new_version": self.version}
            case "POST", "/pause":
                assert query["mode"] in ("keep", "wait"), "abort would lose requests"
                if query["mode"] == "wait":
                    assert not self.running, "a real one answers when they have ended"
                    self.cache.clear()
                self.paused = True
                return {"status": "paused"}
            case "POST", "/resume":
                self.go_on()
                return {"status": "resumed"}
            case "POST", "/reset_prefix_cache":
                if query.get("reset_running_requests") == "true":
                    self.retract()
                if not self.running:
                    self.cache.clear()
                return ""
            case "POST", "/init_weight_transfer_engine":
                for worker in self.workers:
                    worker.init_weight_transfer_engine(body["init_info"])
                return {"message": "Weight transfer initialized"}
            case "POST", "/start_weight_update":
                for worker in self.workers:
                    worker.start_weight_update()
                return {"message": "Weight update started"}
            case "POST", "/update_weights":
                for worker in self.workers[: len(self.workers) // 2] if half else self.workers:
                    worker.update_weights(body["update_info"])
                if half:
                    raise RuntimeError("a worker died")
                return {"message": "Weights updated"}
            case "POST", "/finish_weight_update":
                for worker in self.workers:
                    worker.finish_weight_update()
                if (body or {}).get("weight_version"):
                    self.version = body["weight_version"]
                return {"message": "Weight update finished"}
        raise _NotFound


class _NotFound(Exception):
    pass

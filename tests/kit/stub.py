"""A small S3 server on loopback that misbehaves on demand.

    with Stub() as stub:
        store = stub.place().open()
        stub.fault(method="PUT", key="root", action=Drop(after_apply=True))
        store.swap(...)                     # the write lands, the reply does not: StateUnknown
        assert stub.count("PutObject") == 1

It keeps objects in memory and speaks GetObject (ranges, conditions), HeadObject, PutObject (conditions),
DeleteObject, DeleteObjects, ListObjectsV2, ListBuckets, CreateBucket, HeadBucket, and what a bucket tells of itself
(lifecycle rules, versioning, unfinished uploads), path style, signatures unchecked. It answers 501 to aws-chunked
bodies and 400 to DeleteObjects without Content-MD5, as some servers do.

A fault waits for requests that match it; the first that matches and has turns left is applied.
"""

import base64
import hashlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.kit.servers import BUCKET, Place


@dataclass(frozen=True)
class Status:
    """Answer this status and do nothing."""

    status: int
    code: str = ""

    def reply(self) -> "Reply":
        return _error(self.status, self.code or _CODES.get(self.status, "Error"))


@dataclass(frozen=True)
class Drop:
    """Close the connection instead of answering, before or after the request has taken effect."""

    after_apply: bool = False


@dataclass(frozen=True)
class Late:
    """Answer at once (by a dropped connection, or `status`), and let the request take effect later.

    Later is when the test calls stub.release(), or `delay` seconds from now. Conditions are checked then.
    """

    delay: float | None = None
    status: int | None = None


@dataclass(frozen=True)
class Hang:
    """Wait so many seconds, then answer as usual."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """Call a function of the test, then answer as usual or by `then`: what happens between two requests."""

    function: Callable[[], object]
    then: "Action | None" = None


@dataclass(frozen=True)
class Cut:
    """Promise the whole body, send its first `nbytes` bytes, and close."""

    nbytes: int


@dataclass(frozen=True)
class IgnoreRange:
    """Answer a ranged GET with 200 and the whole object."""


@dataclass(frozen=True)
class WrongRange:
    """Answer a ranged GET with 206 and a part that lies `shift` bytes further on."""

    shift: int = 1


@dataclass(frozen=True)
class IgnoreConditions:
    """Answer as if the request had no If-Match or If-None-Match."""


@dataclass(frozen=True)
class Body:
    """Answer 200 with these bytes and do nothing."""

    data: bytes = b""


Action = Status | Drop | Late | Hang | Call | Cut | IgnoreRange | WrongRange | IgnoreConditions | Body


@dataclass(frozen=True)
class Request:
    """One request as it came: `key` is the whole key in the bucket, "" for requests of the bucket."""

    operation: str
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes = field(repr=False)
    connection: int = 0
    """Which connection it came over, counted from 1."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Fault:
    """A scripted fault; `left` turns are still to come (None: for ever), after `skip` matches are let through."""

    action: Action
    matches: Callable[[Request], bool]
    left: int | None
    skip: int
    done: int = 0

    def take(self, request: Request) -> bool:
        if self.left == 0 or not self.matches(request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.left is not None:
            self.left -= 1
        self.done += 1
        return True


class Stub:
    """The server. `objects` maps whole keys to bytes, for tests to look at and to change behind the code."""

    def __init__(self, *, page_size: int = 1000) -> None:
        self.page_size = page_size
        self.objects: dict[str, bytes] = {}
        self.ahead = 0.0
        """Seconds that its clock is ahead of this host's."""
        self.region = "us-east-1"
        self.lifecycle: list[str] = []
        """Lifecycle rules, each as what stands in its <Rule>."""
        self.versioning = ""
        """"Enabled" or "Suspended"; it keeps no versions, whatever it says."""
        self.uploads: dict[str, float] = {}
        """When multipart uploads began that are not finished, by whole key."""
        self.checks_digests = True
        """Whether a body has to be what its Content-MD5 says."""
        self.log: list[Request] = []
        self._modified: dict[str, float] = {}
        self._faults: list[Fault] = []
        self._late: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._connections = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port and all connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def options(self) -> dict[str, Any]:
        """For open_store(): this server, with short waits between attempts."""
        return {
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "access_key": "stub-access",
            "secret_key": "stub-secret",
            "backoff": 0.001,
        }

    def place(self, prefix: str | None = None) -> Place:
        """A fresh prefix in the bucket, or the one that is named."""
        return Place(f"s3://{BUCKET}/{secrets.token_hex(6) if prefix is None else prefix}", self.options)

    def fault(
        self,
        action: Action,
        *,
        operation: str | None = None,
        method: str | None = None,
        key: str | None = None,
        times: int | None = 1,
        after: int = 0,
        range_from: int = 0,
    ) -> Fault:
        """Do `action` to the next `times` requests (None: to all) that match, after letting `after` of them pass.

        `operation` is S3's name (GetObject, ListObjectsV2, ...), `key` a regular expression that is searched
        in the whole key; a ranged request begins at byte `range_from` or later. What is not given matches everything.
        """

        def matches(request: Request) -> bool:
            return (
                (operation is None or request.operation == operation)
                and (method is None or request.method == method)
                and (key is None or re.search(key, request.key) is not None)
                and (not range_from or _begins(request) >= range_from)
            )

        fault = Fault(action, matches, times, after)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Forget all faults and the log; objects stay."""
        with self._lock:
            self._faults.clear()
            self.log.clear()

    def release(self) -> int:
        """Let the writes that Late holds take effect now, in order; how many."""
        with self._lock:
            waiting, self._late = self._late, []
            for apply in waiting:
                apply()
        return len(waiting)

    def count(self, operation: str, key: str = "") -> int:
        """Requests so far of this operation whose key matches."""
        with self._lock:
            return sum(one.operation == operation and re.search(key, one.key) is not None for one in self.log)

    def _connected(self) -> int:
        with self._lock:
            self._connections += 1
            return self._connections

    def _answer(self, request: Request) -> tuple[Reply | None, int | None]:
        """The reply (None: drop the connection) and after how many bytes of it to stop."""
        with self._lock:
            self.log.append(request)
            fault = next((one for one in self._faults if one.take(request)), None)
            action = fault.action if fault else None
        if isinstance(action, Call):
            action.function()
            action = action.then
        match action:
            case Status():
                return action.reply(), None
            case Body():
                return Reply(200, {"Content-Type": "application/xml"}, action.data), None
            case Drop():
                if action.after_apply:
                    self._apply(request)
                return None, None
            case Late():
                self._later(request, action.delay)
                return (None if action.status is None else Status(action.status).reply()), None
            case Hang():
                time.sleep(action.seconds)
                return self._apply(request), None
            case Cut():
                return self._apply(request), action.nbytes
            case IgnoreRange():
                return self._apply(_without(request, "range")), None
            case WrongRange():
                return self._apply(_shifted(request, action.shift)), None
            case IgnoreConditions():
                return self._apply(_without(request, "if-match", "if-none-match")), None
        return self._apply(request), None

    def _later(self, request: Request, delay: float | None) -> None:
        def apply() -> None:
            self._apply(request)

        if delay is None:
            with self._lock:
                self._late.append(apply)
            return
        timer = threading.Timer(delay, apply)
        timer.daemon = True
        timer.start()

    # -- S3 --------------------------------------------------------------------------------------------

    def _apply(self, request: Request) -> Reply:
        chunked = "aws-chunked" in request.headers.get("content-encoding", "")
        if chunked or request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return _error(501, "NotImplemented")
        if request.operation == "ListBuckets":
            bucket = f"<Bucket><Name>{BUCKET}</Name></Bucket>"
            return _xml(f"<ListAllMyBucketsResult><Buckets>{bucket}</Buckets></ListAllMyBucketsResult>")
        if request.operation == "CreateBucket":
            return Reply(200)
        if request.bucket != BUCKET:
            return _error(404, "NoSuchBucket")
        with self._lock:
            match request.operation:
                case "GetObject" | "HeadObject":
                    return self._get(request)
                case "PutObject":
                    return self._put(request)
                case "DeleteObject":
                    self.objects.pop(request.key, None)
                    return Reply(204)
                case "DeleteObjects":
                    return self._delete(request)
                case "ListObjectsV2":
                    return self._list(request)
                case "HeadBucket":
                    return Reply(200, {"x-amz-bucket-region": self.region})
                case "GetBucketLifecycleConfiguration" if not self.lifecycle:
                    return _error(404, "NoSuchLifecycleConfiguration")
                case "GetBucketLifecycleConfiguration":
                    rules = "".join(f"<Rule>{rule}</Rule>" for rule in self.lifecycle)
                    return _xml(f"<LifecycleConfiguration>{rules}</LifecycleConfiguration>")
                case "GetBucketVersioning":
                    status = f"<Status>{self.versioning}</Status>" if self.versioning else ""
                    return _xml(f"<VersioningConfiguration>{status}</VersioningConfiguration>")
                case "ListMultipartUploads":
                    return self._list_uploads(request)
        return _error(501, "NotImplemented")

    def _get(self, request: Request) -> Reply:
        if request.key not in self.objects:
            return _error(404, "NoSuchKey")
        data = self.objects[request.key]
        etag = _etag(data)
        headers = {"ETag": f'"{etag}"', "Last-Modified": _http_date(self._modified.get(request.key, time.time()))}
        if "if-match" in request.headers and _bare(request.headers["if-match"]) != etag:
            return _error(412, "PreconditionFailed")
        if "if-none-match" in request.headers and _bare(request.headers["if-none-match"]) == etag:
            return Reply(304, headers)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if not match:
            return Reply(200, headers, data)
        start, stop = int(match[1]), min(len(data), int(match[2] or len(data)) + 1)
        if start >= len(data):
            return Reply(416, {"Content-Range": f"bytes */{len(data)}"}, _error(416, "InvalidRange").body)
        return Reply(206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop])

    def _put(self, request: Request) -> Reply:
        if self.checks_digests and request.headers.get("content-md5", _md5(request.body)) != _md5(request.body):
            return _error(400, "BadDigest")
        there = self.objects.get(request.key)
        if "if-none-match" in request.headers and there is not None:
            return _error(412, "PreconditionFailed")
        if "if-match" in request.headers:
            if there is None:
                return _error(404, "NoSuchKey")
            if _bare(request.headers["if-match"]) != _etag(there):
                return _error(412, "PreconditionFailed")
        self.objects[request.key] = request.body
        self._modified[request.key] = time.time() + self.ahead
        return Reply(200, {"ETag": f'"{_etag(request.body)}"'})

    def _delete(self, request: Request) -> Reply:
        if request.headers.get("content-md5") != _md5(request.body):
            return _error(400, "InvalidRequest")
        for element in ElementTree.fromstring(request.body).iter():
            if element.tag.endswith("Key"):
                self.objects.pop(element.text or "", None)
        return _xml("<DeleteResult/>")

    def _list(self, request: Request) -> Reply:
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token", "")
        size = min(self.page_size, int(request.query.get("max-keys", "1000")))
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page, more = keys[:size], len(keys) > size
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        contents = "".join(
            f"<Contents><Key>{quote(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f'<ETag>"{_etag(self.objects[key])}"</ETag>'
            f"<LastModified>{_iso_date(self._modified.get(key, time.time()))}</LastModified></Contents>"
            for key in page
        )
        return _xml(
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"<EncodingType>url</EncodingType>{token}{contents}</ListBucketResult>"
        )

    def _list_uploads(self, request: Request) -> Reply:
        uploads = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>1</UploadId><Initiated>{_iso_date(began)}</Initiated></Upload>"
            for key, began in sorted(self.uploads.items())
            if key.startswith(request.query.get("prefix", ""))
        )
        return _xml(
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{uploads}</ListMultipartUploadsResult>"
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # or a race of several clients waits a second for its turn to connect

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._open):
            super().shutdown_request(connection)  # or clients would go on over connections that are kept alive

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave at any time."""


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        number = 0

        def setup(self) -> None:
            super().setup()
            self.number = stub._connected()

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            bucket, _, key = unquote(url.path).lstrip("/").partition("/")
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            request = Request(
                _operation(self.command, bucket, key, query),
                self.command,
                bucket,
                key,
                query,
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(int(self.headers.get("Content-Length", 0))),
                self.number,
            )
            reply, cut = stub._answer(request)
            if reply is None:
                self.close_connection = True
                return
            body = b"" if self.command == "HEAD" or reply.status in (204, 304) else reply.body
            head = [f"HTTP/1.1 {reply.status} {self.responses.get(reply.status, ('',))[0]}"]
            head.append(f"Date: {_http_date(time.time() + stub.ahead)}")
            head += [f"{name}: {value}" for name, value in reply.headers.items()]
            if reply.status not in (204, 304):
                head.append(f"Content-Length: {len(reply.body)}")
            if cut is not None:
                body = body[:cut]
                self.close_connection = True
            self.wfile.write("\r\n".join([*head, "", ""]).encode() + body)

        def log_message(self, *_: object) -> None:
            """The log of requests is stub.log."""

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    return Handler


def _operation(method: str, bucket: str, key: str, query: dict[str, str]) -> str:
    if not bucket:
        return "ListBuckets"
    if key:
        return {"GET": "GetObject", "PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}.get(
            method, ""
        )
    if method == "POST" and "delete" in query:
        return "DeleteObjects"
    if method == "GET":
        return next((name for word, name in _OF_BUCKET.items() if word in query), "ListObjectsV2")
    return {"PUT": "CreateBucket", "HEAD": "HeadBucket"}.get(method, "")


_OF_BUCKET = {
    "lifecycle": "GetBucketLifecycleConfiguration",
    "versioning": "GetBucketVersioning",
    "uploads": "ListMultipartUploads",
}


def _begins(request: Request) -> int:
    """The byte that a request's range begins at; 0 without one."""
    found = re.match(r"bytes=(\d+)-", request.headers.get("range", ""))
    return int(found[1]) if found else 0


def _without(request: Request, *names: str) -> Request:
    return replace(request, headers={name: value for name, value in request.headers.items() if name not in names})


def _shifted(request: Request, shift: int) -> Request:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    if not match:
        return request
    moved = f"bytes={int(match[1]) + shift}-{int(match[2]) + shift}"
    return replace(request, headers={**request.headers, "range": moved})


_CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


def _error(status: int, code: str) -> Reply:
    return _xml(f"<Error><Code>{code}</Code><Message>the stub answers {status}</Message></Error>", status)


def _xml(body: str, status: int = 200) -> Reply:
    return Reply(status, {"Content-Type": "application/xml"}, f'<?xml version="1.0"?>{body}'.encode())


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _bare(etag: str) -> str:
    return etag.strip('"')


def _http_date(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(seconds))


def _iso_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))

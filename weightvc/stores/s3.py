"""A store in an S3 bucket, through boto3: one HTTP attempt at a time, all retries our own.

boto3's retries are off: it would repeat a conditional PUT whose reply was lost and report 412 for a write
that landed. Reads, plain puts (fresh names), listings and deletes are repeated here instead.
"""

import base64
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlencode, urlsplit

import boto3
import botocore.loaders
import botocore.session
from botocore import UNSIGNED
from botocore import exceptions as boto
from botocore.config import Config
from botocore.parsers import ResponseParserError

from weightvc import __version__
from weightvc.errors import (
    AccessDenied,
    BadName,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    StateUnknown,
    StoreError,
    Unavailable,
    UnsafeStore,
)
from weightvc.pool import Pool
from weightvc.stores.base import Got, Listed, Stats, check_key, check_prefix, check_range, is_key

T = TypeVar("T")

_FIRST = 16 << 20
"""Bytes of the first ranged read of an object whose size is not known; larger objects are read in parallel."""

_PART = 32 << 20
_PARALLEL = 4
_BATCH = 1000
"""Keys of one DeleteObjects, the most that S3 takes."""

_DENIED = {
    "AccessDenied": "give the identity this right; without ListBucket, S3 says this of missing keys too",
    "InvalidAccessKeyId": "check the access key",
    "SignatureDoesNotMatch": "check the secret key",
    "ExpiredToken": "get fresh credentials",
    "TokenRefreshRequired": "get fresh credentials",
    "InvalidToken": "check the session token",
    "RequestTimeTooSkewed": "set this machine's clock",
}
_AGAIN = {
    "BadDigest",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}
_NEVER_SENT = (boto.EndpointConnectionError, boto.ConnectTimeoutError)
_LOST = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, ResponseParserError)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.UnauthorizedSSOTokenError,
)


class _Again(Exception):
    """This attempt of something harmless failed; the message says how."""


class _Changed(Exception):
    """A later part of an object came from another object than its first part."""


class S3Store:
    """Objects in a bucket of S3, or of a server that speaks it, under a prefix.

    `url` is `s3://BUCKET/PREFIX`; empty parts of the prefix do not count, so `s3://b/p`, `s3://b/p/` and
    `s3://b//p` are one place. Credentials, region and endpoint that are not given come from where boto3 looks.
    `attempts` bounds the HTTP requests for one read, put, list page or delete batch; before the n-th repeat it
    waits a random time up to `backoff` * 2^n seconds, 20 at most. Timeouts are in seconds. `page_size` is
    the number of keys in a page of a listing. `addressing_style` is "path", "virtual" or "auto"; by
    default "path" for other endpoints than Amazon's. `anonymous` sends no signature, for public buckets.

    Threads may share it; a forked child connects anew.
    """

    conditional = False

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        profile: str | None = None,
        anonymous: bool | str = False,
        addressing_style: str | None = None,
        attempts: int | str = 6,
        backoff: float | str = 0.2,
        connect_timeout: float | str = 10.0,
        read_timeout: float | str = 60.0,
        page_size: int | str = 1000,
    ) -> None:
        self.bucket, self.prefix = _place(url)
        if endpoint_url and "@" in urlsplit(endpoint_url).netloc:
            raise BadName("endpoint_url has credentials in it: give access_key and secret_key instead")
        self.url = f"s3://{self.bucket}/{self.prefix}"
        said = {
            "endpoint_url": endpoint_url,
            "region": region,
            "profile": profile,
            "addressing_style": addressing_style,
            "anonymous": "true" if str(anonymous).lower() in ("1", "true", "yes") else None,
        }
        given = urlencode({name: value for name, value in said.items() if value}, safe=":/")
        self.address = f"{self.url}?{given}" if given else self.url
        self.stats = Stats()
        self._endpoint_url = endpoint_url
        self._region = region
        self._keys = (access_key, secret_key, session_token)
        self._profile = profile
        self._anonymous = str(anonymous).lower() in ("1", "true", "yes")
        self._style = addressing_style
        try:
            self._attempts = max(1, int(attempts))
            self._backoff = float(backoff)
            self._timeouts = (float(connect_timeout), float(read_timeout))
            self._page_size = min(1000, max(1, int(page_size)))
        except ValueError as error:
            raise BadName(f"{self.url}: an option is not a number: {error}") from None
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._made: Any = None

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_pid", "_lock", "_made", "stats")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stats = Stats()
        self._reset()

    # -- operations ------------------------------------------------------------------------------------

    def get(
        self,
        key: str,
        *,
        start: int | None = None,
        length: int | None = None,
        unless_etag: str | None = None,
    ) -> Got | None:
        check_key(key)
        first, count = check_range(start, length)

        def attempt() -> Got | None:
            if count == 0:
                return self._head(key, unless_etag)
            got = self._read(key, first, _FIRST if count is None else min(count, _PART), unless_etag=unless_etag)
            if got is None:
                return None
            wanted = max(0, (got.size if count is None else min(got.size, first + count)) - first)
            if len(got.data) == wanted:
                return got
            if len(got.data) > wanted:  # the server ignored the range
                return Got(got.data[:wanted], got.etag, got.size)
            try:
                rest = self._rest(key, first + len(got.data), first + wanted, got.etag)
            except _Changed as error:
                raise _Again("the object changed while it was read") from error
            return Got(b"".join((got.data, *rest)), got.etag, got.size)

        return self._retry("read", key, attempt)

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        return self._retry("write", key, lambda: self._put(key, data))

    def create(self, key: str, data: bytes) -> str:
        return self._conditional("create", key, data, {"IfNoneMatch": "*"})

    def swap(self, key: str, data: bytes, etag: str) -> str:
        # The bare ETag: Ceph compares the quotes too.
        return self._conditional("swap", key, data, {"IfMatch": etag})

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # Servers order their pages as they like, so all are read before the first key is given out.
        check_prefix(prefix)
        whole = self.prefix + prefix
        found: dict[str, Listed] = {}
        seen: set[str] = set()
        token: str | None = None
        while True:
            page = self._retry("list", prefix, partial(self._page, whole, token))
            for item in page.get("Contents", ()):
                name = item["Key"]
                if not name.startswith(whole):
                    raise Unavailable(f"listing {self.url}{prefix}: the server listed {name!r}, not under the prefix")
                key = name[len(self.prefix) :]
                if is_key(key):
                    found[key] = Listed(key, item["Size"], item["LastModified"].timestamp())
            if not page["IsTruncated"]:
                break
            token = page.get("NextContinuationToken")
            if not token or token in seen:
                raise Unavailable(
                    f"listing {self.url}{prefix}: the server says that there is more, but not where: try again"
                )
            seen.add(token)
        return iter([found[key] for key in sorted(found)])

    def delete(self, keys: Iterable[str]) -> dict[str, Exception]:
        names = list(dict.fromkeys(check_key(key) for key in keys))
        failed: dict[str, Exception] = {}
        for i in range(0, len(names), _BATCH):
            failed |= self._delete(names[i : i + _BATCH])
        return failed

    def close(self) -> None:
        if self._made is not None and self._pid == os.getpid():
            self._made.close()
        self._made = None

    # -- what the store itself has no use for ------------------------------------------------------------

    @property
    def region(self) -> str:
        """The region that requests are signed for. Raises AccessDenied, BadName."""
        return str(self._client().meta.region_name)

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return str(self._client().meta.endpoint_url)

    def identity(self) -> tuple[str, str] | None:
        """The access key's id and how boto3 found it; None if requests are not signed."""
        found = None if self._anonymous else self._session().get_credentials()
        return None if found is None else (found.access_key or "", found.method or "")

    def ask(self, operation: str, *, attempts: int | None = None, **arguments: Any) -> dict[str, Any]:
        """What boto3 gives for another operation on the bucket. Where S3 refused, its answer is the error's cause.

        Raises KeyNotFound, AccessDenied, Unavailable.
        """
        return self._retry(operation, "", lambda: self._send("reads", operation, **arguments), attempts)

    # -- one attempt each ------------------------------------------------------------------------------

    def _read(
        self, key: str, start: int, length: int, *, unless_etag: str | None = None, etag: str | None = None
    ) -> Got | None:
        """Bytes [start, start + length) in one request, or all from `start` if the server ignores the range.

        None if the object's ETag is `unless_etag`. Raises _Changed if it is not `etag`.
        """
        asked: dict[str, str] = {"Range": f"bytes={start}-{start + length - 1}"}
        if unless_etag is not None:
            asked["IfNoneMatch"] = f'"{unless_etag}"'
        if etag:
            asked["IfMatch"] = etag
        try:
            reply = self._send("reads", "get_object", Key=self.prefix + key, **asked)
        except boto.ClientError as error:
            status = _status(error)
            if status == 304:
                return None
            if status == 416:  # the object is empty or ends before `start`
                got = self._head(key, unless_etag)
                if got is not None and got.size > start:
                    raise _Again(f"the server has no byte {start} of {got.size}") from error
                return got
            if status == 412:
                raise _Changed from error
            raise
        body = reply["Body"]
        try:
            found = _bare(reply.get("ETag", ""))
            if found == unless_etag:
                return None
            if etag is not None and found != etag:
                raise _Changed
            if reply["ResponseMetadata"]["HTTPStatusCode"] == 206:
                promised, size = _content_range(reply.get("ContentRange", ""), start, length)
                data = self._body(body, promised)
            else:
                whole = self._body(body, reply.get("ContentLength"))
                data, size = whole[start:], len(whole)
        finally:
            body.close()
        return Got(data, found, size)

    def _body(self, body: Any, length: int | None) -> bytes:
        """The whole body, which must have `length` bytes where that is known: it may end early without an error."""
        data: bytes = body.read()
        with self._guard():
            self.stats.bytes_read += len(data)
        if length is not None and len(data) != length:
            raise _Again(f"{len(data)} bytes came instead of {length}")
        return data

    def _head(self, key: str, unless_etag: str | None) -> Got | None:
        """An empty range: only the ETag and the size are asked for."""
        asked = {} if unless_etag is None else {"IfNoneMatch": f'"{unless_etag}"'}
        try:
            reply = self._send("reads", "head_object", Key=self.prefix + key, **asked)
        except boto.ClientError as error:
            if _status(error) == 304:
                return None
            raise
        etag = _bare(reply.get("ETag", ""))
        return None if etag == unless_etag else Got(b"", etag, reply["ContentLength"])

    def _rest(self, key: str, start: int, stop: int, etag: str) -> Iterable[bytes]:
        """Bytes [start, stop) by parallel reads, all of the object whose ETag the first read saw."""

        def part(begin: int) -> bytes:
            length = min(_PART, stop - begin)
            got = self._retry("read", key, lambda: self._read(key, begin, length, etag=etag))
            if got is None or len(got.data) < length:
                raise _Changed
            return got.data[:length]

        with Pool(_PARALLEL) as threads:
            return list(threads.map(part, range(start, stop, _PART)))

    def _put(self, key: str, data: bytes, **conditions: str) -> str:
        # The head says what the body's digest is: else SeaweedFS keeps an empty object where a writer died after it.
        reply = self._send(
            "writes", "put_object", Key=self.prefix + key, Body=data, ContentMD5=_md5(data), **conditions
        )
        with self._guard():
            self.stats.bytes_written += len(data)
        etag = _bare(reply.get("ETag", ""))
        if not etag:
            raise UnsafeStore(f"{self.url} answers a write without an ETag, so it cannot be used: use another store")
        return etag

    def _conditional(self, verb: str, key: str, data: bytes, condition: dict[str, str]) -> str:
        """One conditional PUT, sent once. What may have landed is StateUnknown: the caller reads, then decides."""
        check_key(key)
        what = f"{verb} of {key!r} in {self.url}"
        try:
            return self._put(key, data, **condition)
        except boto.ClientError as error:
            status, code = _status(error), _code(error)
            if status == 412:
                if verb == "create":
                    raise KeyExists(f"{key!r} exists already in {self.url}") from error
                raise PreconditionFailed(
                    f"{key!r} in {self.url} is not the object that was read: read it again"
                ) from error
            if status == 404 and verb == "swap" and code != "NoSuchBucket":
                raise PreconditionFailed(f"{key!r} is no longer in {self.url}: read it again") from error
            if status == 501:
                raise UnsafeStore(
                    f"{self.url} has no conditional writes ({code}): use a store that has them, such as Amazon S3"
                ) from error
            if status >= 500 or status == 408 or code == "RequestTimeout":
                raise StateUnknown(f"{what}: the server answered {status} {code}: read it again") from error
            if status in (409, 429):
                # Refused since another write is under way, or for the rate: nothing was written.
                raise Unavailable(f"{what}: the server answered {status} {code}: try again") from error
            self._refused(verb, key, error)
        except _NEVER_SENT as error:
            raise Unavailable(f"{what}: cannot connect: {error}") from error
        except _LOST as error:
            raise StateUnknown(f"{what}: the reply was lost ({error}): read it again") from error
        except boto.BotoCoreError as error:
            self._broken(verb, key, error)

    def _page(self, prefix: str, token: str | None) -> dict[str, Any]:
        more = {} if token is None else {"ContinuationToken": token}
        page = self._send("lists", "list_objects_v2", Prefix=prefix, MaxKeys=self._page_size, **more)
        if "IsTruncated" not in page:
            raise _Again("the reply is not a listing")  # an empty 200 must not read as an empty bucket
        return page

    def _delete(self, names: Sequence[str]) -> dict[str, Exception]:
        """One batch; keys that the server could not delete just now are asked again."""
        left = names
        failed: dict[str, Exception] = {}

        def attempt() -> None:
            nonlocal left
            reply = self._send(
                "deletes",
                "delete_objects",
                Delete={"Objects": [{"Key": self.prefix + name} for name in left], "Quiet": True},
            )
            again = []
            for one in reply.get("Errors", ()):
                name, code = one["Key"][len(self.prefix) :], one.get("Code", "")
                if code in _AGAIN:
                    again.append(name)
                elif code in _DENIED:
                    failed[name] = AccessDenied(f"cannot delete {name!r} in {self.url}: {code}: {_DENIED[code]}")
                elif code not in ("NoSuchKey", "NoSuchVersion"):
                    failed[name] = Unavailable(f"cannot delete {name!r} in {self.url}: {code} {one.get('Message')}")
            left = again
            if again:
                raise _Again(f"{len(again)} of {len(names)} keys were not deleted")

        try:
            self._retry("delete", names[0], attempt)
        except (StoreError, KeyNotFound) as error:
            failed |= dict.fromkeys(left, error)
        return failed

    # -- plumbing --------------------------------------------------------------------------------------

    def _send(self, kind: str, operation: str, **arguments: Any) -> dict[str, Any]:
        client = self._client()
        with self._guard():
            setattr(self.stats, kind, getattr(self.stats, kind) + 1)
        reply: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **arguments)
        return reply

    def _retry(self, verb: str, key: str, attempt: Callable[[], T], attempts: int | None = None) -> T:
        attempts = attempts or self._attempts
        for number in range(attempts):
            try:
                return attempt()
            except _Again as error:
                last: Exception = error
            except boto.ClientError as error:
                if _status(error) not in (408, 429, 500, 502, 503, 504) and _code(error) not in _AGAIN:
                    self._refused(verb, key, error)
                last = error
            except (*_NEVER_SENT, *_LOST) as error:
                last = error
            except boto.BotoCoreError as error:
                self._broken(verb, key, error)
            if number + 1 < attempts:
                time.sleep(random.uniform(0, min(20.0, self._backoff * 2**number)))
        raise Unavailable(
            f"cannot {verb} {key!r} in {self.url}: {attempts} attempts, the last: {last}: try again later"
        ) from last

    def _refused(self, verb: str, key: str, error: boto.ClientError) -> NoReturn:
        """Raise what an answer means that no repeat will change."""
        status, code = _status(error), _code(error)
        what = f"cannot {verb} {key!r} in {self.url}"
        if code == "NoSuchBucket":
            raise KeyNotFound(
                f"{what}: there is no bucket {self.bucket!r}: check the name and the endpoint"
            ) from error
        if status == 507 or "QuotaExceeded" in code:  # Ceph has it with 403, others with other statuses
            raise Unavailable(
                f"{what}: the bucket is full ({code}): raise its quota, or `weightvc expire` and `weightvc gc`"
            ) from error
        if status in (401, 403) or code in _DENIED:
            raise AccessDenied(f"{what}: {code}: {_DENIED.get(code, _DENIED['AccessDenied'])}") from error
        if status == 404:
            raise KeyNotFound(f"no object {key!r} in {self.url}") from error
        message = error.response.get("Error", {}).get("Message", "")
        raise Unavailable(f"{what}: the server answered {status} {code}: {message}") from error

    def _broken(self, verb: str, key: str, error: boto.BotoCoreError) -> NoReturn:
        """Raise what boto3 found wrong before it sent anything."""
        what = f"cannot {verb} {key!r} in {self.url}"
        if isinstance(error, _NO_CREDENTIALS):
            raise AccessDenied(
                f"{what}: {error}: set up credentials for boto3, or give access_key and secret_key"
            ) from error
        if isinstance(error, boto.ParamValidationError):
            raise BadName(f"{what}: {error}") from error
        raise Unavailable(f"{what}: {error}") from error

    def _guard(self) -> threading.Lock:
        """The lock of this process: a fork may have copied it while it was held."""
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    def _client(self) -> Any:
        with self._guard():
            if self._made is None:
                try:
                    self._made = self._connect()
                except _NO_CREDENTIALS as error:
                    raise AccessDenied(f"{self.url}: {error}: set up credentials for boto3") from error
                except ValueError as error:
                    raise BadName(f"{self.url}: {error}: check endpoint_url and region") from error
            return self._made

    def _session(self) -> boto3.session.Session:
        access_key, secret_key, session_token = self._keys
        core = botocore.session.Session()
        core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
        return boto3.session.Session(
            botocore_session=core,
            profile_name=self._profile,
            region_name=self._region,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            aws_session_token=session_token,
        )

    def _connect(self) -> Any:
        session = self._session()

        def make(style: Any) -> Any:
            config = Config(
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=self._timeouts[0],
                read_timeout=self._timeouts[1],
                tcp_keepalive=True,
                max_pool_connections=32,
                s3={"addressing_style": style},
                signature_version=UNSIGNED if self._anonymous else None,
                # What boto3 says of itself it writes anew for each request, which is a tenth of what one takes.
                user_agent=f"weightvc/{__version__} Boto3/{boto3.__version__}",
            )
            region = session.region_name or "us-east-1"
            return session.client("s3", endpoint_url=self._endpoint_url, region_name=region, config=config)

        client = make(self._style or ("path" if self._endpoint_url else "auto"))
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        if not self._style and not self._endpoint_url and not re.search(r"\.amazonaws\.com(\.cn)?$", host):
            client = make("path")  # the endpoint came from boto3's own configuration
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        return client


@lru_cache(4)
def _loader(path: str | None) -> Any:
    """What reads botocore's descriptions of services and keeps them: each client would take 50 ms to do so anew."""
    return botocore.loaders.create_loader(path)


def _place(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://BUCKET/PREFIX`; the prefix is "" or ends with "/"."""
    bucket, _, path = url.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise BadName("an s3:// URL has credentials in it: give access_key and secret_key as options instead")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", bucket):
        raise BadName(f"s3://{bucket}/ has no usable bucket name: write s3://BUCKET/PREFIX")
    parts = [part for part in path.split("/") if part]
    for part in parts:
        if part in (".", "..") or not re.fullmatch(r"[!-\[\]-~]+", part):
            raise BadName(f"prefix part {part!r} of s3://{bucket}/ cannot be used: use printable ASCII, no '..'")
    return bucket, "".join(f"{part}/" for part in parts)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    # Many servers still ask for it, though S3 itself takes the newer checksums.
    params["headers"]["Content-MD5"] = _md5(params["body"])


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _content_range(header: str, start: int, length: int) -> tuple[int, int]:
    """Length of the part and size of the object; it must be the part that was asked for."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", header.strip())
    if match:
        first, last, size = map(int, match.groups())
        if first == start and last == min(start + length, size) - 1:
            return last - first + 1, size
    raise _Again(f"asked for bytes {start}-{start + length - 1}, the server sent {header!r}")


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))

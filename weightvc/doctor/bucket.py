"""Checks of a bucket of S3: what its owner has set, and what would delete, keep or hide our objects."""

import base64
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore.exceptions import ClientError

from weightvc.doctor.case import DAY, Case
from weightvc.doctor.finding import Finding, ok, problem, skipped, span, warning
from weightvc.errors import AccessDenied, KeyNotFound, Unavailable, UnsafeStore, WeightvcError
from weightvc.stores.base import Store
from weightvc.stores.s3 import S3Store

SKEWED: Final = 30.0
"""Seconds between two clocks from which times that are told mislead."""
REFUSED: Final = 900.0
"""Seconds from which S3 refuses requests (RequestTimeTooSkewed)."""
NEEDED: Final = ("root", "manifest/", "pack/", "schema/", "layout/", "file/", "segment/", "page/")
"""What the keys begin with of which none may go."""
_UNKNOWN: Final = (400, 405, 501)
"""What servers answer to requests that they do not have."""
FROZEN: Final = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes whose objects cannot be read until they are restored."""


def bucket(case: Case) -> Iterator[Finding]:
    """Whether there is such a bucket, where it lies, who we are, and how late it is there."""
    store = _store(case)
    try:
        reply: Mapping[str, Any] = store.ask("head_bucket")
        now = time.time()
        yield ok("bucket", f"{store.bucket} at {store.endpoint}")
    except WeightvcError as error:
        now = time.time()
        reply = _reply(error)
        # Who may not list may not ask for it either: reading the root tells more.
        case.usable = bool(reply) and not isinstance(error, KeyNotFound)
        if not case.usable:
            says = f"there is no bucket {store.bucket!r} at {store.endpoint}" if reply else str(error)
            yield problem("bucket", type(error), says, "check the name and --endpoint-url" if reply else "")
            return
    headers = reply["ResponseMetadata"]["HTTPHeaders"]
    yield _credentials(store)
    yield _region(store, headers.get("x-amz-bucket-region"))
    yield _clock(case, headers.get("date"), now)


def _credentials(store: S3Store) -> Finding:
    found = store.identity()
    if found is None:
        return ok("credentials", "none: requests are not signed (anonymous)")
    name, source = found
    return ok("credentials", f"access key …{name[-4:]}, which boto3 found by {source!r}")


def _region(store: S3Store, there: str | None) -> Finding:
    if there is None:
        return ok("region", f"{store.region}; the server does not say where the bucket lies")
    if there != store.region:
        says = f"the bucket lies in {there}, and requests are signed for {store.region}"
        return warning("region", says, f"give --region {there}, or set AWS_REGION={there}")
    return ok("region", there)


def _clock(case: Case, date: str | None, now: float) -> Finding:
    """The Date header was written just before `now`, and is cut to the second."""
    try:
        there = parsedate_to_datetime(date or "").timestamp() + 0.5
    except ValueError:
        return skipped("clock", "the server does not tell the time")
    case.ahead = there - now
    late = abs(case.ahead)
    if late < SKEWED:
        return ok("clock", "this host and the store agree", ahead_seconds=case.ahead)
    says = f"this host's clock is {span(late)} {'behind' if case.ahead > 0 else 'ahead of'} the store's"
    mend = "set it (chrony, systemd-timesyncd); `timedatectl` shows how it stands"
    if late < REFUSED:
        return warning("clock", f"{says}: ages and lags are told wrong", mend, ahead_seconds=case.ahead)
    return problem("clock", AccessDenied, f"{says}: S3 refuses what is signed so", mend, ahead_seconds=case.ahead)


def lifecycle(case: Case) -> Iterator[Finding]:
    """Whether a lifecycle rule deletes or freezes what the repository needs."""
    store = _store(case)
    rules = _rules(store)
    if rules is None:
        yield skipped("lifecycle", "the server does not tell its lifecycle rules")
        return
    bad = False
    for rule in rules:
        name = repr(rule.get("ID", "without a name"))
        if not _reaches(rule, store.prefix):
            continue
        fate = ""
        if rule.get("Expiration", {}).keys() & {"Days", "Date"}:
            when = rule["Expiration"]
            fate = f"deletes objects {_when(when)}: versions will be lost"
        elif frozen := [one for one in rule.get("Transitions", ()) if one.get("StorageClass") in FROZEN]:
            fate = f"moves objects to {frozen[0]['StorageClass']} {_when(frozen[0])}: versions cannot be read then"
        if fate:
            bad = True
            mend = (
                f"take the rule out, or keep it off {store.prefix or 'this bucket'}: `aws s3api "
                f"get-bucket-lifecycle-configuration --bucket {store.bucket}`; then `weightvc fsck`"
            )
            yield problem("lifecycle", UnsafeStore, f"the rule {name} {fate}", mend)
    if not bad:
        none = "no rule" if rules else "no rules at all, and so none"
        yield ok("lifecycle", f"{none} that deletes or freezes what lies here")


def versioning(case: Case) -> Iterator[Finding]:
    """Whether the bucket keeps what gc deletes."""
    store = _store(case)
    reply = _told(store, "get_bucket_versioning")
    if reply is None:
        yield skipped("versioning", "the server does not tell")
        return
    status = reply.get("Status")
    if status != "Enabled":
        yield ok("versioning", "suspended" if status else "off", status=status)
        return
    try:
        rules = _rules(store)
    except AccessDenied:
        rules = None
    if any("NoncurrentVersionExpiration" in one and _reaches(one, store.prefix) for one in rules or ()):
        yield ok("versioning", "on; a lifecycle rule lets go of noncurrent versions", status=status)
        return
    seen = "no lifecycle rule that is known" if rules is None else "no lifecycle rule"
    yield warning(
        "versioning",
        f"on, and {seen} lets go of noncurrent versions: what gc deletes goes on taking space",
        "a rule with NoncurrentVersionExpiration; docs/operations.md, 'A versioned bucket'",
        status=status,
    )


def uploads(case: Case) -> Iterator[Finding]:
    """Whether uploads in parts were begun under the prefix and never finished. None of them are ours."""
    store = _store(case)
    reply = _told(store, "list_multipart_uploads", Prefix=store.prefix)
    if reply is None:
        yield skipped("uploads", "the server does not tell")
        return
    before = datetime.now(UTC) + timedelta(seconds=case.ahead - DAY)
    found = reply.get("Uploads", ())
    stale = [one for one in found if one["Initiated"] < before]
    if not stale:
        yield ok("uploads", "none that was begun in parts and left", under_way=len(found))
        return
    more = " at least" if reply.get("IsTruncated") else ""
    yield warning(
        "uploads",
        f"{len(stale)}{more} that another tool began in parts over a day ago and left: they take space unseen",
        f"`aws s3api abort-multipart-upload` for each of `aws s3api list-multipart-uploads --bucket {store.bucket}`, "
        "or a lifecycle rule with AbortIncompleteMultipartUpload",
        stale=len(stale),
    )


def keeps_damaged(store: Store, where: str, data: bytes) -> bool:
    """Whether the server keeps a body whose Content-MD5 says that it was damaged on the way."""
    assert isinstance(store, S3Store)
    wrong = base64.b64encode(hashlib.md5(data + b".", usedforsecurity=False).digest()).decode()
    try:
        store.ask("put_object", attempts=1, Key=store.prefix + where, Body=data, ContentMD5=wrong)
    except WeightvcError as error:
        if not _reply(error):
            raise
        return False
    return True


def _store(case: Case) -> S3Store:
    assert isinstance(case.store, S3Store)
    return case.store


def _rules(store: S3Store) -> Sequence[Mapping[str, Any]] | None:
    """The lifecycle rules that are in force; None if the server does not tell. Raises AccessDenied, Unavailable."""
    try:
        reply = _told(store, "get_bucket_lifecycle_configuration")
    except KeyNotFound:
        return ()
    return None if reply is None else [one for one in reply.get("Rules", ()) if one.get("Status") == "Enabled"]


def _told(store: S3Store, operation: str, **arguments: Any) -> Mapping[str, Any] | None:
    """What the bucket says of itself; None from a server that has no such request. Raises what ask() does."""
    try:
        return store.ask(operation, **arguments)
    except Unavailable as error:
        if _reply(error).get("ResponseMetadata", {}).get("HTTPStatusCode") in _UNKNOWN:
            return None
        raise


def _reaches(rule: Mapping[str, Any], place: str) -> bool:
    """Whether a rule is for objects of ours that are needed. They have no tags."""
    chosen = rule.get("Filter") or {}
    both = chosen.get("And") or {}
    if "Tag" in chosen or both.get("Tags"):
        return False
    prefix = str(rule.get("Prefix") or chosen.get("Prefix") or both.get("Prefix") or "")
    if place.startswith(prefix):
        return True
    below = prefix.removeprefix(place)
    return prefix.startswith(place) and any(
        one.startswith(below) or (one.endswith("/") and below.startswith(one)) for one in NEEDED
    )


def _when(fields: Mapping[str, Any]) -> str:
    if "Days" in fields:
        return f"after {fields['Days']} days"
    date = fields.get("Date")
    return f"on {date:%Y-%m-%d}" if isinstance(date, datetime) else "at once"


def _reply(error: WeightvcError) -> Mapping[str, Any]:
    """What S3 answered where it refused; empty if nothing came back."""
    cause = error.__cause__
    return cause.response if isinstance(cause, ClientError) else {}

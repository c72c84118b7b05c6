"""weightvc doctor: one test a finding, on a directory, a real S3 server, and one that misbehaves."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightvc
from tests.cli.conftest import Shell, checkpoint, on_s3
from tests.kit.servers import Place, free_ports
from tests.kit.stub import BUCKET, Call, Drop, Hang, IgnoreConditions, Status, Stub
from weightvc.doctor import Finding
from weightvc.doctor.directory import mounted
from weightvc.objects import key
from weightvc.objects import root as roots
from weightvc.repository import Repository

DOCS = Path(__file__).parents[2] / "docs"
DAY = 86400.0
PREFIX = "some/policy"


def commit(repository: Repository, step: int, size: int = 64) -> None:
    weights = np.zeros(size, np.float32)
    weights[step] = 1
    repository.commit({"w": weights}, step=step)


@pytest.fixture
def bucket(stub: Stub) -> Iterator[Repository]:
    """A repository of two versions in the stub."""
    place = stub.place(PREFIX)
    with weightvc.init(place.url, cache=None, **place.options) as repository:
        commit(repository, 0)
        commit(repository, 1)
        yield repository


def found(repository: Repository, **options: Any) -> dict[str, Finding]:
    """What the library finds, by check; the worst of each."""
    out: dict[str, Finding] = {}
    worse = ["skipped", "ok", "warning", "problem"]
    for one in repository.examine(nbytes=1 << 16, **options):
        if one.check not in out or worse.index(one.state) > worse.index(out[one.check].state):
            out[one.check] = one
    return out


def states(findings: dict[str, Finding]) -> dict[str, str]:
    """What is neither well nor skipped."""
    return {name: one.state for name, one in findings.items() if one.state in ("warning", "problem")}


def objects(stub: Stub) -> set[str]:
    return {name for name in stub.objects if "/probe/" in name}


# By command


def test_a_directory_that_is_well(shell: Shell, history: dict[str, str]) -> None:
    before = sorted(path for path in (shell.cwd / ".weightvc").rglob("*") if path.is_file())
    said = shell.out("doctor", "--size", "1M")
    assert said.splitlines()[-1] == "no problem, 0 warnings"
    assert {line.split()[0] for line in said.splitlines()[:-1]} == {"ok", "-"}
    checks = ["directory", "store", "root", "rights", "locks", "rename", "space", "conditions", "checksums", "speed"]
    for check in (*checks, "pull", "pins", "cache", "compiled", "versions"):
        assert re.search(rf"^ok +{check} ", said, re.M), check
    assert sorted(path for path in (shell.cwd / ".weightvc").rglob("*") if path.is_file()) == before


def test_json_has_what_was_measured(shell: Shell, history: dict[str, str]) -> None:
    told = shell.json("doctor", ".weightvc", "--size", "100K")
    assert told["ok"]
    assert told["url"] == str(shell.cwd / ".weightvc")
    numbers = {one["check"]: one["numbers"] for one in told["findings"]}
    assert numbers["root"]["sequence"] > 4
    assert numbers["speed"]["bytes"] == 100_000
    assert numbers["versions"]["weightvc"] == weightvc.__version__


def test_each_check_is_in_the_document(shell: Shell, stub: Stub, bucket: Repository, history: dict[str, str]) -> None:
    section = (DOCS / "cli.md").read_text().partition("\n### doctor")[2].partition("\n### ")[0]
    there = {one["check"] for one in shell.json("doctor", "--size", "1K")["findings"]}
    there |= {one["check"] for one in shell.json("doctor", "--size", "1K", env=on_s3(stub.place(PREFIX)))["findings"]}
    for check in there:
        assert f"`{check}`" in section, check


def test_a_problem_has_its_status_and_what_mends_it(shell: Shell) -> None:
    done = shell.run("doctor", "nowhere", code=3)
    assert re.search(r"^problem +root +.* holds no weightvc repository\n +mend: `weightvc init ", done.stdout, re.M)
    assert done.stderr.startswith("weightvc: root: ")
    assert not (shell.cwd / "nowhere").exists()
    done = shell.run("doctor", "nowhere", "--json", code=3)
    assert json.loads(done.stderr)["error"] == "KeyNotFound"
    told = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert (told["root"]["state"], told["root"]["error"], told["root"]["exit_code"]) == ("problem", "KeyNotFound", 3)
    assert told["versions"]["state"] == "ok"


def test_options_that_are_wrong(shell: Shell) -> None:
    assert "--size 0" in shell.fails(2, "doctor", ".", "--size", "0")
    assert "--size 65000000000" in shell.fails(2, "doctor", ".", "--size", "65G")
    shell.fails(2, "doctor", "")
    shell.fails(3, "doctor")


def test_on_real_s3(shell: Shell, s3_place: Place) -> None:
    shell.env |= on_s3(s3_place)
    told = json.loads(shell.run("doctor", "--json", "--size", "1M", code=3).stdout)  # not made yet
    assert {one["check"] for one in told["findings"] if one["state"] == "problem"} == {"root"}
    shell.run("init")
    shell.commit(0)
    shell.commit(1)
    told = shell.json("doctor", "--size", "1M")
    seen = {one["check"]: one["state"] for one in told["findings"]}
    for check in ("bucket", "credentials", "region", "clock", "store", "root", "catalogue", "rights", "conditions"):
        assert seen[check] == "ok", check
    for check in ("checksums", "large", "speed", "pull", "pins", "probes", "lifecycle", "versioning", "uploads"):
        assert seen[check] == "ok", check
    assert list(s3_place.open().list("probe/")) == []


def test_a_reader_on_real_s3(shell: Shell, s3_place: Place) -> None:
    with weightvc.init(s3_place.url, cache=None, **s3_place.options) as repository:
        commit(repository, 0)
    shell.env |= on_s3(Place(s3_place.url, s3_place.reader_options))
    told = shell.json("doctor")
    assert told["ok"]
    seen = {one["check"]: one for one in told["findings"]}
    assert seen["rights"]["says"].endswith("enough for a reader")
    for check in ("conditions", "checksums", "pins"):
        assert seen[check]["state"] == "skipped"
        assert seen[check]["says"].endswith("which is fine for a reader")
    assert seen["speed"]["numbers"]["get_seconds"] > 0


def test_wrong_keys_on_real_s3(shell: Shell, s3_place: Place) -> None:
    done = shell.run("doctor", code=9, env=on_s3(s3_place) | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert re.search(r"^problem +store +.*SignatureDoesNotMatch: check the secret key", done.stdout, re.M)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_it_leaves_nothing_or_what_gc_collects(
    shell: Shell, stub: Stub, bucket: Repository, number: signal.Signals
) -> None:
    kept = dict(stub.objects)
    with shell.running("doctor", env=on_s3(stub.place(PREFIX))) as (process, _, _):
        killed = Call(lambda: process.send_signal(number), then=Drop())
        stub.fault(killed, operation="PutObject", key="-large$")
        process.wait(60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert stub.objects == kept
        return
    left = objects(stub)
    assert left
    assert all(key.PROBE.fullmatch(name.removeprefix(f"{PREFIX}/")) for name in left)
    stub._modified |= dict.fromkeys(left, time.time() - 2 * DAY)
    assert found(bucket, read_only=True)["probes"].state == "warning"
    bucket.gc()
    assert objects(stub) == set()


# The bucket


def test_a_bucket_that_is_well(stub: Stub, bucket: Repository) -> None:
    assert states(found(bucket)) == {}
    assert objects(stub) == set()


def test_read_only_writes_nothing(stub: Stub, bucket: Repository) -> None:
    stub.clear()
    findings = found(bucket, read_only=True)
    assert {one.method for one in stub.log} == {"GET", "HEAD"}
    assert states(findings) == {}
    assert findings["conditions"].state == "skipped"
    assert findings["speed"].state == "ok"


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        ("<Filter><Prefix></Prefix></Filter><Expiration><Days>30</Days></Expiration>", "problem"),
        ("<Prefix>some/</Prefix><Expiration><Days>30</Days></Expiration>", "problem"),
        ("<Prefix>some/pol</Prefix><Expiration><Date>2030-01-01T00:00:00Z</Date></Expiration>", "problem"),
        ("<Prefix>some/policy/pack/</Prefix><Expiration><Days>1</Days></Expiration>", "problem"),
        ("<Prefix>some/policy/manifest/ab</Prefix><Expiration><Days>1</Days></Expiration>", "problem"),
        ("<Prefix>some/policy/r</Prefix><Expiration><Days>1</Days></Expiration>", "problem"),
        (
            "<Filter><And><Prefix>some/</Prefix><ObjectSizeGreaterThan>9</ObjectSizeGreaterThan></And></Filter>"
            "<Expiration><Days>30</Days></Expiration>",
            "problem",
        ),
        ("<Prefix/><Transition><Days>9</Days><StorageClass>GLACIER</StorageClass></Transition>", "problem"),
        ("<Prefix/><Transition><Days>9</Days><StorageClass>STANDARD_IA</StorageClass></Transition>", "ok"),
        ("<Prefix>some/policy2/</Prefix><Expiration><Days>30</Days></Expiration>", "ok"),
        ("<Prefix>some/policy/probe/</Prefix><Expiration><Days>1</Days></Expiration>", "ok"),
        ("<Prefix>some/policy/root.d/</Prefix><Expiration><Days>9</Days></Expiration>", "ok"),
        ("<Prefix/><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>", "ok"),
        (
            "<Filter><Tag><Key>old</Key><Value>1</Value></Tag></Filter><Expiration><Days>30</Days></Expiration>",
            "ok",
        ),
        (
            "<Prefix/><AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation>"
            "</AbortIncompleteMultipartUpload>",
            "ok",
        ),
    ],
)
def test_lifecycle_rules(stub: Stub, bucket: Repository, rule: str, state: str) -> None:
    stub.lifecycle = [f"<ID>tidy</ID><Status>Enabled</Status>{rule}"]
    one = found(bucket, read_only=True)["lifecycle"]
    assert one.state == state
    if state == "problem":
        assert one.error is weightvc.UnsafeStore
        assert "the rule 'tidy' " in one.says
        assert f"--bucket {BUCKET}" in one.mend


def test_a_rule_that_is_not_in_force(stub: Stub, bucket: Repository) -> None:
    stub.lifecycle = ["<Status>Disabled</Status><Prefix/><Expiration><Days>30</Days></Expiration>"]
    assert found(bucket, read_only=True)["lifecycle"].state == "ok"


def test_versioning(stub: Stub, bucket: Repository) -> None:
    assert "off" in found(bucket, read_only=True)["versioning"].says
    stub.versioning = "Suspended"
    assert found(bucket, read_only=True)["versioning"].state == "ok"
    stub.versioning = "Enabled"
    one = found(bucket, read_only=True)["versioning"]
    assert one.state == "warning"
    assert "what gc deletes goes on taking space" in one.says
    stub.lifecycle = [
        "<Status>Enabled</Status><Prefix/><NoncurrentVersionExpiration><NoncurrentDays>14</NoncurrentDays>"
        "</NoncurrentVersionExpiration>"
    ]
    assert states(found(bucket, read_only=True)) == {}


def test_stale_uploads(stub: Stub, bucket: Repository) -> None:
    stub.uploads = {f"{PREFIX}/a": time.time() - 60, "other/b": time.time() - 9 * DAY}
    assert found(bucket, read_only=True)["uploads"].state == "ok"
    stub.uploads[f"{PREFIX}/c"] = time.time() - 2 * DAY
    one = found(bucket, read_only=True)["uploads"]
    assert (one.state, one.numbers["stale"]) == ("warning", 1)


@pytest.mark.parametrize(
    ("ahead", "state"), [(10, "ok"), (140, "warning"), (-140, "warning"), (3600, "problem"), (-3600, "problem")]
)
def test_clocks(stub: Stub, bucket: Repository, ahead: float, state: str) -> None:
    stub.ahead = ahead
    one = found(bucket, read_only=True)["clock"]
    assert one.state == state
    assert abs(float(one.numbers["ahead_seconds"] or 0) - ahead) < 5
    if state != "ok":
        assert f"is {'2 min' if abs(ahead) == 140 else '60 min'} {'behind' if ahead > 0 else 'ahead of'}" in one.says


def test_another_region(stub: Stub, bucket: Repository) -> None:
    stub.region = "eu-central-1"
    one = found(bucket, read_only=True)["region"]
    assert one.state == "warning"
    assert "--region eu-central-1" in one.mend


def test_no_such_bucket(stub: Stub, shell: Shell) -> None:
    env = on_s3(stub.place()) | {"WEIGHTVC_REPO": "s3://another/policy"}
    done = shell.run("doctor", code=3, env=env)
    assert re.search(r"^problem +bucket +there is no bucket 'another' at http", done.stdout, re.M)
    assert re.search(r"^ok +versions ", done.stdout, re.M)


def test_out_of_reach(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "attempts": 1, "access_key": "a", "secret_key": "b"}
    with weightvc.open("s3://some/policy", lazy=True, cache=None, region="us-east-1", **options) as repository:
        findings = found(repository)
    assert states(findings) == {"bucket": "problem"}
    assert findings["bucket"].error is weightvc.Unavailable


def test_no_credentials(shell: Shell, stub: Stub) -> None:
    env = {name: value for name, value in on_s3(stub.place()).items() if "KEY" not in name}
    done = shell.run("doctor", code=9, env=env)
    assert re.search(r"^problem +bucket +.*set up credentials for boto3", done.stdout, re.M)


@pytest.mark.parametrize(
    ("operation", "check"),
    [
        ("GetBucketLifecycleConfiguration", "lifecycle"),
        ("GetBucketVersioning", "versioning"),
        ("ListMultipartUploads", "uploads"),
    ],
)
@pytest.mark.parametrize("answer", [Status(403, "AccessDenied"), Status(501, "NotImplemented"), Status(503)])
def test_what_may_not_be_looked_at(
    stub: Stub, bucket: Repository, operation: str, check: str, answer: Status
) -> None:
    stub.fault(answer, operation=operation, times=None)
    one = found(bucket, read_only=True)[check]
    if answer.status == 503:  # it may be anything
        assert (one.state, one.error) == ("problem", weightvc.Unavailable)
    else:
        assert one.state == "skipped"
        assert "fine for a reader" in one.says or "does not tell" in one.says


@pytest.mark.parametrize(
    ("denied", "lacks", "tried"),
    [
        (["HeadBucket"], "", True),
        (["ListObjectsV2"], "list", True),
        (["DeleteObjects"], "delete", False),
        (["PutObject", "DeleteObjects", "ListObjectsV2"], "list or write or delete", False),
    ],
)
def test_rights(stub: Stub, bucket: Repository, denied: list[str], lacks: str, tried: bool) -> None:
    for operation in denied:
        stub.fault(Status(403), operation=operation, times=None)
    findings = found(bucket)
    assert states(findings) == {}
    assert (f"not {lacks}:" if lacks else "all that maintain needs") in findings["rights"].says
    assert (findings["checksums"].state == "ok") == tried
    assert objects(stub) == set()


def test_conditions_that_are_ignored(stub: Stub, bucket: Repository) -> None:
    stub.fault(IgnoreConditions(), operation="PutObject", times=None)
    one = found(bucket)["conditions"]
    assert (one.state, one.error) == ("problem", weightvc.UnsafeStore)
    assert "parallel writers win one create-if-absent" in one.says
    assert objects(stub) == set()


def test_digests_that_are_not_checked(stub: Stub, bucket: Repository) -> None:
    stub.checks_digests = False
    one = found(bucket)["checksums"]
    assert one.state == "warning"
    assert "Content-MD5" in one.says
    assert objects(stub) == set()


@pytest.mark.parametrize("whole", [True, False])
def test_bytes_that_change(stub: Stub, bucket: Repository, whole: bool) -> None:
    def damage() -> None:
        for name in objects(stub):
            stub.objects[name] = bytes(1 << 16)

    stub.fault(Call(damage), operation="GetObject", key="-digest$", after=0 if whole else 1)
    one = found(bucket)["checksums"]
    assert (one.state, one.error) == ("problem", weightvc.Corrupt)
    assert one.says.startswith("what" if whole else "a part")


def test_what_cannot_be_deleted_again(stub: Stub, bucket: Repository) -> None:
    # Once for the rights, twice by the probe.
    stub.fault(Status(403), operation="DeleteObjects", after=3, times=None)
    assert found(bucket)["probes"].state == "warning"
    assert objects(stub)


def test_slow_requests(stub: Stub, bucket: Repository) -> None:
    stub.fault(Hang(0.6), operation="GetObject", key="-small", times=None)
    findings = found(bucket)
    assert findings["speed"].state == "warning"
    assert "weightvc mirror" in findings["speed"].mend


def test_hosts_that_cannot_keep_up(stub: Stub, bucket: Repository) -> None:
    stub.fault(Hang(0.6), operation="GetObject", key="-small", times=None)
    for step in range(2, 6):
        commit(bucket, step)
    one = found(bucket)["pull"]
    assert one.state == "warning"
    assert float(one.numbers["step_seconds"] or 0) > 1.2 > float(one.numbers["interval_seconds"] or 0)


def test_a_reader_is_told_of_what_is_missing(stub: Stub, bucket: Repository) -> None:
    """To who may not list, S3 denies what is not there."""
    for step in range(80):
        commit(bucket, step % 64)
    stub.fault(Status(403), operation="ListObjectsV2", times=None)
    stub.fault(Status(403), operation="GetObject", key="/segment/", times=None)
    place = stub.place(PREFIX)
    with weightvc.open(place.url, lazy=True, cache=None, **place.options) as reader:
        one = found(reader, read_only=True)["catalogue"]
    assert (one.state, one.error) == ("problem", weightvc.AccessDenied)


# The repository


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda data: data[:-1], weightvc.Corrupt, "root"),
        (lambda data: data[:3] + b"\x09" + data[4:], weightvc.Unsupported, "upgrade weightvc"),
        (lambda data: b"", weightvc.Corrupt, "root"),
    ],
)
def test_a_root_that_cannot_be_read(tmp_path: Path, change: Any, error: type[Exception], says: str) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
        root = tmp_path / "r" / "root"
        root.write_bytes(change(root.read_bytes()))
        one = found(repository)["root"]
    assert (one.state, one.error) == ("problem", error)
    assert says in one.says
    if error is weightvc.Corrupt:
        assert "weightvc fsck" in one.mend


def test_a_root_that_is_large(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
        seen = repository.refresh()
        branches = {f"experiment-{os.urandom(40).hex()}": seen.branches["main"] for _ in range(3000)}
        large = seen.next(branches={**branches, **seen.branches}, tail=seen.tail)
        (tmp_path / "r" / "root").write_bytes(roots.encode(large))
        one = found(repository)["root"]
    assert one.state == "warning"
    assert "with 3001 branches" in one.says


def test_a_writer_whose_clock_is_ahead(stub: Stub, bucket: Repository) -> None:
    stub.ahead = -400  # so is the store's behind: the last operation lies in its future
    one = found(bucket, read_only=True)["root"]
    assert one.state == "warning"
    assert "in the future" in one.says


def test_compaction_is_due(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        for step in range(65):
            commit(repository, step % 64)
        one = found(repository)["catalogue"]
        assert (one.state, one.numbers["patches"]) == ("warning", 64)
        assert "`weightvc compact`" in one.mend
        repository.compact()
        assert states(found(repository)) == {}


def test_patches_that_outweigh_the_base(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        weights = random.integers(0, 1 << 32, 1 << 19, np.uint32)
        for _ in range(4):
            repository.commit({"w": weights.copy()})
            weights[random.integers(0, 1 << 19, 1 << 17)] ^= random.integers(1, 1 << 32, 1 << 17, np.uint32)
        one = found(repository)["catalogue"]
    assert one.state == "warning"
    assert int(one.numbers["patches"] or 0) < 64


def test_a_segment_is_gone(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        for step in range(80):
            commit(repository, step % 64)
        (segment,) = (tmp_path / "r" / "segment").iterdir()
        segment.unlink()
    with weightvc.open(tmp_path / "r", lazy=True, cache=None) as repository:
        one = found(repository)["catalogue"]
    assert (one.state, one.error) == ("problem", weightvc.KeyNotFound)
    assert "weightvc fsck" in one.says


def test_pins(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
        with repository.lease("main"):
            one = found(repository)["pins"]
            assert (one.state, one.numbers["held"]) == ("ok", 1)
            (path,) = (tmp_path / "r" / "pin").iterdir()
            assert (
                f"1 held: pin/{path.name} is held by a reader ({socket.gethostname()}, process {os.getpid()})"
                in one.says
            )
            body = path.read_bytes()
        assert found(repository)["pins"].says == "0 held"
        # Renewed four times in its lifetime by who lives.
        path.write_bytes(body)
        half = time.time() - 1900
        os.utime(path, (half, half))
        one = found(repository)["pins"]
        assert (one.state, one.numbers["silent"], one.numbers["stale"]) == ("warning", 1, 0)
        assert "1 of 1 held by who was killed or stands still: pin/" in one.says
        assert one.mend.endswith(f"delete {path}")
        path.write_bytes(body)
        os.utime(path, (0, 0))
        one = found(repository)["pins"]
        assert (one.state, one.numbers["stale"]) == ("warning", 1)
        path.write_bytes(b"junk")
        one = found(repository)["pins"]
        assert (one.state, one.error) == ("problem", weightvc.Corrupt)
        assert "delete the object" in one.says


# A directory


@pytest.mark.parametrize("locks", ["no-op", "ENOLCK"])
def test_locks_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str) -> None:
    def flock(file: object, how: int) -> None:
        if locks == "ENOLCK":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with weightvc.init(tmp_path / "r", cache=None) as repository:
        monkeypatch.setattr("fcntl.flock", flock)
        one = found(repository)["locks" if locks == "no-op" else "rights"]
    assert one.state == ("problem" if locks == "no-op" else "ok")


def test_a_rename_that_is_no_single_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(old: Path, new: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        time.sleep(0.01)
        os.rename(old, new)

    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
        monkeypatch.setattr("os.replace", replace)
        one = found(repository)["rename"]
    assert (one.state, one.error) == ("problem", weightvc.UnsafeStore)
    assert "nothing there" in one.says


def test_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    class Full:
        f_frsize, f_blocks, f_bavail, f_files, f_favail = real.f_frsize, real.f_blocks, 1000, real.f_files, 10

    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
        monkeypatch.setattr("os.statvfs", lambda place: Full)
        one = found(repository)["space"]
        assert (one.state, "weightvc gc" in one.mend) == ("warning", True)
        Full.f_bavail, Full.f_files, Full.f_favail = 1 << 30, 100, 0
        one = found(repository)["space"]
    assert (one.state, "no inode" in one.says) == ("problem", True)


def test_mounts_are_told_apart() -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "40 22 0:5 / /srv/my\\040data rw - nfs4 host:/x rw,vers=4.2,local_lock=none\n"
        "41 22 0:6 / /srv/alone rw,noatime - nfs host:/y rw,vers=3,local_lock=all\n"
    )
    assert mounted(Path("/home/r"), mounts)[0] == "ext4"
    kind, options = mounted(Path("/srv/my data/r"), mounts)
    assert (kind, "local_lock=none" in options) == ("nfs4", True)
    assert "local_lock=all" in mounted(Path("/srv/alone"), mounts)[1]
    assert mounted(Path("/srv/alone2"), mounts)[0] == "ext4"
    assert mounted(Path("/"), "junk\n") == ("", frozenset())


def test_locks_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"1 1 0:6 / {os.path.realpath(tmp_path)} rw - nfs host:/y rw,nolock\n"
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        monkeypatch.setattr("weightvc.doctor.directory._mounts", lambda: line)
        one = found(repository)["directory"]
    assert one.state == "warning"
    assert "nolock" in one.says


def test_a_directory_that_may_only_be_read(shell: Shell, history: dict[str, str]) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    place = shell.cwd / ".weightvc"
    for path in (place, *(one for one in place.rglob("*") if one.is_dir())):
        path.chmod(0o555)
    try:
        told = shell.json("doctor")
    finally:
        for path in (place, *(one for one in place.rglob("*") if one.is_dir())):
            path.chmod(0o755)
    assert told["ok"]
    assert {one["check"]: one["state"] for one in told["findings"]}["locks"] == "skipped"


# This host


def test_a_cache_that_keeps_nothing(shell: Shell, history: dict[str, str]) -> None:
    (shell.cwd / "file").write_text("")
    told = shell.json("doctor", "--size", "1K", env={"WEIGHTVC_CACHE": str(shell.cwd / "file")})
    one = next(one for one in told["findings"] if one["check"] == "cache")
    assert (one["state"], "WEIGHTVC_CACHE" in one["mend"]) == ("warning", True)
    assert "turned off" in shell.out("doctor", "--size", "1K", "--no-cache")


def test_a_cache_that_is_too_small(shell: Shell) -> None:
    shell.run("init")
    shell.run("commit", checkpoint(shell.cwd / "large.safetensors", w=bytes(2 << 20)), "--no-cache")
    told = shell.json("doctor", "--size", "1K", "--cache-limit", "1500K")
    one = next(one for one in told["findings"] if one["check"] == "cache")
    assert one["state"] == "warning"
    assert "has to be 2796202 or more" in one["says"]


def test_compiled_code_that_cannot_be_kept(shell: Shell, history: dict[str, str], tmp_path: Path) -> None:
    # A copy of the kernels that nobody can write beside, and a home that is none.
    import weightvc_kernels

    copy = tmp_path / "copy" / "weightvc_kernels"
    shutil.copytree(Path(weightvc_kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__pycache__").write_text("in the way")
    env = {
        "PYTHONPATH": os.pathsep.join([str(copy.parent), *sys.path]),
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "/dev/null",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = shell.run("doctor", "--size", "1K", "--json", env=env)
    one = next(one for one in json.loads(done.stdout)["findings"] if one["check"] == "compiled")
    assert one["state"] == "warning"
    assert "NUMBA_CACHE_DIR" in one["mend"]


# Elsewhere


def test_a_url_that_is_for_reading(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "r", cache=None) as repository:
        commit(repository, 0)
    with weightvc.open(f"local://{tmp_path}/r", lazy=True, cache=None) as there:
        findings = found(there)
    assert states(findings) == {}
    assert findings["root"].state == "ok"
    assert findings["conditions"].state == "skipped"

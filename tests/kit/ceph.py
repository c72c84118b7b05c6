"""Ceph with its S3 gateway: a second S3 server, unrelated to the first, of `make test-ceph`.

Debian and Ubuntu have it as packages. These are downloaded and unpacked into a folder, $WEIGHTVC_CEPH or .ceph beside
tests/; nothing is installed, and root's rights are not needed. `python -m tests.kit.ceph` does that alone, and says
with its exit status whether there is a Ceph here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.kit.servers import BUCKET, Child, Server, free_ports

_PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool")

# Every daemon reads this. Intervals are those of a cluster whose every message arrives at once. Without tcp_nodelay
# each small read takes 44 ms.
_CONFIG = """
[global]
fsid = {fsid}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
keyring = {data}/keyring
monmap = {data}/monmap
mon data = {data}/mon
osd data = {data}/osd
run dir = {data}
crash dir = {data}
admin socket =
pid file =
log file =
mon cluster log file =
log to stderr = true
plugin dir = {lib}/ceph
osd class dir = {lib}/rados-classes
erasure code dir = {lib}/ceph/erasure-code
compressor dir = {lib}/ceph/compressor
mon data avail warn = 1
mon data avail crit = 1
mon allow pool size one = true
paxos propose interval = 0.05
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
osd memory target = 1073741824
bluestore block size = 10737418240
rgw frontends = beast endpoint=127.0.0.1:{s3} tcp_nodelay=1
rgw thread pool size = 32
rgw enable usage log = false
"""


class Missing(Exception):
    """There is no Ceph here; the message says why, in a line."""


def home() -> Path:
    """The folder with the unpacked packages."""
    return Path(os.environ.get("WEIGHTVC_CEPH") or Path(__file__).parents[2] / ".ceph").absolute()


def unpack() -> Path:
    """Download and unpack the packages unless home() has them, and return home(). Raises Missing."""
    root = home()
    if not root.exists():
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise Missing("this system has no apt-get")
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{root.name}-", dir=root.parent) as scratch:
            tree = _download(Path(scratch))
            if not root.exists():  # another one may have been faster
                tree.rename(root)
    for program in _PROGRAMS:
        try:
            _run([root / "usr/bin" / program, "--version"], _environment(root))
        except (OSError, RuntimeError) as error:
            raise Missing(f"{root} has no {program} that runs here ({error}): remove that folder") from None
    return root


def _download(scratch: Path) -> Path:
    """The packages and what they need beyond what is installed, unpacked under `scratch`."""
    tree, lists, archives = scratch / "tree", scratch / "lists", scratch / "archives"
    tree.mkdir()
    for folder in (lists, archives):  # apt's own state is left alone, so that it takes no lock and no rights
        (folder / "partial").mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={scratch}"]
    apt += ["-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=true"]
    apt += ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15"]
    try:
        _run([*apt, "update"])
        _run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", *_PACKAGES])
        for package in sorted(archives.glob("*.deb")):
            _run(["dpkg-deb", "--extract", package, tree])
    except (OSError, RuntimeError) as error:
        raise Missing(f"apt-get does not give it: {error}") from None
    return tree


def _environment(root: Path) -> dict[str, str]:
    folders = [*root.glob("usr/lib/*-linux-gnu"), *root.glob("lib/*-linux-gnu"), *root.glob("usr/lib/*/ceph")]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders)), "LC_ALL": "C"}


def _run(command: list[str | Path], env: dict[str, str] | None = None, seconds: int = 120) -> None:
    """RuntimeError, with the last line of what it said, unless the command succeeds in that time."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{Path(command[0]).name} did not end in {seconds} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{Path(command[0]).name}: {said[-1] if said else f'status {done.returncode}'}")


class Ceph(Server):
    """A monitor, a store daemon and the gateway. Whoever talks to Ceph itself is believed: it is on loopback."""

    run: Callable[..., None]
    """Run a program of Ceph against this cluster, such as `run("radosgw-admin", "user", "list")`."""

    def start(self) -> None:
        root = unpack()
        env = _environment(root)
        (lib,) = root.glob("usr/lib/*-linux-gnu")
        data = self.folder / "data"
        (data / "osd").mkdir(parents=True)
        mon, s3 = free_ports(2)
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        fsid = str(uuid.uuid4())
        config = self.folder / "ceph.conf"
        config.write_text(_CONFIG.format(fsid=fsid, s3=s3, data=data, lib=lib))
        # All settings are in the file. Who asks the monitor for more does not know the cluster's id for a moment, and
        # a store daemon then ends with "wrong fsid" as often as not.
        settings = ("-c", str(config), "--no-mon-config")

        def run(program: str, *arguments: str) -> None:
            _run([root / "usr/bin" / program, *arguments, *settings], env, seconds=20)

        self.run = run

        def child(program: str, *arguments: str) -> Child:
            command = [str(root / "usr/bin" / program), "-f", *settings, *arguments]
            self.children.append(Child(command, self.folder / f"{program}.log", env))
            return self.children[-1]

        keyring, monmap = str(data / "keyring"), str(data / "monmap")
        run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon}]", monmap)
        run("ceph-mon", "--mkfs", "-i", "a")
        run("ceph-osd", "--mkfs", "-i", "0")
        child("ceph-mon", "-i", "a")
        osd = child("ceph-osd", "-i", "0")  # enters itself into the monitor's map
        osd.wait_ready(lambda: run("radosgw-admin", "user", "list"))
        gateway = child("radosgw", "-n", "client.rgw")
        for name, (access, secret) in (("admin", self.ADMIN), ("reader", self.READER)):
            keys = ("--access-key", access, "--secret-key", secret)
            run("radosgw-admin", "user", "create", "--uid", name, "--display-name", name, *keys)
        client = self.client()
        gateway.wait_ready(client.list_buckets)
        client.create_bucket(Bucket=BUCKET)
        may_get = {
            "Effect": "Allow",
            "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
            "Action": "s3:GetObject",
            "Resource": f"arn:aws:s3:::{BUCKET}/*",
        }
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [may_get]}))


if __name__ == "__main__":
    try:
        print(f"Ceph is in {unpack()}")
    except Missing as error:
        sys.exit(f"no Ceph: {error}")

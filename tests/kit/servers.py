"""What the servers of the kit share: where a store lies, free ports, child processes that do not outlive us."""

import contextlib
import ctypes
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "weights"


@dataclass(frozen=True)
class Place:
    """A fresh place in an S3 server: the URL and what open_store() needs to reach it."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    reader_options: dict[str, Any] = field(default_factory=dict)
    """The same for an identity that may only read objects; empty where the server has none."""

    def open(self, **more: Any) -> Any:
        """The store there, as the identity that may do everything."""
        from weightvc.stores import open_store

        return open_store(self.url, **{**self.options, **more})

    def open_reader(self, **more: Any) -> Any:
        """The store there, as the identity that may only read objects."""
        from weightvc.stores import open_store

        return open_store(self.url, **{**self.reader_options, **more})


class Server:
    """A real S3 server on free loopback ports with its data in a temporary directory; stop() ends and removes both.

    with Seaweed() as server:           # or Ceph()
        place = server.place()          # a fresh prefix
        store = place.open()            # may do everything
        reader = place.open_reader()    # may only get objects
    """

    ADMIN = ("admin-access", "admin-secret")
    READER = ("reader-access", "reader-secret")
    endpoint_url: str

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"weightvc-{type(self).__name__.lower()}-"))
        self.children: list[Child] = []
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start the processes, each into `children`, and make the bucket and both identities."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the server, what was started last first, and remove its data; idempotent."""
        while self.children:
            self.children.pop().stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def options(self) -> dict[str, Any]:
        """For open_store(): the identity that may do everything."""
        return self._options(self.ADMIN)

    @property
    def reader_options(self) -> dict[str, Any]:
        """For open_store(): the identity that may only get objects."""
        return self._options(self.READER)

    def _options(self, keys: tuple[str, str]) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "access_key": keys[0],
            "secret_key": keys[1],
        }

    def place(self) -> Place:
        """A fresh prefix in the bucket."""
        return Place(f"s3://{BUCKET}/{secrets.token_hex(6)}", self.options, self.reader_options)

    def client(self) -> Any:
        """A boto3 client of the identity that may do everything, to look behind the code under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.ADMIN[0],
            aws_secret_access_key=self.ADMIN[1],
            config=Config(
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                s3={"addressing_style": "path"},
            ),
        )


def free_ports(count: int, also: int = 0) -> list[int]:
    """`count` free loopback ports, below the range that the system hands out; port + `also` is free too."""
    pick = random.SystemRandom()
    found: list[int] = []
    while len(found) < count:
        port = pick.randrange(12_000, 22_000)
        if port not in found and _free(port) and (not also or _free(port + also)):
            found.append(port)
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def executable(name: str) -> str:
    """The path of a program that a wheel put beside the interpreter, or that is on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is missing: install the dev extra (pip install -e '.[dev]')")
    return found


class Child:
    """A server process with its log, ended by its own id; the kernel ends it if the tests are killed."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = Path(command[0]).name
        self.log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, preexec_fn=die_with_parent
            )

    def wait_ready(self, ready: Callable[[], object], seconds: float = 60.0) -> None:
        """Call `ready` until it does not raise. RuntimeError, with the end of the log, if it never does."""
        deadline = time.monotonic() + seconds
        last: Exception | None = None
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                ready()
                return
            except Exception as error:  # whatever a server that is starting makes a client raise
                last = error
                time.sleep(0.05)
        status = self._process.poll()
        self.stop()
        tail = self.log.read_text(errors="replace")[-2000:]
        state = f"ended with status {status}" if status is not None else f"was not ready after {seconds:.0f} s"
        raise RuntimeError(f"{self.name} {state}; last error: {last}\n{tail}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 10 s; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def die_with_parent() -> None:
    # pytest-timeout may end the tests by _exit, which runs no clean-up.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

"""`rclone serve s3`: a real S3 server that ignores the conditions of writes, and must be refused."""

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.kit.servers import Child, Place, executable, free_ports

_KEYS = ("rclone-access", "rclone-secret")


class Rclone:
    """A server of a temporary directory on a free loopback port; stop() ends and removes both."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weightvc-rclone-"))
        (self._folder / "data" / "weights").mkdir(parents=True)
        (port,) = free_ports(1)
        self.options: dict[str, Any] = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "access_key": _KEYS[0],
            "secret_key": _KEYS[1],
        }
        self._child = Child(
            [
                executable("rclone"),
                "serve",
                "s3",
                str(self._folder / "data"),
                "--addr",
                f"127.0.0.1:{port}",
                "--auth-key",
                ",".join(_KEYS),
                "--config",
                "/dev/null",
            ],
            self._folder / "log",
        )
        try:
            ready = self.place().open(attempts=1)
            self._child.wait_ready(lambda: list(ready.list()))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Rclone":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def place(self) -> Place:
        """A fresh prefix in the bucket."""
        return Place(f"s3://weights/{secrets.token_hex(6)}", self.options)

    def stop(self) -> None:
        """End the server and remove its data; idempotent."""
        if hasattr(self, "_child"):
            self._child.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

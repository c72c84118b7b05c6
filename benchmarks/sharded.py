"""How fast many ranks publish a model together, against plain code that moves the same bytes.

Four processes of torch.distributed (gloo) have 1 GB of bf16 as DTensors, sharded by rows. At each step 0.86 % of the
elements of every rank move by one step of their last place, and they publish it with commit_sharded into one S3
server (SeaweedFS on loopback). Beside it, in turns: each rank compares its part with the last one (numpy), hashes it
(blake3), and uploads its share of as many bytes (boto3), and all wait for each other.

    python benchmarks/sharded.py --ranks 4 --tensors 16 --steps 5 --json sharded.json
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weightvc

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.seaweed import BUCKET, Seaweed

ROWS, COLUMNS = 4096, 8192
"""Of a tensor: 64 MiB of bf16."""
SHARE = 0.0086


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begun


def rank(number: int, given: argparse.Namespace, options: dict[str, Any], url: str, said: "Queue[Any]") -> None:
    """One of them; rank 0 says what it took."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(given.port)}
    dist.init_process_group("gloo", rank=number, world_size=given.ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (given.ranks,))
    random = np.random.default_rng(number)
    rows = ROWS // given.ranks
    parts = {
        f"layers.{i}.weight": (random.standard_normal((rows, COLUMNS), dtype=np.float32) * 0.02).view("<u4") >> 16
        for i in range(given.tensors)
    }
    here = {name: part.astype("<u2") for name, part in parts.items()}
    del parts
    shape = torch.Size((ROWS, COLUMNS))
    model = {
        name: DTensor.from_local(
            torch.from_numpy(part.view("<i2")).view(torch.bfloat16),
            mesh,
            [Shard(0)],
            shape=shape,
            stride=(COLUMNS, 1),
            run_check=False,
        )
        for name, part in here.items()
    }
    import boto3

    boto = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=options["region"],
        aws_access_key_id=options["access_key"],
        aws_secret_access_key=options["secret_key"],
    )
    old = {name: part.copy() for name, part in here.items()}
    seconds: dict[str, list[float]] = {"weightvc": [], "plain": [], "base": []}
    payload = b""

    def plain() -> None:
        for name, part in here.items():
            np.flatnonzero(part.reshape(-1) != old[name].reshape(-1))
            blake3(part.view(np.uint8)).digest()
        boto.put_object(Bucket=BUCKET, Key=f"plain/{number}", Body=payload)

    with weightvc.open(url, cache=None, **options) as repository:
        seconds["base"].append(timed(lambda: repository.commit_sharded(model, step=0)))
        for step in range(1, given.steps + 2):
            for name, part in here.items():
                old[name][:] = part
                at = random.integers(0, part.size, int(part.size * SHARE))
                part.reshape(-1)[at] += 1

            def publish(step: int = step) -> None:
                repository.commit_sharded(model, step=step, codec=given.codec)

            took = timed(publish)
            edges = repository.entry(f"main@{{step={step}}}").place.edges
            payload = random.bytes(edges[0].nbytes // given.ranks)
            beside = timed(plain)
            if step > 1:  # the first one compiles
                seconds["weightvc"].append(took)
                seconds["plain"].append(beside)
        if number == 0:
            repository.refresh()
            tree = repository.resolve("main").tree
            said.put({"seconds": seconds, "patch": edges[0].nbytes, "tree": tree})
    dist.destroy_process_group()


def main() -> None:
    """Start the server and the ranks, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=16, help="of 64 MiB")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--codec", choices=["small", "fast", "auto"], default="small")
    parser.add_argument("--port", type=int, default=29511, help="where the ranks meet")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with Seaweed() as server:
        url = f"s3://{BUCKET}/sharded"
        weightvc.init(url, cache=None, **server.options).close()
        said = context.Queue()
        ranks = [context.Process(target=rank, args=(i, given, server.options, url, said)) for i in range(given.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        found = said.get()
    nbytes = given.tensors * ROWS * COLUMNS * 2
    seconds = {kind: statistics.median(took) for kind, took in found["seconds"].items()}
    print(f"{given.ranks} ranks, {nbytes / 1e9:.2f} GB, a patch of {found['patch']:,} bytes")
    print(f"the first version, a base: {seconds['base']:.2f} s")
    print(f"commit_sharded: {seconds['weightvc']:.2f} s; plain diff, hash and upload: {seconds['plain']:.2f} s")
    print(f"of their speed it has {seconds['plain'] / seconds['weightvc']:.2f} (wanted 0.8)")
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

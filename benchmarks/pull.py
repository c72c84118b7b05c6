"""What a rollout host waits for: the next version, a cold start, 1,000 versions of catching up, the swap, a fleet.

    python benchmarks/pull.py [next cold behind activate fleet] [--json FILE] [--chain DIR] [--seconds 120]

Everything goes against one real S3 server (SeaweedFS on loopback), what is compared takes turns in the same run, and
every result is compared bit for bit. `--chain` names a directory of consecutive checkpoints (*.safetensors); without
it a bf16 model of 45 MB is made, of which 0.86 % change in a step.

next      the next version of the 45 MB model and of one six times as large, beside boto3's download of the whole,
          and beside a file of zstd-1 blobs of each changed tensor's XOR, fetched, checked and applied in memory; over
          loopback itself and over links held to a rate, with a round trip of 50 ms
cold      a first version into tensors that hold zeros, and as a dict of tensors, beside boto3's parallel ranged reads
          of the same model into a buffer
behind    1,000 versions behind, by single patches, compacted, from nothing, and by one direct patch
activate  the swap of 270 MB of tensors of which 0.5 % change, beside a plain scatter of the same values
fleet     64 followers of a 1 MB model that moves every second
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import catchup
import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3
from link import Link

import weightvc
from weightvc.repository import Repository
from weightvc.sources.header import build_header

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.seaweed import BUCKET, Seaweed

PARTS = ("next", "cold", "behind", "activate", "fleet")
LINKS = {"loopback": None, "1 Gbit/s, 50 ms": (1000.0, 0.05), "100 Mbit/s, 50 ms": (100.0, 0.05)}
STEPS = 6
SHIFT = 1009
"""Elements that each further copy of a model is turned by: equal chunks would be stored once."""
Model = dict[str, npt.NDArray[Any]]
"""Tensors by name, as their bits."""


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


class Bench:
    """The server, and what was measured."""

    def __init__(self, server: Seaweed, folder: Path, chain: Path | None) -> None:
        self.server, self.folder = server, folder
        self.found: dict[str, Any] = {}
        self._chain = chain

    def models(self, copies: int, count: int) -> Iterator[Model]:
        """`count` consecutive versions; the model as often as `copies` says, under other names."""
        if self._chain is None:
            run = catchup.Run(22_700_000)
            for _ in range(count):
                one = run.tensors()
                yield {
                    f"{copy}.{name}": np.roll(data, SHIFT * copy)
                    for copy in range(copies)
                    for name, data in one.items()
                }
                run.step()
            return
        from pairs import read

        files = sorted(self._chain.glob("*.safetensors"))
        if len(files) < count:
            raise SystemExit(f"{self._chain} has {len(files)} checkpoints, {count} are needed")
        for file in files[:count]:
            found = read(file)
            yield {
                f"{copy}.{name}": np.roll(data.view("<u2"), SHIFT * copy)
                for copy in range(copies)
                for name, (dtype, _, data) in found.items()
                if dtype == "BF16"
            }

    def init(self, name: str, **options: Any) -> Repository:
        """A new repository on the server."""
        return weightvc.init(f"s3://{BUCKET}/{name}", **self.server.options, **options)

    def client(self, endpoint: str | None = None) -> Any:
        """boto3's, with its own defaults for transfers."""
        import boto3
        from botocore.config import Config

        known = self.server.options
        return boto3.client(
            "s3",
            endpoint_url=endpoint or known["endpoint_url"],
            region_name=known["region"],
            aws_access_key_id=known["access_key"],
            aws_secret_access_key=known["secret_key"],
            config=Config(max_pool_connections=16, s3={"addressing_style": "path"}),
        )


def torch_model(model: Model) -> dict[str, Any]:
    """The same as torch tensors with memory of their own."""
    import torch

    return {name: torch.from_numpy(data.copy().view("<i2")).view(torch.bfloat16) for name, data in model.items()}


def same(tensors: dict[str, Any], model: Model) -> None:
    """Stop the benchmark if a bit differs."""
    import torch

    for name, data in model.items():
        if not np.array_equal(tensors[name].view(torch.int16).numpy().reshape(-1), data.view("<i2").reshape(-1)):
            raise SystemExit(f"wrong bits in {name}")


def file_of(model: Model) -> bytes:
    """A safetensors file."""
    infos = catchup.Bits(model).tensors
    return build_header(infos) + b"".join(model[info.name].tobytes() for info in infos)


def xor_file(old: Model, new: Model) -> bytes:
    """zstd-1 of the XOR of each changed tensor, with a digest of what it becomes."""
    compressor, head, blobs = zstandard.ZstdCompressor(level=1), {}, []
    for name, data in new.items():
        if not np.array_equal(old[name], data):
            blobs.append(compressor.compress((old[name] ^ data).tobytes()))
            head[name] = [len(blobs[-1]), blake3(data.tobytes()).hexdigest()]
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


def apply_xor(data: bytes, model: Model) -> None:
    """Apply such a file in place, and check what comes of it, tensor by tensor, on all cores."""
    size = int.from_bytes(data[:8], "little")
    jobs, at = [], 8 + size
    for name, (length, digest) in json.loads(data[8 : 8 + size]).items():
        jobs.append((name, at, length, digest))
        at += length

    def one(job: tuple[str, int, int, str]) -> None:
        name, at, length, digest = job
        model[name] ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(data[at : at + length]), "<u2").reshape(
            model[name].shape
        )
        if blake3(memoryview(model[name]).cast("B")).hexdigest() != digest:
            raise SystemExit(f"wrong digest of {name}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, jobs))


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    out = work(*arguments)
    return time.perf_counter() - start, out


def next_version(bench: Bench) -> None:
    """The next version, over links."""
    for copies in (1, 6):
        models = list(bench.models(copies, STEPS + 1))
        title = f"{sum(data.nbytes for data in models[0].values()) / 1e6:.0f} MB"
        boto = bench.client()
        with bench.init(f"next-{copies}", cache=bench.folder / "cache") as repository:
            for step, model in enumerate(models):
                repository.commit(catchup.Bits(model), step=step)
                boto.upload_fileobj(io.BytesIO(file_of(model)), BUCKET, f"full/{copies}/{step}")
                if step:
                    boto.put_object(Bucket=BUCKET, Key=f"xor/{copies}/{step}", Body=xor_file(models[step - 1], model))
        for name, speed in LINKS.items():
            say(f"next: {title} over {name}")
            # A full download of the large model over the slow link takes half a minute.
            fulls = STEPS if speed is None or copies == 1 else 2
            with contextlib.nullcontext() if speed is None else Link(bench.server.endpoint_url, *speed) as link:
                endpoint = bench.server.endpoint_url if link is None else link.url
                rows = list(steps(bench, copies, models, endpoint, fulls))
            found = {
                key: statistics.median(row[key] for row in rows if key in row)
                for key in ("pull", "xor", "full", "requests", "nbytes")
            }
            found["most_requests"] = max(row["requests"] for row in rows)
            bench.found.setdefault("next", {}).setdefault(title, {})[name] = found


def steps(
    bench: Bench, copies: int, models: Sequence[Model], endpoint: str, fulls: int
) -> Iterator[dict[str, float]]:
    """What each step takes: our pull, the XOR file, and in the first `fulls` steps the whole file."""
    live, plain = torch_model(models[0]), {name: data.copy() for name, data in models[0].items()}
    options = {**bench.server.options, "endpoint_url": endpoint}
    far, target = bench.client(endpoint), str(bench.folder / "download")

    def by_xor(key: str) -> None:
        apply_xor(far.get_object(Bucket=BUCKET, Key=key)["Body"].read(), plain)

    with weightvc.Client(f"s3://{BUCKET}/next-{copies}", into=live, cache=None, **options) as client:
        client.pull("main@{step=0}")
        for step in range(1, STEPS + 1):
            row: dict[str, float] = {}
            row["pull"], update = timed(client.pull, f"main@{{step={step}}}")
            row["requests"], row["nbytes"] = update.timings.requests, update.timings.nbytes
            same(live, models[step])
            row["xor"], _ = timed(by_xor, f"xor/{copies}/{step}")
            if step <= fulls:
                row["full"], _ = timed(far.download_file, BUCKET, f"full/{copies}/{step}", target)
            yield row
    if any(not np.array_equal(plain[name], data) for name, data in models[-1].items()):
        raise SystemExit("wrong bits by XOR")


def cold(bench: Bench) -> None:
    """A first version from nothing, by a process that has the compiled passes loaded, as one that follows has."""
    from weightvc_kernels import planes

    planes.prepare()
    bench.found["cold"] = {}
    for copies in (1, 6):
        (model,) = bench.models(copies, 1)
        nbytes = sum(data.nbytes for data in model.values())
        boto, key = bench.client(), f"cold/{copies}"
        boto.upload_fileobj(io.BytesIO(file_of(model)), BUCKET, key)
        with bench.init(f"cold-{copies}", cache=None) as repository:
            repository.commit(catchup.Bits(model), step=0)
        size = boto.head_object(Bucket=BUCKET, Key=key)["ContentLength"]
        into = memoryview(bytearray(size))

        def ranged(size: int = size, key: str = key, into: memoryview = into, boto: Any = boto) -> None:
            part = 8 << 20

            def one(at: int) -> None:
                end = min(size, at + part)
                body = boto.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={at}-{end - 1}")["Body"]
                into[at:end] = body.read()

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(one, range(0, size, part)))

        pulls, loads, reads = [], [], []
        targets = torch_model({name: np.empty_like(data) for name, data in model.items()})
        url = f"s3://{BUCKET}/cold-{copies}"
        for _ in range(5):
            # What is there already would only be compared.
            for tensor in targets.values():
                tensor.zero_()
            with weightvc.Client(url, into=targets, cache=None, **bench.server.options) as client:
                seconds, update = timed(client.pull)
                pulls.append(seconds)
            with weightvc.Client(url, cache=None, **bench.server.options) as client:
                seconds, loaded = timed(client.pull)
                loads.append(seconds)
            same(loaded, model)
            del loaded
            reads.append(timed(ranged)[0])
        same(targets, model)
        bench.found["cold"][f"{nbytes / 1e6:.0f} MB"] = {
            "pull": statistics.median(pulls),
            "load": statistics.median(loads),
            "ranged": statistics.median(reads),
            "nbytes": update.timings.nbytes,
            "requests": update.timings.requests,
        }


def behind(bench: Bench, versions: int) -> None:
    """Many versions behind."""
    options, url = bench.server.options, f"s3://{BUCKET}/behind"
    bench.found["behind"] = catchup.measure(
        lambda **more: weightvc.init(url, **options, **more),
        lambda **more: weightvc.open(url, **options, **more),
        bench.folder / "behind",
        versions=versions,
        elements=1 << 23,
        say=say,
    )


def activate(bench: Bench) -> None:
    """The part that a server waits for."""
    models = list(bench.models(6, 4))
    url = bench.folder / "activate"
    with weightvc.init(url, cache=bench.folder / "cache") as repository:
        for step, model in enumerate(models):
            repository.commit(catchup.Bits(model), step=step)
    live, beside = torch_model(models[0]), torch_model(models[0])
    client = weightvc.Client(url, into=live, cache=None)
    client.pull("main@{step=0}")
    ours, plain = [], []
    for _ in range(4):
        for step in (1, 2, 3, 2, 1, 0):
            now, wanted = {name: t.clone() for name, t in live.items()}, models[step]
            update = client.stage(f"main@{{step={step}}}")
            ours.append(timed(update.activate)[0])
            same(live, wanted)
            places = scatters(now, wanted)
            for name, tensor in now.items():
                beside[name].copy_(tensor)
            plain.append(timed(scatter, beside, places)[0])
            same(beside, wanted)
    client.close()
    bench.found["activate"] = {
        "activate": statistics.median(ours),
        "scatter": statistics.median(plain),
        "most": max(ours),
        "changed": float(
            np.mean([(models[0][name] != data).mean() for name, data in models[1].items() if data.size > 1 << 16])
        ),
    }


def scatters(now: dict[str, Any], wanted: Model) -> list[tuple[str, Any, Any]]:
    """Positions and new values of each tensor that changes."""
    import torch

    out = []
    for name, data in wanted.items():
        new = torch.from_numpy(data.view("<i2").reshape(-1))
        at = (now[name].view(torch.int16).view(-1) != new).nonzero().view(-1)
        if at.numel():
            out.append((name, at, new[at]))
    return out


def scatter(tensors: dict[str, Any], places: Sequence[tuple[str, Any, Any]]) -> None:
    """What an in-place update is at the least."""
    import torch

    for name, at, values in places:
        tensors[name].view(torch.int16).view(-1)[at] = values


def followers(url: str, options: dict[str, Any], count: int, every: float, ready: Any, stop: Any, out: Any) -> None:
    """Some followers in threads of one process: ages and lags of all their updates."""
    import threading

    from weightvc_kernels import context, rice

    # A host of a fleet that has run for a while has loaded them.
    context.prepare()
    rice.prepare()
    found: list[dict[str, Any]] = []

    def one() -> None:
        live: Model = {
            f"model.layers.{i}.mlp.down_proj.weight": np.zeros(size, "<u2") for i, size in enumerate(SIZES)
        }
        tensors = torch_model(live)
        client = weightvc.Client(url, into=tensors, cache=None, **options)
        client.pull()
        row: dict[str, Any] = {"ages": [], "lags": [], "seconds": [], "digests": [], "polls": 0}
        halt = threading.Event()

        def wait() -> None:
            stop.wait()
            halt.set()

        threading.Thread(target=wait, daemon=True).start()
        ready.release()
        before = client.repository.stats.reads
        spent = 0
        for update in client.follow("main", every=every, stop=halt):
            update.activate()
            row["ages"].append(update.timings.age)
            row["lags"].append(update.lag)
            row["seconds"].append(update.timings.stage + update.timings.activate)
            row["digests"].append((update.version.step, digest_of(tensors)))
            spent += update.timings.requests
        row["reads"], row["of_updates"] = client.repository.stats.reads - before, spent
        row["last"] = digest_of(tensors)
        client.close()
        found.append(row)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put(found)


SIZES = [len(part) for part in np.array_split(np.zeros(1 << 19), 8)]


def digest_of(tensors: dict[str, Any]) -> str:
    """Of all bits."""
    import torch

    whole = blake3()
    for name in sorted(tensors):
        whole.update(tensors[name].view(torch.int16).numpy().tobytes())
    return whole.hexdigest()


def fleet(bench: Bench, seconds: float, count: int = 64, processes: int = 4, every: float = 0.45) -> None:
    """Followers of a branch that moves every second."""
    spawn = multiprocessing.get_context("spawn")
    run, url, digests = catchup.Run(1 << 19), f"s3://{BUCKET}/fleet", {}
    with bench.init("fleet", cache=bench.folder / "fleet") as repository:

        def commit(step: int) -> None:
            digests[step] = digest_of(torch_model(run.tensors()))
            repository.commit(catchup.Bits(run.tensors()), step=step)

        commit(0)
        ready, stop, out = spawn.Semaphore(0), spawn.Event(), spawn.Queue()
        arguments = (url, bench.server.options, count // processes, every, ready, stop, out)
        children = [spawn.Process(target=followers, args=arguments) for _ in range(processes)]
        for child in children:
            child.start()
        for _ in range(count):
            ready.acquire()
        say(f"fleet: {count} followers are ready")
        start, step, took = time.monotonic(), 0, []
        while time.monotonic() - start < seconds:
            step += 1
            run.step()
            took.append(timed(commit, step)[0])
            time.sleep(max(0.0, start + step - time.monotonic()))
        time.sleep(3)
        stop.set()
        rows = [row for _ in children for row in out.get()]
        for child in children:
            child.join()
    ages = sorted(age for row in rows for age in row["ages"])
    spent = sorted(s for row in rows for s in row["seconds"])
    wrong = sum(digest != digests[step] for row in rows for step, digest in row["digests"])
    wrong += sum(row["last"] != digests[step] for row in rows)
    lags = [lag for row in rows for lag in row["lags"]]
    bench.found["fleet"] = {
        "followers": count,
        "versions": step,
        "updates": len(ages),
        "age_p50": statistics.median(ages),
        "age_p99": ages[int(len(ages) * 0.99)],
        "age_max": ages[-1],
        "pull_p50": statistics.median(spent),
        "pull_p99": spent[int(len(spent) * 0.99)],
        "commit_p50": statistics.median(took),
        "most_lag": max(lags),
        "wrong": wrong,
        "requests": sum(row["reads"] for row in rows),
        "of_updates": sum(row["of_updates"] for row in rows),
        "every": every,
    }


def report(found: dict[str, Any]) -> Iterator[str]:
    """The tables, as Markdown."""
    if "next" in found:
        yield "| model, link | pull | requests, bytes | XOR + zstd-1 | whole file | times faster than that |"
        yield "|---|---|---|---|---|---|"
        for title, links in found["next"].items():
            for link, row in links.items():
                yield (
                    f"| {title}, {link} | {row['pull']:.3f} s | {row['most_requests']:.0f}, {row['nbytes']:,.0f} | "
                    f"{row['xor']:.3f} s | {row['full']:.3f} s | {row['full'] / row['pull']:.1f} |"
                )
        yield ""
    if "cold" in found:
        yield "| cold pull | seconds | requests, bytes | ranged reads of the file | speed against that |"
        yield "|---|---|---|---|---|"
        for title, row in found["cold"].items():
            for way, seconds in (("into live tensors", row["pull"]), ("a dict of tensors", row["load"])):
                yield (
                    f"| {title}, {way} | {seconds:.3f} s | {row['requests']}, {row['nbytes']:,} | "
                    f"{row['ranged']:.3f} s | {row['ranged'] / seconds:.2f} |"
                )
        yield ""
    if "behind" in found:
        row = found["behind"]
        single, caught = row["single"], row["caught_up"]
        yield f"| {row['versions']:,} versions behind | requests | bytes | of single patches |"
        yield "|---|---|---|---|"
        for title, part in (("single patches", single), ("compacted", caught), ("from nothing", row["cold"])):
            yield (
                f"| {title} | {part['requests']:,} | {part['nbytes']:,} | {part['nbytes'] / single['nbytes']:.4f} |"
            )
        yield f"| one direct patch | | {row['direct']:,} | {row['direct'] / single['nbytes']:.4f} |"
        yield ""
        yield (
            f"Single patches are {single['nbytes'] / caught['nbytes']:.0f} times as many bytes, a cold pull "
            f"{row['cold']['nbytes'] / caught['nbytes']:.1f} times; it takes {caught['nbytes'] / row['direct']:.2f} "
            "times one direct patch."
        )
        yield ""
    if "activate" in found:
        row = found["activate"]
        yield (
            f"Activate, {row['changed']:.2%} changed: {row['activate'] * 1e3:.1f} ms, at most "
            f"{row['most'] * 1e3:.1f}; a plain scatter {row['scatter'] * 1e3:.1f} ms: "
            f"{row['activate'] / row['scatter']:.2f} times."
        )
        yield ""
    if "fleet" in found:
        row = found["fleet"]
        yield (
            f"{row['followers']} followers, {row['versions']} versions, one a second: {row['updates']:,} updates; "
            f"commit to verified {row['age_p50']:.3f} s (median), {row['age_p99']:.3f} (99 %), {row['age_max']:.3f} "
            f"at most, with polls every {row['every']} s; the pull alone {row['pull_p50']:.3f} and "
            f"{row['pull_p99']:.3f}, a commit {row['commit_p50']:.3f}; at most {row['most_lag']} versions behind; "
            f"{row['wrong']} with wrong bits. {row['requests']:,} requests, of which {row['of_updates']:,} belong to "
            "updates; the rest are conditional reads of the root."
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chain", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="of the fleet")
    parser.add_argument("--every", type=float, default=0.45, help="seconds between looks of the fleet")
    parser.add_argument("--versions", type=int, default=1000, help="of catching up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Seaweed() as server:
        bench = Bench(server, Path(name), arguments.chain)
        work: dict[str, Callable[[], None]] = {
            "next": lambda: next_version(bench),
            "cold": lambda: cold(bench),
            "behind": lambda: behind(bench, arguments.versions),
            "activate": lambda: activate(bench),
            "fleet": lambda: fleet(bench, arguments.seconds, every=arguments.every),
        }
        for part in arguments.parts or PARTS:
            say(part)
            work[part]()
            if arguments.json:
                arguments.json.write_text(json.dumps(bench.found, indent=1))
    print("\n".join(report(bench.found)))


if __name__ == "__main__":
    main()

"""A slow link on loopback: a TCP proxy, in a process of its own, that holds all its connections together to a rate
and every byte back for a while.

    with Link("http://127.0.0.1:8333", mbit=100, round_trip=0.05) as link:
        client = boto3.client("s3", endpoint_url=link.url, …)
"""

import asyncio
import multiprocessing
from typing import Any
from urllib.parse import urlsplit

PIECE = 1 << 16
AHEAD = 0.02
"""Seconds of the link's rate that may wait in the proxy: what a router would queue."""


class Link:
    """`mbit` are 10^6 bits a second, each way; `round_trip` is in seconds, half of it each way."""

    def __init__(self, url: str, mbit: float, round_trip: float) -> None:
        there = urlsplit(url)
        here, far = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=_serve, args=(far, there.hostname, there.port, mbit * 125_000, round_trip / 2), daemon=True
        )
        self._process.start()
        self.url = f"http://127.0.0.1:{here.recv()}"

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


class _Way:
    """One direction of the link."""

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay
        self._free = 0.0

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection's bytes until it ends."""
        clock = asyncio.get_running_loop().time
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.ensure_future(self._deliver(on_the_way, writer))
        try:
            while data := await reader.read(PIECE):
                self._free = max(self._free, clock()) + len(data) / self._rate
                on_the_way.put_nowait((self._free + self._delay, data))
                if (early := self._free - clock()) > AHEAD:
                    await asyncio.sleep(early - AHEAD / 2)
        except OSError:
            pass
        on_the_way.put_nowait((self._free + self._delay, b""))
        await delivery

    async def _deliver(self, on_the_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                due, data = await on_the_way.get()
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def _serve(report: Any, host: str, port: int, rate: float, delay: float) -> None:
    async def run() -> None:
        up, down = _Way(rate, delay), _Way(rate, delay)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            await asyncio.gather(up.pump(reader, far_writer), down.pump(far_reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        report.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())

"""``python -m bench.engine URL MODEL`` measures which part of a running engine's throughput batchline reaches.

The engine is driven directly with several numbers of requests in flight, and by a new service with default settings
and no cap, with the engine's queue read and without. All of these take turns, because the speed of a machine changes;
the medians of the rounds are compared. Rates are those of the middle of each run, from 25 to 85 % of the answers.
A run is repeated if the host of a virtual machine took CPU time away from it meanwhile.
The lines of batchline also show how its limit changed.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import aiohttp
import click
import psutil  # type: ignore[import-untyped]
from msgspec import Struct

from tests.support.service import CHAT, Service, counts_of, running_service, submit

_BEGIN, _END = 0.25, 0.85
"""The part of the answers between which rates are measured."""
_POLL_SECONDS = 0.5
_GOAL = 0.95
_MOST_STOLEN, _TRIES = 0.05, 4
"""The part of the CPU time that a host may take away during a run, and how often a run is tried."""
_numbers = count()
"""No two requests are equal, so that no engine answers one from a cache."""


class Point(Struct, frozen=True):
    """What a batch had reached at one moment."""

    seconds: float
    answered: int
    limit: int | None
    """None before the batch has begun, and 0 when no line of it is left."""


class Load(Struct, frozen=True):
    """The requests that an engine gets."""

    model: str
    prompt: str
    max_tokens: int

    def body(self) -> dict[str, object]:
        messages = [{"role": "user", "content": f"{next(_numbers):06d} {self.prompt}"}]
        return {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}

    def lines(self, lines: int) -> bytes:
        """Return an input file with so many lines."""
        records = (
            {"custom_id": str(line), "method": "POST", "url": CHAT, "body": self.body()} for line in range(lines)
        )
        return b"".join(json.dumps(record).encode() + b"\n" for record in records)


async def direct_rate(url: str, load: Load, *, in_flight: int, requests: int) -> float:
    """Return the answers per second with so many requests in flight."""
    answered: list[float] = []
    bodies = iter([load.body() for _ in range(requests)])
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), raise_for_status=True
    ) as client:

        async def send(body: dict[str, object]) -> None:
            async with client.post(f"{url}/chat/completions", json=body) as answer:
                await answer.read()

        async def send_all() -> None:
            for body in bodies:
                try:
                    await send(body)
                except aiohttp.ServerDisconnectedError:
                    # A server that stood still for seconds takes a connection for idle, and closes it unread.
                    await send(body)
                answered.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(send_all())
    first, last = answered[int(_BEGIN * requests)], answered[int(_END * requests)]
    return (_END - _BEGIN) * requests / (last - first)


def run_batch(service: Service, lines: bytes) -> list[Point]:
    """Run a batch, and return what it had reached at each poll."""
    client = service.client()
    batch = submit(client, lines)
    since, points = time.monotonic(), [Point(0.0, 0, None)]
    while batch.status != "completed":
        time.sleep(_POLL_SECONDS)
        batch = client.batches.retrieve(batch.id)
        progress = service.call("GET", f"/v1/batches/{batch.id}/progress").json
        seconds = time.monotonic() - since
        _, answered, failed = counts_of(batch)
        if failed or batch.status in {"failed", "expired", "cancelled"}:
            sys.exit(f"The batch is {batch.status}, and {failed} of its lines failed.")
        points.append(Point(seconds, answered, progress["concurrency"]))
    return points


def rate_of(points: Sequence[Point]) -> float:
    """Return the answers per second over the middle of a batch."""
    total = points[-1].answered
    first = next(point for point in points if point.answered >= _BEGIN * total)
    last = next(point for point in points if point.answered >= _END * total)
    if last is first:
        sys.exit("The batch ended too soon to measure it. Use more --requests.")
    return (last.answered - first.answered) / (last.seconds - first.seconds)


def curve_of(points: Sequence[Point]) -> str:
    """Return the limits in the order of their times, each with the second from which on it held."""
    changes, limit = [], None
    for point in points:
        if point.limit and point.limit != limit:
            limit = point.limit
            changes.append(f"{limit} from {point.seconds:.0f} s")
    return ", ".join(changes)


def measure_directly(url: str, load: Load, in_flight: int, requests: int) -> float:
    rate = asyncio.run(direct_rate(url, load, in_flight=in_flight, requests=requests))
    print(f"directly, {in_flight} in flight: {rate:.2f} answers/s", flush=True)
    return rate


def run_service(url: str, load: Load, metrics: str, lines: int) -> list[Point]:
    """Run a batch with a new service, and return what it had reached at each poll."""
    with (
        tempfile.TemporaryDirectory(prefix="batchline-engine-") as folder,
        running_service(Path(folder), url, upstream_metrics=metrics) as service,
    ):
        return run_batch(service, load.lines(lines))


def measure_batchline(url: str, load: Load, metrics: str, lines: int) -> float:
    points = run_service(url, load, metrics, lines)
    rate = rate_of(points)
    print(f"batchline, metrics {metrics}: {rate:.2f} answers/s; its limit was {curve_of(points)}", flush=True)
    return rate


def stolen_seconds() -> tuple[float, float]:
    """Return the CPU time that the host took away from this machine since its start, and all CPU time."""
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", 0.0)
    return stolen, times.user + times.nice + times.system + times.idle + stolen


def undisturbed(
    run: Callable[[], float], *, stolen_seconds: Callable[[], tuple[float, float]] = stolen_seconds
) -> float:
    """Return the rate of the first run that the host did not disturb, or of the least disturbed one."""
    rates: dict[float, float] = {}
    for _ in range(_TRIES):
        stolen, total = stolen_seconds()
        rate = run()
        stolen_after, total_after = stolen_seconds()
        part = (stolen_after - stolen) / max(total_after - total, 1e-9)
        rates[part] = rate
        if part <= _MOST_STOLEN:
            break
        print(f"The host took {part:.0%} of the CPU time away meanwhile.", flush=True)
    return rates[min(rates)]


@click.command()
@click.argument("url")
@click.argument("model")
@click.option("--rounds", default=3, show_default=True)
@click.option("--requests", default=3000, show_default=True, help="Requests in each run.")
@click.option("--in-flight", default="16,32,64,128", show_default=True, help="Requests in flight of the direct runs.")
@click.option("--max-tokens", default=32, show_default=True, help="The most tokens of an answer.")
@click.option("--prompt", default="Tell me of the sea and of the ships.", show_default=True)
def main(url: str, model: str, rounds: int, requests: int, in_flight: str, max_tokens: int, prompt: str) -> None:
    """Compare batchline with direct requests to the engine at URL, which ends in /v1."""
    load = Load(model, prompt, max_tokens)
    direct, ours = defaultdict[int, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for level in map(int, in_flight.split(",")):
            direct[level].append(undisturbed(partial(measure_directly, url, load, level, requests)))
        for metrics in ("on", "off"):
            ours[metrics].append(undisturbed(partial(measure_batchline, url, load, metrics, requests)))
    best = max(direct, key=lambda level: median(direct[level]))
    print(f"The best direct rate is {median(direct[best]):.2f} answers/s, with {best} in flight.")
    shares = {metrics: median(rates) / median(direct[best]) for metrics, rates in ours.items()}
    for metrics, share in shares.items():
        print(f"batchline reaches {share:.2f} of it with metrics {metrics}{'' if share >= _GOAL else '  BELOW GOAL'}")
    sys.exit(any(share < _GOAL for share in shares.values()))


if __name__ == "__main__":
    main()

"""``python -m bench.zoo.upstreams KIND`` runs an upstream that behaves as real ones do, and prints its URL.

GET /seen returns how many requests it answered and refused, how many it had in flight at most, and since how many
seconds it is used.
"""

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec import Struct

_ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
)
_REFUSAL = msgspec.json.encode({"error": {"message": "Rate limit reached", "type": "requests"}})


class Message(Struct):
    content: str


class Request(Struct):
    model: str
    messages: list[Message]

    @property
    def prompt(self) -> str:
        return self.messages[-1].content


class Reply(NamedTuple):
    status: int = 200
    headers: dict[str, str] | None = None


OUTAGE_BEGINS, OUTAGE_ENDS = 5.0, 65.0
"""The seconds since the first request between which an upstream with an outage refuses everything."""

Handler = Callable[[Request], Awaitable[Reply]]
OK, REFUSED, OVERLOADED = Reply(), Reply(429), Reply(503)


def refused(retry_after: float) -> Reply:
    return Reply(429, {"retry-after": f"{retry_after:.1f}"})


class Seen:
    """What the upstream counts. Kinds may ask it how much is in flight, and since when it is used."""

    def __init__(self) -> None:
        self.answered = self.refused = self.in_flight = self.peak = 0
        self._first_request: float | None = None

    @property
    def seconds(self) -> float:
        """The time since the first request."""
        return 0.0 if self._first_request is None else time.monotonic() - self._first_request

    def begin(self) -> None:
        if self._first_request is None:
            self._first_request = time.monotonic()
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)

    def end(self, reply: Reply | None) -> None:
        self.in_flight -= 1
        if reply is not None:
            self.answered += reply.status == 200
            self.refused += reply.status != 200


class Bucket:
    """So many a second, and some of them at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._filled_at = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Window:
    """So many in each span of time, which begins with the first request after the last one."""

    def __init__(self, allowed: float, seconds: float) -> None:
        self.allowed, self._seconds = allowed, seconds
        self.left, self._ends = allowed, -inf

    @property
    def seconds_left(self) -> float:
        return max(0.1, self._ends - time.monotonic())

    def take(self, amount: float = 1.0) -> bool:
        if time.monotonic() >= self._ends:
            self.left, self._ends = self.allowed, time.monotonic() + self._seconds
        if self.left < amount:
            return False
        self.left -= amount
        return True


async def answer(seconds: float) -> Reply:
    await asyncio.sleep(seconds)
    return OK


def clean(seen: Seen) -> Handler:
    return lambda _: answer(0.02)


def hard(slots: Callable[[float], int], seconds: float) -> Callable[[Seen], Handler]:
    """Refuse what comes while all slots are taken, as a gateway before an engine does."""

    def kind(seen: Seen) -> Handler:
        async def handle(request: Request) -> Reply:
            return REFUSED if seen.in_flight > slots(seen.seconds) else await answer(seconds)

        return handle

    return kind


def queueing(slots: Callable[[float], int], seconds: Callable[[], float]) -> Callable[[Seen], Handler]:
    """Queue what comes while all slots are taken, and say nothing about it."""

    def kind(seen: Seen) -> Handler:
        freed, taken = asyncio.Condition(), [0]

        async def handle(request: Request) -> Reply:
            async with freed:
                await freed.wait_for(lambda: taken[0] < slots(seen.seconds))
                taken[0] += 1
            try:
                return await answer(seconds())
            finally:
                taken[0] -= 1
                async with freed:
                    freed.notify()

        return handle

    return kind


def bucket(rate: float, burst: float, retry_after: float | None = None) -> Callable[[Seen], Handler]:
    def kind(seen: Seen) -> Handler:
        level = Bucket(rate, burst)

        async def handle(request: Request) -> Reply:
            if level.take():
                return await answer(0.02)
            return REFUSED if retry_after is None else refused(retry_after)

        return handle

    return kind


def window(seen: Seen) -> Handler:
    """Accept 1,000 in ten seconds, as a limit per minute in miniature, and say when the next ones may come."""
    level = Window(1000, 10.0)

    async def handle(request: Request) -> Reply:
        return await answer(0.02) if level.take() else refused(level.seconds_left)

    return handle


def tokens(seen: Seen) -> Handler:
    """Accept 100,000 tokens in ten seconds, and announce with every answer how many are left and until when."""
    level = Window(100_000, 10.0)

    async def handle(request: Request) -> Reply:
        accepted = level.take(random.uniform(50, 150))
        announced = {
            "x-ratelimit-limit-tokens": f"{level.allowed:.0f}",
            "x-ratelimit-remaining-tokens": f"{level.left:.0f}",
            "x-ratelimit-reset-tokens": f"{level.seconds_left:.3f}s",
        }
        if accepted:
            await asyncio.sleep(0.02)
        return Reply(200 if accepted else 429, announced)

    return handle


def outage(kind: Callable[[Seen], Handler]) -> Callable[[Seen], Handler]:
    """Behave as another kind, but refuse everything for a minute."""

    def kind_with_outage(seen: Seen) -> Handler:
        handle = kind(seen)

        async def handle_or_refuse(request: Request) -> Reply:
            return REFUSED if OUTAGE_BEGINS <= seen.seconds < OUTAGE_ENDS else await handle(request)

        return handle_or_refuse

    return kind_with_outage


def per_model(seen: Seen) -> Handler:
    """Limit one model to 5 a second, and no other."""
    level = Bucket(5, 5)

    async def handle(request: Request) -> Reply:
        return REFUSED if request.model == "limited" and not level.take() else await answer(0.02)

    return handle


def by_line(seen: Seen) -> Handler:
    """Refuse some lines whatever the rate, fail for others, and take 25 s for a third sort."""
    faults = {"poison": REFUSED, "failing": OVERLOADED}

    async def handle(request: Request) -> Reply:
        return faults.get(request.prompt) or await answer(25.0 if request.prompt == "hang" else 0.02)

    return handle


def by_chance(part: float, fault: Reply) -> Callable[[Seen], Handler]:
    def kind(seen: Seen) -> Handler:
        async def handle(request: Request) -> Reply:
            reply = await answer(0.02)
            return fault if random.random() < part else reply

        return handle

    return kind


def knee(seen: Seen) -> Handler:
    """Get less done with many more than 32 in flight, as an engine whose cache is too small does."""

    async def handle(request: Request) -> Reply:
        return await answer(0.1 * max(1.0, seen.in_flight / 32) ** 1.5)

    return handle


def engine(slots: int, steps: int, step_seconds: float) -> Callable[[Seen], Handler]:
    """Answer in waves: all requests in a slot advance together, and a free slot is taken between two steps."""

    def kind(seen: Seen) -> Handler:
        between_steps, taken = asyncio.Condition(), [0]
        clock: list[asyncio.Task[None]] = []

        async def step() -> None:
            while True:
                await asyncio.sleep(step_seconds)
                async with between_steps:
                    between_steps.notify_all()

        async def handle(request: Request) -> Reply:
            if not clock:
                clock.append(asyncio.create_task(step()))
            async with between_steps:
                await between_steps.wait()
                await between_steps.wait_for(lambda: taken[0] < slots)
                taken[0] += 1
                for _ in range(steps):
                    await between_steps.wait()
                taken[0] -= 1
            return OK

        return handle

    return kind


KINDS: dict[str, Callable[[Seen], Handler]] = {
    "clean20": clean,
    "hard8": hard(lambda _: 8, 0.1),
    "hard200": hard(lambda _: 200, 0.2),
    "hard64slow": hard(lambda _: 64, 1.0),
    "growing": hard(lambda seconds: 16 if seconds < 10 else 160, 0.1),
    "silent256": queueing(lambda _: 256, lambda: 0.5 * random.uniform(0.7, 1.3)),
    "halving": queueing(lambda seconds: 64 if seconds < 10 else 32, lambda: 0.1),
    "tail64": queueing(lambda _: 64, lambda: min(8.0, random.lognormvariate(-1.6, 1.2))),
    "engine16": engine(16, steps=8, step_seconds=0.05),
    "knee32": knee,
    "bucket500": bucket(500, 50),
    "bucket100ra": bucket(100, 10, retry_after=1.0),
    "window": window,
    "tokens": tokens,
    "random429": by_chance(0.05, REFUSED),
    "random503": by_chance(0.05, OVERLOADED),
    "per_model": per_model,
    "poison": by_line,
    "refused": by_line,
    "failing": by_line,
    "hanging": by_line,
    "outage500": outage(bucket(500, 50)),
    "outage64": outage(hard(lambda _: 64, 0.1)),
    "outagequeue": outage(queueing(lambda _: 64, lambda: 0.1)),
}


class Server:
    """The upstream as an HTTP server."""

    def __init__(self, kind: str) -> None:
        self._seen = Seen()
        self._handle = KINDS[kind](self._seen)
        self._decode = msgspec.json.Decoder(Request).decode

    async def run(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/seen", self._report)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    async def _chat(self, http: web.Request) -> web.Response:
        request, reply = self._decode(await http.read()), None
        self._seen.begin()
        try:
            reply = await self._handle(request)
        finally:
            self._seen.end(reply)
        body = _ANSWER if reply.status == 200 else _REFUSAL
        return web.Response(body=body, status=reply.status, headers=reply.headers, content_type="application/json")

    async def _report(self, http: web.Request) -> web.Response:
        seen = self._seen
        counts = {"answered": seen.answered, "refused": seen.refused, "peak": seen.peak, "seconds": seen.seconds}
        return web.json_response(counts)


if __name__ == "__main__":
    asyncio.run(Server(sys.argv[1]).run())

"""``python -m bench.zoo [KIND ...]`` measures how near batchline comes to an all-knowing client.

Each kind of upstream gets a fresh service with default settings and one batch. The share of the ideal is the time that
a client would need which knows the upstream's capacity in advance, divided by the time from the upload until every
line is answered. Needs about ten minutes, and a machine that does nothing else.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from msgspec import Struct
from openai import OpenAI

from bench.zoo.upstreams import KINDS
from tests.support.service import CHAT, Program, Service, call, counts_of, running_service, submit

_POLL_SECONDS = 0.05


class Result(Struct, frozen=True, kw_only=True):
    seconds: float
    open: int = 0
    """Lines that had no answer when the time was over."""
    failed: int = 0


class Run:
    """A service before one upstream."""

    def __init__(self, service: Service, case: "Case") -> None:
        self._service, self._case = service, case
        self._client = service.client()

    def another_project(self) -> OpenAI:
        return self._service.client(self._service.new_account("two"))

    def measure(self, lines: bytes, *, hopeless: int = 0) -> Result:
        """Run a batch until all lines but the hopeless ones are answered."""
        since, limit = time.monotonic(), max(60.0, 8 * self._case.ideal_seconds)
        batch = submit(self._client, lines)
        while True:
            batch = self._client.batches.retrieve(batch.id)
            total, completed, failed = counts_of(batch)
            seconds = time.monotonic() - since
            is_done = batch.status == "completed" or (total and completed + max(failed, hopeless) >= total)
            if is_done or seconds > limit:
                unanswered = (total or lines.count(b"\n")) - completed - max(failed, hopeless)
                return Result(seconds=seconds, open=max(0, unanswered), failed=max(0, failed - hopeless))
            time.sleep(_POLL_SECONDS)


def prompts(count: int, prompt: str = "say ok", *, model: str = "m") -> bytes:
    """Return an input file with so many equal lines."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    lines = ({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body} for number in range(count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def one_batch(run: Run, lines: int) -> Result:
    return run.measure(prompts(lines))


def beside_poison(run: Run, lines: int) -> Result:
    """One line is always refused, and another project has such a line too."""
    submit(run.another_project(), prompts(1, "poison"))
    time.sleep(4)
    poison, others = prompts(1, "poison").replace(b'"0"', b'"poison"'), prompts(lines - 1)
    return run.measure(poison + others, hopeless=1)


def beside_a_limited_model(run: Run, lines: int) -> Result:
    """Another project has lines of a model that is refused most of the time."""
    submit(run.another_project(), prompts(400, model="limited"))
    time.sleep(4)
    return run.measure(prompts(lines))


def beside_hanging_lines(run: Run, lines: int) -> Result:
    """Another project has lines that hang; the slowest of six small batches counts."""
    submit(run.another_project(), prompts(400, "hang", model="slow"))
    time.sleep(1)
    results = [run.measure(prompts(lines)) for _ in range(6)]
    return max(results, key=lambda result: (result.open + result.failed, result.seconds))


class Case(Struct, frozen=True):
    lines: int
    ideal_seconds: float
    goal: float
    """The share of the ideal to reach."""
    measure: Callable[[Run, int], Result] = one_batch


CASES = {
    "clean20": Case(20_000, 5.7, 0.9),
    "hard8": Case(1600, 20.0, 0.9),
    "hard200": Case(15_000, 15.0, 0.9),
    "hard64slow": Case(1920, 30.0, 0.8),
    "growing": Case(12_000, 16.5, 0.85),
    "silent256": Case(8000, 15.6, 0.9),
    "halving": Case(9600, 20.0, 0.85),
    "tail64": Case(3000, 23.2, 0.85),
    "engine16": Case(1200, 30.0, 0.85),
    "knee32": Case(6000, 18.75, 0.9),
    "bucket500": Case(10_000, 20.0, 0.9),
    "bucket100ra": Case(2000, 20.0, 0.9),
    "window": Case(4000, 30.5, 0.9),
    "tokens": Case(3900, 30.5, 0.85),
    "per_model": Case(4000, 3.0, 0.7, beside_a_limited_model),
    "poison": Case(4000, 3.0, 0.7, beside_poison),
    "random429": Case(6000, 5.0, 0.7),
    "random503": Case(6000, 5.0, 0.7),
    "hanging": Case(50, 2.0, 0.5, beside_hanging_lines),
}


def run_case(kind: str, case: Case) -> bool:
    """Run one kind, print its row, and return whether the goal was reached."""
    upstream = Program("-m", "bench.zoo.upstreams", kind)
    try:
        url = upstream.wait_for_log(r"(http://\S+)")
        with (
            tempfile.TemporaryDirectory(prefix="batchline-zoo-") as folder,
            running_service(Path(folder), f"{url}/v1") as service,
        ):
            result = case.measure(Run(service, case), case.lines)
        seen = call(int(url.rsplit(":", 1)[1]), "GET", "/seen", headers={}).json
    finally:
        upstream.end()
    share = case.ideal_seconds / result.seconds
    reached = share >= case.goal and not result.open and not result.failed
    print(
        f"{kind:12}{case.ideal_seconds:7.1f} s{result.seconds:8.1f} s{share:8.2f}{case.goal:8.2f}"
        f"{result.failed:8}{result.open:6}{seen['refused']:9}{seen['peak']:6}{'' if reached else '  BELOW GOAL'}",
        flush=True,
    )
    return reached


@click.command()
@click.argument("kinds", nargs=-1, type=click.Choice(list(KINDS)))
def main(kinds: tuple[str, ...]) -> None:
    """Measure how near batchline comes to an all-knowing client, for all kinds of upstreams or for these."""
    print(f"{'':12}{'ideal':>9}{'took':>10}{'share':>8}{'goal':>8}{'failed':>8}{'open':>6}{'refused':>9}{'peak':>6}")
    reached = [run_case(kind, CASES[kind]) for kind in kinds or KINDS]
    print(f"{sum(reached)} of {len(reached)} upstreams were used as well as they should be")
    sys.exit(not all(reached))


if __name__ == "__main__":
    main()

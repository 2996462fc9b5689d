"""Money over several workers, to its end and through a kill: SPEC D4, A3."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    submit,
    wait_until,
)

pytestmark = pytest.mark.proof

_SLOTS = 32
_DELAY = 0.2
_AT_RISK = _SLOTS + _SLOTS / _DELAY * 2
"""Lines in flight, and those that others answered since a worker last read the balance, 2 s ago at most."""
_FUNDS = 2_000_000
_SETTINGS = """
metering = true

[models.m]
input_price = 1.1
output_price = 0.7
"""
"""Half of that, in nano-units a token: 550 and 350."""


def test_the_ledger_is_what_the_files_say_when_money_runs_out_under_two_workers(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed
) -> None:
    """D4: charges equal the usage of the recorded answers to the nano-unit, though a worker was killed; what is
    overdrawn is at most what was in flight while the balance was read, and all other lines fail for want of money."""
    config = tmp_path / "batchline.toml"
    config.write_text(_SETTINGS)
    lines = chat_lines(f"good {n}" for n in range(3000))
    with (
        running_mock(delay=_DELAY) as mock,
        running_fleet(
            tmp_path,
            *("api", "worker", "worker"),
            postgres=postgres,
            seaweed=seaweed,
            upstream_url=mock.url,
            config=config,
            max_concurrency=_SLOTS,
            lease_seconds=3,
        ) as fleet,
    ):
        (api,), client = fleet.apis, fleet.client()
        api.command("orgs", "set-balance", "default", "0.0015", "--credits", "0.0005")
        batch = submit(client, lines)
        wait_until(lambda: counts_of(client.batches.retrieve(batch.id))[1] >= 100, what="100 lines")
        fleet.workers[0].kill()
        fleet.workers[0].start()
        ended = await_end(client, batch.id)
        assert ended.status == "completed"
        records = results_of(client, ended, lines).values()
        failed = [record["error"] for record in records if record["error"]]
        assert {error["code"] for error in failed} == {"insufficient_quota"}
        charged, dearest = sum(map(_cost, records)), max(map(_cost, records))
        assert _booked(api) == (len(records) - len(failed), charged)
        left = _funds(api)
        assert left == _FUNDS - charged
        assert -_AT_RISK * dearest < left <= 0
        with pytest.raises(openai.RateLimitError) as refused:
            submit(client, lines)
        assert refused.value.code == "insufficient_quota"
        print(f"{len(failed)} of 3000 found no money; overdraft {-left}, {-left / dearest:.0f} lines of {_SLOTS} slots")


def _cost(record: dict[str, Any]) -> int:
    """Of one line of the files, from nothing but what the line itself says."""
    if record["response"] is None:
        return 0
    usage = record["response"]["body"]["usage"]
    return int((usage["prompt_tokens"] * 1_100_000_000 + usage["completion_tokens"] * 700_000_000) // 2_000_000)


def _funds(api: Service) -> int:
    (organization,) = json.loads(api.command("orgs", "list", "--json"))
    return int(organization["balance_nano"]) + int(organization["credits_nano"])


def _booked(api: Service) -> tuple[int, int]:
    """Requests and cost, summed over the ledger's usage."""
    rows = json.loads(api.command("usage", "--by", "batch", "--json"))
    return sum(row["requests"] for row in rows), sum(row["cost_nano"] for row in rows)

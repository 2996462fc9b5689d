"""Money over several workers, to its end and through a kill: SPEC D4, A3."""

from pathlib import Path

import openai
import pytest

from tests.support.fleet import running_fleet
from tests.support.money import booked_by, cost_of, funds_of, priced_settings
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
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


def test_the_ledger_is_what_the_files_say_when_money_runs_out_under_two_workers(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed
) -> None:
    """D4: charges equal the usage of the recorded answers to the nano-unit, though a worker was killed; what is
    overdrawn is at most what was in flight while the balance was read, and all other lines fail for want of money."""
    lines = chat_lines(f"good {n}" for n in range(3000))
    with (
        running_mock(delay=_DELAY) as mock,
        running_fleet(
            tmp_path,
            *("api", "worker", "worker"),
            postgres=postgres,
            seaweed=seaweed,
            upstream_url=mock.url,
            config=priced_settings(tmp_path),
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
        charged, dearest = sum(map(cost_of, records)), max(map(cost_of, records))
        assert booked_by(api) == (len(records) - len(failed), charged)
        left = funds_of(api)
        assert left == _FUNDS - charged
        assert -_AT_RISK * dearest < left <= 0
        with pytest.raises(openai.RateLimitError) as refused:
            submit(client, lines)
        assert refused.value.code == "insufficient_quota"
        print(f"{len(failed)} of 3000 found no money; overdraft {-left}, {-left / dearest:.0f} lines of {_SLOTS} slots")

"""Money through crashes and at its end, with real processes: SPEC A3, D4."""

from functools import partial
from itertools import count
from pathlib import Path

import openai
import pytest

from tests.support.money import booked_by, cost_of, funds_of, priced_settings
from tests.support.service import (
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_KILLS = 5


def _is_further(service: Service, batch_id: str, wanted: int) -> bool:
    return sum(counts_of(service.client().batches.retrieve(batch_id))[1:]) >= wanted


@pytest.mark.parametrize("size", [4_000, pytest.param(10_000, marks=pytest.mark.proof)])
def test_the_ledger_is_what_the_output_file_says_after_five_kills(tmp_path: Path, size: int) -> None:
    """D4: charges equal the usage of the recorded answers to the nano-unit; a line that failed costs nothing."""
    prompts = ("[[status=400]]" if n % 50 == 0 else "word " * (n % 11) for n in count())
    lines = chat_lines(f"{prompt} {n}" for n, prompt in zip(range(size), prompts, strict=False))
    with (
        running_mock(delay=0.05) as mock,
        running_service(tmp_path, mock.url, config=priced_settings(tmp_path), max_concurrency=64) as service,
    ):
        before = funds_of(service)
        batch_id = submit(service.client(), lines).id
        for kill in range(_KILLS):
            wanted = (kill + 1) * size // (_KILLS + 2)
            wait_until(partial(_is_further, service, batch_id, wanted), what=f"{wanted} lines")
            service.kill()
            service.restart()
        client = service.client()
        records = results_of(client, await_end(client, batch_id), lines).values()
        charged = sum(map(cost_of, records))
        answered = sum(record["response"] is not None for record in records)
        assert answered >= size * 0.97
        assert before - funds_of(service) == charged > 0
        assert booked_by(service) == (answered, charged)
        print(f"{size} lines, {_KILLS} kills: {answered} answers, {charged} nano-units in file and ledger alike")


def test_the_rest_of_a_batch_fails_when_the_balance_reaches_zero(tmp_path: Path) -> None:
    """D4, A3: the batch completes, the overdraft is at most what an estimate missed, and nothing new is taken until
    there is money again; results can be had all the same."""
    lines = chat_lines(f"good {n}" for n in range(3000))
    slots = 32
    with (
        running_mock(delay=0.02) as mock,
        running_service(tmp_path, mock.url, config=priced_settings(tmp_path), max_concurrency=slots) as service,
    ):
        service.command("orgs", "set-balance", "default", "0.004", "--credits", "0.001")
        client = service.client()
        batch = await_end(client, submit(client, lines).id)
        assert batch.status == "completed"
        records = results_of(client, batch, lines).values()
        failed = [record["error"] for record in records if record["error"]]
        assert {error["code"] for error in failed} == {"insufficient_quota"}
        assert all(error["message"].startswith("[legacy:http_420] ") for error in failed)
        dearest = max(map(cost_of, records))
        left = funds_of(service)
        # A line fails if what is left does not pay for its input, which is estimated at 50 tokens at most.
        assert -dearest < left < 50 * 550
        assert left == 5_000_000 - sum(map(cost_of, records))
        assert mock.stats()["requests"] == len(records) - len(failed)
        print(
            f"{len(failed)} of {len(records)} lines found no money; overdraft {-left}, a line costs {dearest} at most"
        )

        service.command("orgs", "set-balance", "default", "0", "--credits", "0")
        with pytest.raises(openai.RateLimitError) as refused:
            client.files.create(file=lines, purpose="batch")
        assert refused.value.code == "insufficient_quota"
        assert refused.value.response.headers["x-should-retry"] == "false"
        service.command("orgs", "set-balance", "default", "1")
        assert counts_of(await_end(client, submit(client, chat_lines(["good again"])).id)) == (1, 1, 0)

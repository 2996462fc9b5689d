"""Takes backups of a service under load, and checks what must be true wherever one of them is restored."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from openai import OpenAI

from tests.support.restore_targets import back_up
from tests.support.service import (
    CHAT,
    PATIENCE,
    Account,
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_service,
    submit,
    wait_until,
)

_SETTINGS = """
metering = true

[models.m]
input_price = 1.1
output_price = 0.7
"""
_LONG = ("[[delay=0.1]]", 500)
_WIDE = ("[[delay=0.1 huge=20000]]", 400)
"""Prompts and numbers of lines: of a batch that takes long, per backup; and of one whose answers are large enough to be
objects."""
_SMALL, _OPEN = 5, 4


class Load:
    """Creates small batches and files, a few at a time, and deletes their inputs, until it is stopped."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self.lines: dict[str, bytes] = {}
        self.ended = 0
        self._over = Event()
        self._trouble: list[Exception] = []
        self._thread = Thread(target=self._keep_on, daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._trouble, self._trouble

    def _keep_on(self) -> None:
        try:
            while not self._over.is_set():
                self._come_and_go()
        except Exception as trouble:  # noqa: BLE001 - __exit__ reports it
            self._trouble.append(trouble)

    def _come_and_go(self) -> None:
        """B9: delete the input while its batch runs."""
        lines = chat_lines(f"{len(self.lines)} {n} {'word ' * 2000}" for n in range(_SMALL))
        uploaded = self._client.files.create(file=lines, purpose="batch")
        batch = self._client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")
        self.lines[batch.id] = lines
        self._client.files.delete(uploaded.id)
        if len(self.lines) > _OPEN:
            await_end(self._client, list(self.lines)[-_OPEN])
            self.ended += 1


@dataclass
class Original:
    """What a killed service leaves: its accounts, settings, inputs and backups."""

    accounts: list[Account]
    config: Path
    lines: Mapping[str, bytes]
    archives: list[Path]

    @contextmanager
    def served(self, data_dir: Path, upstream_url: str, **settings: object) -> Iterator[Service]:
        """Run the service with the same settings on restored data."""
        service = Service(
            data_dir,
            ("-m", "batchline", "serve"),
            settings | {"config": self.config, "upstream_url": upstream_url},
            account=self.accounts[0],
        )
        try:
            service.start()
            service.await_ready()
            yield service
        finally:
            service.end()


def backed_up_and_killed(folder: Path, upstream_url: str, *, backups: int) -> Original:
    """Take each backup in the middle of a long batch, after some other batches have finished; kill the service."""
    config = folder / "batchline.toml"
    config.write_text(_SETTINGS)
    archives = [folder / f"{number}.tar" for number in range(backups)]
    with running_service(folder, upstream_url, config=config, max_concurrency=32) as service:
        client, brief = service.client(), service.new_account("brief")
        long = chat_lines(f"{_LONG[0]} {n}" for n in range(_LONG[1] * backups))
        wide = chat_lines(f"{_WIDE[0]} {n}" for n in range(_WIDE[1]))
        batch, other = submit(client, long), submit(client, wide)
        with Load(service.client(brief)) as load:
            for archive in archives:
                _wait_for_more(load, client, batch.id)
                back_up(service.data_dir, archive)
            assert _done(client, batch.id) < _LONG[1] * backups
        service.kill()
        assert "storage unavailable" not in service.log
    return Original([service.account, brief], config, {batch.id: long, other.id: wide} | load.lines, archives)


def _wait_for_more(load: Load, client: OpenAI, batch_id: str) -> None:
    ended, done = load.ended, _done(client, batch_id)
    wait_until(lambda: load.ended > ended and _done(client, batch_id) > done, what="more of everything")


def _done(client: OpenAI, batch_id: str) -> int:
    return sum(counts_of(client.batches.retrieve(batch_id))[1:])


def assert_all_ends_well(service: Service, original: Original) -> None:
    """C12, D4, F3: check keys, batches and costs after a restore.

    Keys open their projects; every batch ends with every line in one of its files, once; and the cost that was booked
    is that of the lines in the files.
    """
    records = [
        record
        for account in original.accounts
        for batch_id in _batches(service.client(account))
        for record in _results(service.client(account), batch_id, original.lines[batch_id])
    ]
    assert len(records) > _LONG[1] * len(original.archives) + _WIDE[1]
    [organization] = json.loads(service.command("orgs", "list", "--json"))
    booked = sum(row["cost_nano"] for row in json.loads(service.command("usage", "--by", "batch", "--json")))
    assert booked == sum(map(_cost, records))
    assert organization["balance_nano"] + organization["credits_nano"] + booked == 5_000_000_000


def _batches(client: OpenAI) -> list[str]:
    return [batch.id for batch in client.batches.list(limit=100)]


def _results(client: OpenAI, batch_id: str, lines: bytes) -> list[Any]:
    ended = await_end(client, batch_id)
    if ended.status == "failed":
        assert ended.errors is not None
        assert ended.errors.data is not None
        [error] = ended.errors.data
        assert error.message == "Validation was interrupted; create the batch again"
        return []
    assert ended.status == "completed"
    return list(results_of(client, ended, lines).values())


def _cost(record: Any) -> int:
    usage = record["response"]["body"]["usage"]
    return int((usage["prompt_tokens"] * 1_100_000_000 + usage["completion_tokens"] * 700_000_000) // 2_000_000)

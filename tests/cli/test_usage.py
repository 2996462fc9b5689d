"""`batchline usage`: what was used and what it cost, summed exactly, for people and for programs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchline.cli import main
from batchline.cli.store import now
from batchline.domain.records import Charge, Owner
from batchline.domain.usage import Usage
from tests.support.command_line import Shell, cells
from tests.support.run_process import Tenant
from tests.support.service import CHAT, await_end, chat_lines, running_mock, running_service, submit, wait_until

_HOUR = 3600
_DAY = 24 * _HOUR
_NOVEMBER = int(datetime(2026, 11, 1, tzinfo=UTC).timestamp())


class Books:
    """Two organizations with a project of the same name each, and what they used."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._owners = {org: self._new_owner(org) for org in ("acme", "globex")}

    def project_id(self, org: str) -> str:
        return self._owners[org].project_id

    def charge(self, org: str, model: str, *, at: int, cost: int = 1, tokens: int = 0) -> None:
        usage = Usage(input_tokens=tokens, cached_tokens=tokens // 2, output_tokens=tokens * 2, reasoning_tokens=tokens)
        charge = Charge(model=model, requests=1, usage=usage, cost=cost)
        self._shell.in_store(lambda store: store.charge(self._owners[org], charge, at=at))

    def _new_owner(self, org: str) -> Owner:
        made = self._shell.json("keys", "create", "--org", org, "--project", "search")
        return Owner(
            key_id=made["key_id"], project_id=made["project_id"], organization_id=made["organization_id"], funds=0
        )


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.fixture
def books(shell: Shell) -> Books:
    return Books(shell)


def _november(shell: Shell, *arguments: str) -> Any:
    return shell.json("usage", "--since", "2026-11-01", "--until", "2026-12-01", *arguments)


def _costs(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [(*(row[name] for name in names), row["cost_nano"]) for row in rows]


def test_a_row_has_every_number_and_the_cost_in_both_writings(shell: Shell, books: Books) -> None:
    """Integers in nano-units are for sums, the decimal text is for people; neither went through a float."""
    books.charge("acme", "small", at=_NOVEMBER, cost=123_456_789_000_000_000, tokens=100)
    books.charge("acme", "small", at=_NOVEMBER + _DAY, cost=1, tokens=10)
    assert _november(shell) == [
        {
            "organization": "acme",
            "project": "search",
            "project_id": books.project_id("acme"),
            "model": "small",
            "requests": 2,
            "input_tokens": 110,
            "cached_tokens": 55,
            "output_tokens": 220,
            "reasoning_tokens": 110,
            "cost_nano": 123_456_789_000_000_001,
            "cost": "123456789.000000001",
            "reused": 0,
            "saved_nano": 0,
            "saved": "0",
        }
    ]


def test_rows_are_by_project_and_model_and_a_name_is_no_project(shell: Shell, books: Books) -> None:
    """Projects of the same name in two organizations are two."""
    for org, model, cost in (("globex", "small", 4), ("acme", "small", 1), ("acme", "large", 2), ("acme", "small", 8)):
        books.charge(org, model, at=_NOVEMBER, cost=cost)
    assert _costs(_november(shell), "organization", "model") == [
        ("acme", "large", 2),
        ("acme", "small", 9),
        ("globex", "small", 4),
    ]


@pytest.mark.rule("F3", "Usage sums what was used, group by group.")
@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (["model"], [("large", 2), ("small", 5)]),
        (["project"], [("search", 3), ("search", 4)]),
        (["day"], [(_NOVEMBER, 3), (_NOVEMBER + _DAY, 4)]),
        (["hour"], [(_NOVEMBER, 1), (_NOVEMBER + 2 * _HOUR, 2), (_NOVEMBER + _DAY, 4)]),
        (["day", "model"], [(_NOVEMBER, "large", 2), (_NOVEMBER, "small", 1), (_NOVEMBER + _DAY, "small", 4)]),
        (["model", "model"], [("large", 2), ("small", 5)]),
    ],
)
def test_rows_are_by_whatever_was_asked(
    shell: Shell, books: Books, by: list[str], expected: list[tuple[Any, ...]]
) -> None:
    books.charge("acme", "small", at=_NOVEMBER + 1, cost=1)
    books.charge("acme", "large", at=_NOVEMBER + 2 * _HOUR + 1, cost=2)
    books.charge("globex", "small", at=_NOVEMBER + _DAY, cost=4)
    rows = _november(shell, *(part for name in by for part in ("--by", name)))
    assert _costs(rows, *dict.fromkeys(by)) == expected


def test_the_time_begins_with_since_and_ends_before_until(shell: Shell, books: Books) -> None:
    """So that months, and hours, laid end to end count everything once."""
    for hour, cost in ((-1, 1), (0, 2), (1, 4), (24, 8)):
        books.charge("acme", "small", at=_NOVEMBER + hour * _HOUR, cost=cost)

    def sum_of(since: str, until: str) -> int:
        rows = shell.json("usage", "--since", since, "--until", until)
        return sum(row["cost_nano"] for row in rows)

    assert sum_of("2026-11-01", "2026-11-02") == 2 + 4
    assert sum_of("2026-10-31", "2026-11-01") == 1
    assert sum_of("2026-11-01T01", "2026-11-01T02") == 4
    assert sum_of("2026-11-02T00", "2026-11-03") == 8


def test_this_month_is_meant_unless_told_otherwise(shell: Shell, books: Books) -> None:
    """The hour that is running counts too."""
    month = datetime.fromtimestamp(now(), UTC).replace(day=1, hour=0, minute=0, second=0)
    first = int(month.timestamp())
    books.charge("acme", "small", at=first - 1, cost=1)
    books.charge("acme", "small", at=first, cost=2)
    books.charge("acme", "small", at=now(), cost=4)
    assert _costs(shell.json("usage")) == [(6,)]


@pytest.mark.parametrize("until", ["2026-11-01", "2026-10-31"])
def test_a_time_that_ends_before_it_begins_is_refused(shell: Shell, until: str) -> None:
    code, message = shell.refusal("usage", "--since", "2026-11-01", "--until", until)
    assert code == 2
    assert "--until must be later than --since" in message


@pytest.mark.parametrize("wrong", [["--since", "yesterday"], ["--until", "2026-13-01"], ["--by", "week"]])
def test_a_wrong_option_is_a_usage_error(shell: Shell, wrong: list[str]) -> None:
    assert shell.refusal("usage", *wrong)[0] == 2


def test_one_project_is_asked_for_by_id_or_name(shell: Shell, books: Books) -> None:
    shell.json("keys", "create", "--org", "acme", "--project", "idle")
    books.charge("acme", "small", at=_NOVEMBER, cost=1)
    books.charge("globex", "small", at=_NOVEMBER, cost=2)
    assert _costs(_november(shell, "--project", books.project_id("globex"))) == [(2,)]
    assert _november(shell, "--project", "idle") == []
    code, message = shell.refusal("usage", "--project", "search")
    assert (code, message) == (
        1,
        "Error: Several projects are called 'search'. Use an id from: batchline projects list\n",
    )
    code, message = shell.refusal("usage", "--project", "nope")
    assert (code, message) == (1, "Error: There is no project 'nope'. List all with: batchline projects list\n")


def test_the_table_ends_with_the_total(shell: Shell, books: Books) -> None:
    books.charge("acme", "small", at=_NOVEMBER, cost=500_000_000, tokens=10)
    books.charge("globex", "large", at=_NOVEMBER + _HOUR, cost=1_500_000_001, tokens=1000)
    arguments = ("usage", "--since", "2026-11-01", "--until", "2026-12-01")
    assert cells(shell.text(*arguments)) == [
        ["organization", "project", "model", "requests", "input", "cached", "output", "cost"],
        ["acme", "search", "small", "1", "10", "5", "20", "0.5"],
        ["globex", "search", "large", "1", "1000", "500", "2000", "1.500000001"],
        ["total", "2", "1010", "505", "2020", "2.000000001"],
    ]
    assert [line[0] for line in cells(shell.text(*arguments, "--by", "day"))] == ["day", "2026-11-01", "total"]
    assert [line[0] for line in cells(shell.text(*arguments, "--by", "hour"))] == [
        "hour",
        "2026-11-01T00:00:00Z",
        "2026-11-01T01:00:00Z",
        "total",
    ]


def test_a_group_that_got_money_back_lowers_the_total(shell: Shell, books: Books) -> None:
    books.charge("acme", "small", at=_NOVEMBER, cost=-4, tokens=-40)
    books.charge("acme", "small", at=_NOVEMBER + _HOUR, cost=10, tokens=100)
    table = cells(shell.text("usage", "--since", "2026-11-01", "--until", "2026-12-01", "--by", "hour"))
    assert table[1:] == [
        ["2026-11-01T00:00:00Z", "1", "-40", "-20", "-80", "-0.000000004"],
        ["2026-11-01T01:00:00Z", "1", "100", "50", "200", "0.00000001"],
        ["total", "2", "60", "30", "120", "0.000000006"],
    ]


def test_numbers_stand_under_each_other(shell: Shell, books: Books) -> None:
    books.charge("acme", "small", at=_NOVEMBER, tokens=1)
    books.charge("acme", "large-and-long", at=_NOVEMBER, cost=12_345_678_901, tokens=100_000)
    lines = shell.text("usage", "--since", "2026-11-01", "--until", "2026-12-01").splitlines()
    assert len({len(line) for line in lines}) == 1


def test_nothing_used_is_a_total_of_nothing(shell: Shell) -> None:
    shell.json("keys", "create")
    assert shell.json("usage") == []
    assert cells(shell.text("usage"))[1:] == [["total", "0", "0", "0", "0", "0"]]


def test_a_models_name_cannot_steer_the_terminal_or_fill_it(shell: Shell, books: Books) -> None:
    """Where any model may be asked, its name is whatever a client sent."""
    books.charge("acme", "\x1b[2J\nred\u202e", at=_NOVEMBER)
    books.charge("acme", "x" * 5000, at=_NOVEMBER)
    text = shell.text("usage", "--since", "2026-11-01", "--until", "2026-12-01", "--by", "model")
    assert len(text.splitlines()) == 4
    assert "\\x1b[2J\\nred\\u202e" in text
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.rule("F2", "A service that is switched to metering gives them.")
def test_batches_and_synchronous_calls_of_a_service_are_told_apart(tmp_path: Path) -> None:
    """D4, E1: a batch's lines at half the price, a call at the whole of it, and the balance is what is left."""
    with running_mock() as mock:
        config = tmp_path / "batchline.toml"
        config.write_text(
            f'upstream_url = "{mock.url}"\nmetering = "on"\n[models.m]\ninput_price = 2000\noutput_price = 4000\n'
        )
        with running_service(tmp_path, mock.url, config=config) as service:
            shell = Shell(service.data_dir)
            batch = await_end(service.client(), submit(service.client(), chat_lines(["hello", "you"])).id)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
            answer = service.call("POST", CHAT, body=body, headers={"content-type": "application/json"})
            assert answer.status == 200
            wait_until(lambda: sum(row["requests"] for row in shell.json("usage")) == 3, what="the call is charged")
            call, lines = shell.json("usage", "--by", "batch")
            [org] = shell.json("orgs", "list")
    assert (call["batch_id"], call["requests"]) == (None, 1)
    assert (lines["batch_id"], lines["requests"]) == (batch.id, 2)
    used = answer.json["usage"]
    assert (call["input_tokens"], call["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    for row, percent in ((call, 100), (lines, 50)):
        assert row["input_tokens"] > 0
        assert row["cost_nano"] == (row["input_tokens"] * 2000 + row["output_tokens"] * 4000) * 1000 * percent // 100
    assert org["credits_nano"] == 5_000_000_000 - call["cost_nano"] - lines["cost_nano"]


@pytest.mark.rule("G9", "The command shows the usage of a project at a server.")
def test_a_server_tells_the_usage_of_the_keys_project(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    await_end(client, submit(client, chat_lines(f"question {n}" for n in range(5))).id)
    runner = CliRunner(env=tenant.environment())
    [row] = json.loads(runner.invoke(main, ["usage", "--json"]).stdout)
    assert (row["model"], row["requests"], row["reused"], row["cost"]) == ("m", 5, 0, "0")
    assert row["output_tokens"] > 0
    head, line, total = cells(runner.invoke(main, ["usage", "--by", "day", "--by", "model"]).stdout)
    assert head == ["day", "model", "requests", "input", "cached", "output", "cost"]
    assert (line[1:3], total[:2]) == (["m", "5"], ["total", "5"])
    by_hour = json.loads(runner.invoke(main, ["usage", "--by", "hour", "--json"]).stdout)
    assert sum(row["requests"] for row in by_hour) == 5


def test_what_a_server_does_not_know_is_refused(tenant: Tenant) -> None:
    runner = CliRunner(env=tenant.environment())
    for arguments in (["--by", "batch"], ["--project", "default"]):
        result = runner.invoke(main, ["usage", *arguments])
        assert result.exit_code == 2
        assert "a server tells only the usage of the key's own project" in " ".join(result.stderr.split())
    both = runner.invoke(main, ["usage", "--base-url", "http://127.0.0.1:1", "--data-dir", "x"])
    assert both.exit_code == 2


def test_a_folder_that_is_named_wins_over_a_server_of_the_environment(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    await_end(client, submit(client, chat_lines(["question"])).id)
    folder = ["--data-dir", str(tenant.service.data_dir), "--project", tenant.account["project_id"]]
    [row] = json.loads(CliRunner(env=tenant.environment()).invoke(main, ["usage", "--json", *folder]).stdout)
    assert (row["project_id"], row["requests"]) == (tenant.account["project_id"], 1)

"""F3, A3: what organizations may spend is listed and set from the command line, to the nano-unit."""

from pathlib import Path

import pytest

from batchline.domain.records import Charge
from batchline.domain.usage import Usage
from tests.support.command_line import Shell, cells
from tests.support.service import FORM, chat_line, running_mock, running_service, upload_form, wait_until


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


@pytest.mark.rule("F3", "set-balance sets what an organization has.")
@pytest.mark.rule("F3", "An organization is named by its id or name.")
@pytest.mark.parametrize("field", ["name", "organization_id"])
def test_a_balance_is_set_by_name_or_id_and_no_other_is_touched(shell: Shell, field: str) -> None:
    """F3: the new state is printed, and it is what the service reads (A3)."""
    made = shell.json("keys", "create", "--org", "acme")
    shell.json("keys", "create", "--org", "globex")
    org = {"name": "acme", "organization_id": made["organization_id"]}[field]
    changed = shell.json("orgs", "set-balance", org, "12.500000001")
    assert changed == {
        "name": "acme",
        "organization_id": made["organization_id"],
        "balance": "12.500000001",
        "balance_nano": 12_500_000_001,
        "credits": "0",
        "credits_nano": 0,
        "created_at": changed["created_at"],
    }
    listed = {row["name"]: row for row in shell.json("orgs", "list")}
    assert listed["acme"] == changed
    assert listed["globex"]["balance_nano"] == 0
    owner = shell.owner(made["api_key"], made["project_id"])
    assert owner is not None
    assert owner.funds == 12_500_000_001


@pytest.mark.rule("F3", "--credits sets the free credits.")
def test_credits_are_set_only_when_they_are_given(shell: Shell) -> None:
    shell.json("keys", "create", "--org", "acme")
    assert shell.json("orgs", "set-balance", "acme", "1", "--credits", "0.25")["credits_nano"] == 250_000_000
    changed = shell.json("orgs", "set-balance", "acme", "0")
    assert (changed["balance_nano"], changed["credits_nano"]) == (0, 250_000_000)
    assert shell.json("orgs", "set-balance", "acme", "0", "--credits", "0")["credits_nano"] == 0


def test_the_text_says_what_the_json_says(shell: Shell) -> None:
    made = shell.json("keys", "create", "--org", "acme")
    assert cells(shell.text("orgs", "set-balance", "acme", "20", "--credits", "1.5")) == [
        ["name", "acme"],
        ["organization_id", made["organization_id"]],
        ["balance", "20"],
        ["credits", "1.5"],
    ]
    head, line = cells(shell.text("orgs", "list"))
    shown = dict(zip(head, line, strict=True))
    assert (shown["name"], shown["balance"], shown["credits"]) == ("acme", "20", "1.5")
    assert shown["organization_id"] == made["organization_id"]


@pytest.mark.rule("F3", "What is no amount changes nothing.")
@pytest.mark.parametrize(
    "amount",
    ["-1", "-0.000000001", "0.0000000001", "1.00000000000000000000000000001", "1e10", "NaN", "inf", "five", ""],
)
@pytest.mark.parametrize("credits", [False, True])
def test_what_is_no_amount_changes_nothing_and_is_told(shell: Shell, amount: str, credits: bool) -> None:
    """D4: money is never rounded, and nobody starts in debt."""
    shell.json("keys", "create", "--org", "acme")
    before = shell.json("orgs", "set-balance", "acme", "3", "--credits", "2")
    code, message = shell.refusal("orgs", "set-balance", "acme", *(["7", "--credits", amount] if credits else [amount]))
    assert code == 2
    assert f"{amount!r} is not an amount from 0 to 999999999 with at most nine decimals" in " ".join(message.split())
    assert shell.json("orgs", "list") == [before]


def test_an_unknown_organization_is_told(shell: Shell) -> None:
    shell.json("keys", "create")
    code, message = shell.refusal("orgs", "set-balance", "nobody", "1")
    assert (code, message) == (1, "Error: There is no organization 'nobody'. List all with: batchline orgs list\n")


def test_a_misspelt_option_is_refused(shell: Shell) -> None:
    """Although what looks like an option may be a negative amount."""
    before = shell.json("keys", "create")["organization_id"]
    assert shell.refusal("orgs", "set-balance", before, "1", "--credit", "5")[0] == 2
    assert shell.json("orgs", "list")[0]["balance_nano"] == 0


@pytest.mark.rule("F3", "A balance takes effect on a running service.")
def test_a_balance_takes_effect_on_a_running_service(tmp_path: Path) -> None:
    """F3, A3: an organization with nothing left is refused, and let in once it was given something."""
    form = upload_form(chat_line("line-0", "hello"))
    with running_mock() as mock, running_service(tmp_path, mock.url, metering="on", free_credits="0") as service:
        shell = Shell(service.data_dir)
        refused = service.call("POST", "/v1/files", body=form, headers=FORM)
        assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
        shell.json("orgs", "set-balance", "default", "0.000000001")
        # The contract gives a running service 5 s to hear of it; never hearing is the failure, not the seconds.
        wait_until(
            lambda: service.call("POST", "/v1/files", body=form, headers=FORM).status == 200,
            what="the organization may spend",
        )
        shell.json("orgs", "set-balance", "default", "0")
        wait_until(
            lambda: service.call("POST", "/v1/files", body=form, headers=FORM).status == 429,
            what="the organization may not spend any more",
        )


def test_the_ledger_is_shown_and_sums_to_what_there_is(shell: Shell) -> None:
    """D4: what came in and what was used, each entry with its sign."""
    made = shell.json("keys", "create", "--org", "acme", "--project", "blue")
    shell.json("orgs", "set-balance", "acme", "2", "--credits", "1")
    owner = shell.owner(made["api_key"], made["project_id"])
    assert owner is not None
    used = Charge(model="m", requests=3, usage=Usage(input_tokens=5), cost=1_500_000_000)
    shell.in_store(lambda store: store.charge(owner, used, at=0))
    entries = shell.json("orgs", "ledger", "acme")
    assert [(entry["kind"], entry["project"], entry["model"], entry["requests"]) for entry in entries] == [
        ("usage", "blue", "m", 3),
        ("grant", None, "", 0),
    ]
    assert [(entry["balance"], entry["credits"]) for entry in entries] == [("-0.5", "-1"), ("2", "1")]
    (state,) = shell.json("orgs", "list")
    for money in ("balance_nano", "credits_nano"):
        assert sum(entry[money] for entry in entries) == state[money]
    assert [line[-2:] for line in cells(shell.text("orgs", "ledger", made["organization_id"]))] == [
        ["balance", "credits"],
        ["-0.5", "-1"],
        ["2", "1"],
    ]


@pytest.mark.rule("F3", "add-balance adds to what an organization has.")
def test_a_balance_is_added_to(shell: Shell) -> None:
    """F3: unlike set-balance, it cannot undo a charge that is made at the same time."""
    shell.json("keys", "create", "--org", "acme")
    shell.json("orgs", "set-balance", "acme", "1.5")
    changed = shell.json("orgs", "add-balance", "acme", "0.25", "--credits", "2")
    assert (changed["balance"], changed["credits"]) == ("1.75", "2")
    assert shell.json("orgs", "list") == [changed]
    assert shell.refusal("orgs", "add-balance", "acme", "-1")[0] == 2
    assert shell.refusal("orgs", "add-balance", "nobody", "1")[0] == 1

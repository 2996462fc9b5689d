"""``batchline orgs``: who pays, and what they have left. Works beside a running service."""

from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from batchline.cli.output import Row, json_flag, moment, show_fields, show_json, show_table
from batchline.cli.store import find_organization, in_store, now, store_options
from batchline.domain.money import nano, units
from batchline.domain.records import LedgerEntry, Organization
from batchline.ports import Store
from batchline.settings import Amount

_amount = TypeAdapter(Amount)


class _Amount(click.ParamType[int]):
    """Units as a person writes them, taken as nano-units."""

    name = "amount"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return nano(_amount.validate_python(value))
        except ValidationError:
            self.fail(f"{value!r} is not an amount from 0 to 999999999 with at most nine decimals", param, ctx)


@click.group()
def orgs() -> None:
    """List organizations, set what they may spend, and show what they spent.

    Organizations are made by: batchline keys create --org NAME
    """


@orgs.command("list")
@json_flag
@store_options
def list_organizations(as_json: bool, **flags: Any) -> None:
    """Show every organization with its balance and free credits."""
    found = in_store(flags, lambda store: store.organizations())
    if as_json:
        show_json([_row(organization) for organization in found])
        return
    show_table(
        ("name", "organization_id", "created_at", "balance", "credits"),
        [(org.name, org.id, moment(org.created_at), units(org.balance), units(org.credits)) for org in found],
        numbers=2,
    )


# A negative amount looks like an option, and shall be refused as an amount.
@orgs.command("set-balance", context_settings={"ignore_unknown_options": True})
@click.argument("org")
@click.argument("amount", type=_Amount())
@click.option("--credits", "free", type=_Amount(), metavar="N", help="Set the free credits too; they are spent first.")
@json_flag
@store_options
def set_balance(org: str, amount: int, free: int | None, as_json: bool, **flags: Any) -> None:
    """Set the balance of an organization, named by its id or name; a running service knows within 5 s.

    AMOUNT is in units, with at most nine decimals.
    """

    async def work(store: Store) -> Organization:
        found = await find_organization(store, org)
        await store.set_funds(found.id, balance=amount, credits=free, at=now())
        return await find_organization(store, found.id)

    state = in_store(flags, work)
    if as_json:
        show_json(_row(state))
        return
    show_fields(
        {
            "name": state.name,
            "organization_id": state.id,
            "balance": units(state.balance),
            "credits": units(state.credits),
        }
    )


@orgs.command()
@click.argument("org")
@json_flag
@store_options
def ledger(org: str, as_json: bool, **flags: Any) -> None:
    """Show every change of an organization's money, oldest first; they sum to what it has.

    What one key used of a model, in a batch or by synchronous calls, shares an entry an hour.
    """

    async def work(store: Store) -> list[LedgerEntry]:
        return await store.entries((await find_organization(store, org)).id)

    entries = in_store(flags, work)
    if as_json:
        show_json([_entry(entry) for entry in entries])
        return
    show_table(
        ("at", "kind", "project", "model", "batch", "requests", "balance", "credits"),
        [
            (
                *(moment(entry.at), entry.kind, entry.project or "-", entry.model or "-", entry.batch_id or "-"),
                *(str(entry.requests), units(entry.balance), units(entry.credits)),
            )
            for entry in entries
        ],
        numbers=3,
    )


def _entry(entry: LedgerEntry) -> Row:
    return {
        "at": entry.at,
        "kind": entry.kind,
        "project": entry.project,
        "model": entry.model,
        "batch_id": entry.batch_id,
        "requests": entry.requests,
        "balance": units(entry.balance),
        "balance_nano": entry.balance,
        "credits": units(entry.credits),
        "credits_nano": entry.credits,
    }


def _row(organization: Organization) -> Row:
    return {
        "name": organization.name,
        "organization_id": organization.id,
        "balance": units(organization.balance),
        "balance_nano": organization.balance,
        "credits": units(organization.credits),
        "credits_nano": organization.credits,
        "created_at": organization.created_at,
    }

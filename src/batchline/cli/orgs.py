"""``batchline orgs``: shows organizations and sets their balances. The service may run meanwhile."""

from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.output import Row, json_flag, moment, show_fields, show_json, show_table
from batchline.cli.store import Money, Name, find_organization, in_store, now, store_options
from batchline.cli.text import counted
from batchline.domain.money import units
from batchline.domain.records import LedgerEntry, Organization
from batchline.ports import Store


@click.group(short_help="List, rename and delete organizations, and set their balances.", cls=Group)
def orgs() -> None:
    """List, rename and delete organizations, set their balances, and show what they spent.

    To create an organization, run: batchline keys create --org NAME
    """


@orgs.command("list")
@json_flag
@store_options
def list_organizations(as_json: bool, **flags: Any) -> None:
    """List all organizations with their balances and free credits."""
    found = in_store(flags, lambda store: store.organizations())
    if as_json:
        show_json([_row(organization) for organization in found])
        return
    show_table(
        ("name", "organization_id", "created_at", "balance", "credits"),
        [(org.name, org.id, moment(org.created_at), units(org.balance), units(org.credits)) for org in found],
        numbers=2,
    )


@orgs.command()
@click.argument("org")
@click.argument("name", type=Name())
@json_flag
@store_options
def rename(org: str, name: str, as_json: bool, **flags: Any) -> None:
    """Give an organization another name. Its id stays. ORG is its id or name."""

    async def change(store: Store) -> Organization:
        found = await find_organization(store, org)
        if not await store.rename_organization(found.id, name=name):
            raise click.ClickException(f"Another organization is called {name!r}")
        return await find_organization(store, found.id)

    _show_state(in_store(flags, change), as_json=as_json)


@orgs.command()
@click.argument("org")
@json_flag
@store_options
def delete(org: str, as_json: bool, **flags: Any) -> None:
    """Delete an organization that has no project and no balance. ORG is its id or name.

    Free credits that are left are lost. Its ledger and its usage stay stored, and its name is free again.
    """

    async def change(store: Store) -> Organization:
        found = await find_organization(store, org)
        deletion = await store.delete_organization(found.id, at=now())
        if deletion.projects:
            raise click.ClickException(
                f"{found.name} has {counted(len(deletion.projects), 'project')}: {', '.join(deletion.projects)}. "
                "Delete every project first: batchline projects delete PROJECT"
            )
        if deletion.balance:
            raise click.ClickException(
                f"{found.name} has a balance of {units(deletion.balance)}. Pay it back or collect it, then run: "
                f"batchline orgs set-balance {found.id} 0"
            )
        return found

    deleted = in_store(flags, change)
    if as_json:
        show_json({"organization_id": deleted.id, "deleted": True})
    else:
        click.echo(f"{deleted.name} ({deleted.id}) is deleted")


# A negative amount looks like an option, but must be refused as an amount.
@orgs.command("set-balance", context_settings={"ignore_unknown_options": True})
@click.argument("org")
@click.argument("amount", type=Money())
@click.option("--credits", "free", type=Money(), metavar="N", help="Also set the free credits, which are spent first.")
@json_flag
@store_options
def set_balance(org: str, amount: int, free: int | None, as_json: bool, **flags: Any) -> None:
    """Set the balance of an organization. A running service uses it within 5 s.

    ORG is its id or name. AMOUNT is in units, with at most nine decimals.
    """

    async def change(store: Store) -> Organization:
        found = await find_organization(store, org)
        await store.set_funds(found.id, balance=amount, credits=free, at=now())
        return await find_organization(store, found.id)

    _show_state(in_store(flags, change), as_json=as_json)


# A negative amount looks like an option, but must be refused as an amount.
@orgs.command("add-balance", context_settings={"ignore_unknown_options": True})
@click.argument("org")
@click.argument("amount", type=Money())
@click.option("--credits", "free", type=Money(), metavar="N", default="0", help="Also add free credits.")
@json_flag
@store_options
def add_balance(org: str, amount: int, free: int, as_json: bool, **flags: Any) -> None:
    """Add to the balance of an organization, beside what is charged at the same time.

    ORG is its id or name. AMOUNT is in units, with at most nine decimals. A running service uses it within 5 s.
    """

    async def change(store: Store) -> Organization:
        found = await find_organization(store, org)
        changed = await store.grant(found.id, balance=amount, credits=free, at=now())
        return changed or await find_organization(store, found.id)

    _show_state(in_store(flags, change), as_json=as_json)


@orgs.command()
@click.argument("org")
@json_flag
@store_options
def ledger(org: str, as_json: bool, **flags: Any) -> None:
    """Show every change of an organization's balance and credits, oldest first. The changes add up to both.

    There is one entry per hour for what one key used of one model, in one batch or in synchronous calls.
    """

    async def read(store: Store) -> list[LedgerEntry]:
        return await store.entries((await find_organization(store, org)).id)

    entries = in_store(flags, read)
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


def _show_state(state: Organization, *, as_json: bool) -> None:
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

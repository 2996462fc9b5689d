"""Stores money: balances, credits and usage. Each change has its ledger entry in the same transaction."""

from collections.abc import Sequence

from msgspec import convert
from msgspec.structs import asdict

from batchline.domain.records import (
    Batch,
    Bill,
    Charge,
    LedgerEntry,
    Organization,
    Owner,
    ProjectUsage,
    UsageEntry,
    by_model,
)
from batchline.store.sql import Database, Script, change, change_many, one, rows

_HOUR_SECONDS = 3600


class SqlLedger:
    """The Ledger port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def start_metering(self, free_credits: int | None, *, at: int) -> None:
        def script() -> Script[None]:
            yield from change("set_free_credits", free_credits=free_credits)
            for organization in (yield from rows("unfunded_organizations")):
                yield from give_free_credits(organization["id"], at=at)

        await self._database.write(script)

    async def set_funds(
        self, organization_id: str, *, balance: int | None, credits: int | None, at: int
    ) -> Organization | None:
        def script() -> Script[Organization | None]:
            before = yield from one("lock_organization", organization_id=organization_id)
            if before is None or before["deleted_at"] is not None:
                return None
            yield from _grant(
                organization_id,
                balance=0 if balance is None else balance - before["balance"],
                credits=0 if credits is None else credits - before["credits"],
                at=at,
            )
            return convert(dict((yield from one("organization", organization_id=organization_id)) or {}), Organization)

        return await self._database.write(script)

    async def grant(self, organization_id: str, *, balance: int, credits: int, at: int) -> Organization | None:
        def script() -> Script[Organization | None]:
            before = yield from one("lock_organization", organization_id=organization_id)
            if before is None or before["deleted_at"] is not None:
                return None
            yield from _grant(organization_id, balance=balance, credits=credits, at=at)
            return convert(dict((yield from one("organization", organization_id=organization_id)) or {}), Organization)

        return await self._database.write(script)

    async def charge(self, owner: Owner, charge: Charge, *, at: int) -> int:
        def script() -> Script[int]:
            return (
                yield from charge_account(
                    owner.organization_id, key_id=owner.key_id, batch_id="", charges=[charge], at=at
                )
            )

        return await self._database.write(script)

    async def cost_of_project(self, project_id: str, *, since: int) -> int:
        found = await self._database.read(lambda: rows("cost_of_project", project_id=project_id, since=since))
        cost: int = found[0]["cost"]
        return cost

    async def bills(self, batches: Sequence[Batch]) -> list[Bill]:
        def script() -> Script[list[Bill]]:
            bills = []
            for batch in batches:
                [row] = yield from rows("cost_of_batch", key_id=batch.key_id, batch_id=batch.id)
                bills.append(convert(dict(row), Bill))
            return bills

        return await self._database.read(script) if batches else []

    async def entries(self, organization_id: str) -> list[LedgerEntry]:
        found = await self._database.read(lambda: rows("entries", organization_id=organization_id))
        return [convert(dict(row), LedgerEntry) for row in found]

    async def organization(self, organization_id: str) -> Organization | None:
        row = await self._database.read(lambda: one("organization", organization_id=organization_id))
        return None if row is None else convert(dict(row), Organization)

    async def project_usage(
        self, project_id: str, *, model: str | None, since: int, until: int, bucket_seconds: int, limit: int
    ) -> list[ProjectUsage]:
        found = await self._database.read(
            lambda: rows(
                "project_usage",
                project_id=project_id,
                model=model,
                since=since,
                until=until,
                bucket_seconds=bucket_seconds,
                limit=limit,
            )
        )
        return [convert(dict(row), ProjectUsage) for row in found]

    async def usage(self, *, since: int, until: int, project_id: str | None = None) -> list[UsageEntry]:
        found = await self._database.read(lambda: rows("usage", since=since, until=until, project_id=project_id))
        return [convert(dict(row), UsageEntry) for row in found]


def give_free_credits(organization_id: str, *, at: int) -> Script[None]:
    """Grant a new organization the credits it starts with, if there is metering."""
    credits = (yield from rows("free_credits"))[0]["free_credits"]
    if credits is not None:
        yield from _grant(organization_id, balance=0, credits=credits, at=at)


def charge_account(
    organization_id: str, *, key_id: str, batch_id: str, charges: Sequence[Charge], at: int
) -> Script[int]:
    """Book usage, take its cost, credits first, and return the nano-units that are left.

    This must come last in a transaction: if money is taken, the organization is locked until the commit, and all other
    transactions that take money from it wait.
    """
    costs_money = any(charge.cost for charge in charges)
    row = (yield from rows("lock_organization" if costs_money else "organization", organization_id=organization_id))[0]
    balance, credits = row["balance"], row["credits"]
    entries = []
    for charge in by_model(charges):
        from_credits = min(charge.cost, max(credits, 0))
        credits, balance = credits - from_credits, balance - (charge.cost - from_credits)
        entries.append(
            {
                "organization_id": organization_id,
                "at": at - at % _HOUR_SECONDS,
                "balance": from_credits - charge.cost,
                "credits": -from_credits,
                "key_id": key_id,
                "batch_id": batch_id,
                "model": charge.model,
                "requests": charge.requests,
                "reused": charge.reused,
                "saved": charge.saved,
                **asdict(charge.usage),
            }
        )
    yield from change_many("book_usage", entries)
    if costs_money:
        yield from change(
            "add_funds",
            organization_id=organization_id,
            balance=balance - row["balance"],
            credits=credits - row["credits"],
        )
    funds: int = balance + credits
    return funds


def give_back(batch_id: str, charges: Sequence[Charge], *, at: int) -> Script[None]:
    """Book charges of a batch with the opposite sign, and give their cost back to where it was taken from.

    Paid money comes back before free credits do, but never more of it than the batch was charged.
    """
    if not charges:
        return
    account = (yield from rows("account_of_batch", batch_id=batch_id))[0]
    yield from rows("lock_organization", organization_id=account["organization_id"])
    for charge in by_model(charges):
        names = {"key_id": account["key_id"], "batch_id": batch_id, "model": charge.model}
        paid = (yield from rows("charged", **names))[0]["balance"]
        balance = min(charge.cost, max(paid, 0))
        booked = {"balance": balance, "credits": charge.cost - balance}
        usage = {name: -tokens for name, tokens in asdict(charge.usage).items()}
        entry = {
            "organization_id": account["organization_id"],
            "at": at - at % _HOUR_SECONDS,
            **names,
            **booked,
            **usage,
        }
        yield from change_many(
            "book_usage", [{**entry, "requests": -charge.requests, "reused": -charge.reused, "saved": -charge.saved}]
        )
        yield from change("add_funds", organization_id=account["organization_id"], **booked)


def _grant(organization_id: str, *, balance: int, credits: int, at: int) -> Script[None]:
    yield from change("add_funds", organization_id=organization_id, balance=balance, credits=credits)
    yield from change("book_grant", organization_id=organization_id, at=at, balance=balance, credits=credits)

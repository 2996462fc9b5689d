"""Implements the Store port on any database that runs scripts."""

from batchline.domain.records import SchemaVersions
from batchline.store.accounts import SqlAccounts
from batchline.store.batches import SqlBatches
from batchline.store.files import SqlFiles
from batchline.store.fleet import SqlFleet
from batchline.store.identity import SqlIdentity
from batchline.store.inspection import SqlInspection
from batchline.store.ledger import SqlLedger
from batchline.store.results import SqlResults
from batchline.store.reuse import SqlReuse
from batchline.store.sessions import SqlSessions
from batchline.store.shards import SqlShards
from batchline.store.sightings import SqlSightings
from batchline.store.sql import Database, Script, change, one
from batchline.store.webhooks import SqlWebhooks


class SqlStore(
    SqlAccounts,
    SqlSessions,
    SqlLedger,
    SqlFiles,
    SqlBatches,
    SqlShards,
    SqlResults,
    SqlReuse,
    SqlFleet,
    SqlIdentity,
    SqlSightings,
    SqlInspection,
    SqlWebhooks,
):
    """The whole store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check(self) -> None:
        """Commit a small write. Raise StoreDown."""
        await self._database.write(lambda: change("probe"))

    async def schema_versions(self) -> SchemaVersions:
        """Return the version of the database's tables, and the version that this program expects. Raise StoreDown."""

        def script() -> Script[int]:
            row = yield from one("schema_version")
            return 0 if row is None else row["version"]

        return SchemaVersions(database=await self._database.read(script), program=self._database.schema_version)

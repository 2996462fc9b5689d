"""Checks that the database and the objects belong together, and makes them do so at the first start.

Nothing is remembered between two checks: the folder or the bucket can be exchanged while the service runs.
"""

import logging
from collections.abc import Sequence

from batchline.domain.errors import WrongIdentity
from batchline.domain.identity import ID_BYTES, MARKER_FOLDER, MARKER_TEXT, UNFINISHED_RESTORE_FOLDER, Identity
from batchline.ports import Objects, Random, Store

OBJECT_FOLDERS = ("uploads", "work", "segments", "results")
"""The first components of the keys of all objects that rows refer to."""

_REMEDY = (
    "Check BATCHLINE_DATA_DIR, BATCHLINE_DATABASE_URL and BATCHLINE_STORAGE_URL. If the database or the objects were "
    "moved away or replaced, put them back. If you are sure that both belong together, run `batchline adopt` with the "
    "same settings. Nothing was changed."
)

log = logging.getLogger(__name__)


class IdentityCheck:
    """The check of one database and its objects; ``database`` and ``place`` name them in messages."""

    def __init__(self, *, store: Store, objects: Objects, random: Random, database: str, place: str) -> None:
        self._store, self._objects, self._random = store, objects, random
        self._database, self._place = database, place

    async def check(self) -> None:
        """Raise WrongIdentity unless the objects carry the marker of this database and of no other one."""
        identity = await self._store.identity()
        self._require_marked(identity, await self._markers())

    async def claim(self) -> None:
        """Check the identity at the start of a process, and write it if neither side has one. Raise WrongIdentity.

        Any number of processes may do so at once: one identity remains.
        """
        identity = await self._store.name_database(self._new_id())
        if identity.objects_id is None:
            await self._claim_unbound(identity)
        else:
            self._require_marked(identity, await self._markers())
        # Only a restore that was complete has left an identity, so the service may start to use what it restored.
        await self._objects.delete_all(UNFINISHED_RESTORE_FOLDER)

    async def _claim_unbound(self, identity: Identity) -> None:
        """Write the identity, unless another process of this database does it meanwhile. Raise WrongIdentity."""
        try:
            self._refuse_foreign(identity, await self._markers())
            await self._require_fit()
        except WrongIdentity:
            # A faster process may have bound the objects and written some between the reads above.
            bound = await self._store.identity()
            if bound.objects_id is None:
                raise
            self._require_marked(bound, await self._markers())
        else:
            await self._bind(identity)

    async def adopt(self) -> None:
        """Give the database and the objects a new identity, whatever they had before."""
        database_id, objects_id = self._new_id(), self._new_id()
        former = await self._markers()
        await self._objects.put(Identity(database_id=database_id, objects_id=objects_id).marker_key, MARKER_TEXT)
        await self._store.renew_identity(database_id=database_id, objects_id=objects_id)
        for marker in former:
            await self._objects.delete(f"{MARKER_FOLDER}/{marker}")
        await self._objects.delete_all(UNFINISHED_RESTORE_FOLDER)

    async def _markers(self) -> list[str]:
        return await self._objects.names(MARKER_FOLDER)

    def _require_marked(self, identity: Identity, markers: list[str]) -> None:
        self._refuse_foreign(identity, markers)
        if not identity.is_marked(markers):
            raise WrongIdentity(
                f"{self._database} keeps its objects elsewhere: {self._place} has no marker {identity.marker_key}. "
                f"{_REMEDY}"
            )

    def _refuse_foreign(self, identity: Identity, markers: list[str]) -> None:
        if foreign := identity.foreign(markers):
            raise WrongIdentity(
                f"{self._place} belongs to another database, with the id {foreign[0]}. {self._database} has the id "
                f"{identity.database_id}. {_REMEDY}"
            )

    async def _require_fit(self) -> None:
        """Raise WrongIdentity unless a database and objects that have no identity yet fit together.

        They fit if both are empty, or if the database knows at least one of the objects.
        """
        if await self._objects.names(UNFINISHED_RESTORE_FOLDER):
            raise WrongIdentity(
                f"A restore into {self._database} and {self._place} is not complete. Run the same `batchline restore` "
                "again."
            )
        sample = await _sample(self._objects)
        if not sample and await self._store.needs_objects():
            raise WrongIdentity(f"{self._database} has files or batches, but {self._place} is empty. {_REMEDY}")
        if sample and not await self._knows_one(sample):
            raise WrongIdentity(f"{self._place} holds objects, but {self._database} knows none of them. {_REMEDY}")

    async def _knows_one(self, keys: Sequence[str]) -> bool:
        batch_ids = {key.split("/")[1] for key in keys if not key.startswith("uploads/")}
        return bool(await self._store.known_keys(keys) or await self._store.known_batches(sorted(batch_ids)))

    async def _bind(self, identity: Identity) -> None:
        """Write the marker first and then the row, which only one of several processes can write.

        Two databases that claim the same objects at once both write a marker before they look for others, so at least
        one of them finds that of the other and withdraws its own.
        """
        objects_id = self._new_id()
        own = Identity(database_id=identity.database_id, objects_id=objects_id)
        await self._objects.put(own.marker_key, MARKER_TEXT)
        try:
            self._refuse_foreign(own, await self._markers())
            bound = await self._store.bind_objects(objects_id)
            if bound != own:
                self._require_marked(bound, await self._markers())
        except WrongIdentity:
            await self._objects.delete(own.marker_key)
            raise
        if bound == own:
            log.info("wrote the identity of the database and its objects", extra={"identity": own.marker})
        else:
            await self._objects.delete(own.marker_key)

    def _new_id(self) -> str:
        return self._random.bytes(ID_BYTES).hex()


async def refuse_lost_database(objects: Objects, *, database: str, place: str) -> None:
    """Raise WrongIdentity if there are objects; call it if there is no database."""
    if await objects.names(MARKER_FOLDER) or await _sample(objects):
        raise WrongIdentity(f"{database} does not exist, but {place} holds the objects of one. {_REMEDY}")


async def _sample(objects: Objects) -> list[str]:
    """Return the first keys of every folder."""
    return [key for folder in OBJECT_FOLDERS for key in await _first_page(objects, folder)]


async def _first_page(objects: Objects, folder: str) -> list[str]:
    async for page in objects.keys(folder):
        if page:
            return page
    return []

"""Stores which objects without a row the sweeps of all processes have seen, and since when."""

from collections.abc import Sequence

from batchline.ports import Sighted
from batchline.store.sql import Database, Script, change, change_many, rows, rows_of_many


class SqlSightings:
    """The Sightings port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def sight(self, object_keys: Sequence[str], *, age: int, limit: int) -> Sighted:
        def script() -> Script[Sighted]:
            wanted = [{"object_key": key, "age": age} for key in sorted(object_keys)]
            repeated = yield from rows_of_many("repeat_sighting", wanted)
            known = {row["object_key"] for row in repeated}
            new = [params for params in wanted if params["object_key"] not in known]
            space = max(0, limit - (yield from rows("count_sightings"))[0]["count"])
            inserted = yield from rows_of_many("insert_sighting", new[:space])
            return Sighted(
                first=len(inserted),
                due=sorted(row["object_key"] for row in repeated if row["due"]),
                ignored=len(new[space:]),
            )

        return await self._database.write(script)

    async def forget(self, object_keys: Sequence[str]) -> None:
        many = [{"object_key": key} for key in sorted(object_keys)]
        await self._database.write(lambda: change_many("delete_sighting", many))

    async def forget_unseen(self, *, age: int) -> None:
        await self._database.write(lambda: change("delete_old_sightings", age=age))

"""Defines how a database and its objects recognize each other.

The database holds two random ids, its own and that of its objects. The objects carry the same pair in the key of a
*marker*, an object below ``identity/``. Two databases have different first ids, and two folders or buckets have
different second ids, so neither can take the place of the other unnoticed.
"""

from msgspec import Struct

MARKER_FOLDER = "identity"
MARKER_TEXT = (
    b"The name of this object says which database of batchline the objects beside it belong to.\n"
    b"Do not delete it: the service refuses to start without it.\n"
)
UNFINISHED_RESTORE_FOLDER = "restore"
"""An object below this prefix says that a restore was begun and may not be complete."""

ID_BYTES = 16


class Identity(Struct, frozen=True, kw_only=True):
    """The ids of a database and of its objects. Both are None before the first start."""

    database_id: str | None
    objects_id: str | None

    @property
    def marker(self) -> str:
        """The name of the marker."""
        return f"{self.database_id}-{self.objects_id}"

    @property
    def marker_key(self) -> str:
        """The key of the marker."""
        return f"{MARKER_FOLDER}/{self.marker}"

    def is_marked(self, markers: list[str]) -> bool:
        """Return whether objects with these markers belong to this database, and to no other one."""
        return self.objects_id is not None and self.marker in markers and not self.foreign(markers)

    def foreign(self, markers: list[str]) -> list[str]:
        """Return the ids of other databases among the markers."""
        return sorted({name for marker in markers if (name := marker.partition("-")[0]) != self.database_id})

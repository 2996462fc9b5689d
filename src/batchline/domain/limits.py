"""Bounds on what clients can send. The defaults are those of the contract; every one is a setting."""

from collections.abc import Iterable

from msgspec import Struct

from batchline.domain.endpoints import CHAT
from batchline.domain.request_rules import RequestRules

MAX_FAULTS = 100
"""Invalid lines listed for one input file, so that a client can fix them all at once."""

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_URL_BYTES = 8 * 1024
"""Each header and each parameter of a query costs microseconds: 64 KiB of them would block the event loop for 50 ms."""
MAX_QUERY_PARAMETERS = 256
"""A URL of 8 KiB could have 4,000 of them, which take 7 ms."""
MAX_CONTENT_TYPE_BYTES = 1024
"""A boundary has at most 70 characters. 60 KiB of parameters would take 100 ms."""
MAX_METADATA_BYTES = 64 * 1024
MAX_ENDPOINT_CHARACTERS = 1024
MAX_IDEMPOTENCY_KEY_CHARACTERS = 255
MAX_JSON_BODY_BYTES = 1024 * 1024
MIN_LIFETIME_SECONDS, MAX_LIFETIME_SECONDS = 3600, 2_592_000
"""The shortest and the longest lifetime that a client can set for a file."""
QUOTED_CHARACTERS = 200
"""The most characters of a client's own text that an error message repeats."""

STRIKES = 3
"""The number of workers that may die while they run a line before the line fails."""


def runs_alone(strikes: int) -> bool:
    """Return whether a shard must run with nothing beside it, so that the next death is certainly its own.

    A single death may have any cause, and running shards alone after it would delay whole batches of slow lines.
    """
    return strikes >= STRIKES - 1


class InputLimits(Struct, frozen=True, kw_only=True):
    """Bounds on the input file of a batch, and the endpoints that its lines may name."""

    max_bytes: int = 209_715_200
    max_lines: int = 50_000
    max_line_bytes: int = 1_048_576
    endpoints: tuple[str, ...] = (CHAT,)
    models: frozenset[str] = frozenset()
    """The ids of the configured models, whose lines always get shards of their own."""
    others_share: bool = False
    """Whether the lines of all other models share shards, and not only those of models that are too many."""
    rules: RequestRules | None = None
    """The rules for the fields of bodies; None if these were checked before."""

    @classmethod
    def to_repeat(cls, *, size: int, lines: int, endpoint: str, own_shards: Iterable[str]) -> "InputLimits":
        """Return the limits to read a valid input file once more, which has so many bytes and lines.

        They do not depend on the settings, which may have changed meanwhile. The models that have shards of their own
        are given.
        """
        return cls(
            max_bytes=size,
            max_lines=lines,
            max_line_bytes=size,
            endpoints=(endpoint,),
            models=frozenset(own_shards),
            others_share=True,
        )


class StorageLimits(Struct, frozen=True, kw_only=True):
    """Bounds on the bytes of all files of a project and of an organization; None if there is none."""

    project: int | None = None
    """The limit of every project that has none of its own."""
    organization: int | None = None
    """The limit of every organization that has none of its own."""
    projects: dict[str, int | None] = {}
    """The limits of single projects, by id."""
    organizations: dict[str, int | None] = {}
    """The limits of single organizations, by id."""

    def of_project(self, project_id: str) -> int | None:
        """Return the limit of a project."""
        return self.projects.get(project_id) or self.project

    def of_organization(self, organization_id: str) -> int | None:
        """Return the limit of an organization."""
        return self.organizations.get(organization_id) or self.organization


class ShardLimits(Struct, frozen=True, kw_only=True):
    """The size of shards: small enough to spread over workers, large enough to be cheap to lease."""

    max_lines: int = 256
    max_bytes: int = 4 * 1024 * 1024
    min_lines: int = 8
    pieces: int = 64
    max_other_models: int = 64
    """The most models that are not configured and get shards of their own in one batch. A file can name as many models
    as it has lines; without a limit each of them would become a shard and a lane."""

    def lines_for(self, total: int) -> int:
        """Return the lines per shard for a batch; small batches get smaller shards."""
        return min(self.max_lines, max(self.min_lines, total // self.pieces))

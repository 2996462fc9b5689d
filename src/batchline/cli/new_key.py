"""Creates API keys: the secret, which is shown once, and the record that is stored."""

import uuid

from batchline.cli.store import now
from batchline.domain import ids
from batchline.domain.records import ALL_SCOPES
from batchline.ports import NewKey
from batchline.system import SystemRandom

_random = SystemRandom()


def new_secret() -> str:
    """Return a new random secret."""
    return ids.api_key(_random.bytes(24))


def hint(secret: str) -> str:
    """Return the part of a secret that is stored: enough to recognize the key, too little to guess it."""
    return f"{secret[:7]}...{secret[-4:]}"


def new_key(
    secret: str,
    *,
    project: str,
    organization: str,
    name: str = "",
    scopes: str = ALL_SCOPES,
    lifetime_seconds: int | None = None,
) -> NewKey:
    """Return the record of a new key, with ids for its project and organization in case they do not exist yet."""
    at = now()
    return NewKey(
        key_id="key_" + _random.bytes(12).hex(),
        digest=ids.key_digest(secret),
        hint=hint(secret),
        project=project,
        project_id=_new_uuid(),
        organization=organization,
        organization_id=_new_uuid(),
        at=at,
        name=name,
        scopes=scopes,
        expires_at=None if lifetime_seconds is None else at + lifetime_seconds,
    )


def _new_uuid() -> str:
    return str(uuid.UUID(bytes=_random.bytes(16), version=4))

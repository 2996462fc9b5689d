"""New keys: what is told once, and what is kept of it."""

import uuid

from batchline.cli.store import now
from batchline.domain import ids
from batchline.ports import NewKey
from batchline.system import SystemRandom

_random = SystemRandom()


def new_secret() -> str:
    return ids.api_key(_random.bytes(24))


def hint(secret: str) -> str:
    """Enough to tell keys apart, too little to guess one."""
    return f"{secret[:7]}...{secret[-4:]}"


def new_key(secret: str, *, project: str, organization: str) -> NewKey:
    return NewKey(
        key_id="key_" + _random.bytes(12).hex(),
        digest=ids.key_digest(secret),
        hint=hint(secret),
        project=project,
        project_id=_new_uuid(),
        organization=organization,
        organization_id=_new_uuid(),
        at=now(),
    )


def _new_uuid() -> str:
    return str(uuid.UUID(bytes=_random.bytes(16), version=4))

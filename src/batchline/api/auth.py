"""Authenticates requests by key and project, and checks whether the organization has funds."""

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import Request

from batchline.domain.errors import (
    InsufficientQuota,
    InvalidCredentials,
    MissingCredentials,
    MissingScope,
    StoreDown,
)
from batchline.domain.ids import key_digest
from batchline.domain.records import BATCH_SCOPE, INFERENCE_SCOPE, READ_SCOPE, Owner
from batchline.ports import Accounts, Clock

_KEY = "x-api-key"
_PROJECT = "x-project-id"
_READING = frozenset({"GET", "HEAD"})
_BATCH_PATHS = ("/v1/files", "/v1/batches", "/v1/usage")
_MODELS_PATH = "/v1/models"

_KEY_CHECK_SECONDS = 2.0
"""The time between two checks of the key of an open stream or download, which must end within 5 s of its key."""

_TRUSTED_SECONDS = 1.0
"""The time for which a request counts as authenticated. If its body arrives later, its key is looked up again."""

log = logging.getLogger(__name__)


class Auth:
    """Authenticates requests by the headers ``x-api-key`` and ``x-project-id``, or by a key as bearer token (A13)."""

    def __init__(self, *, accounts: Accounts, bearer: bool, metered: bool, on_key_used: Callable[[str], None]) -> None:
        self._accounts = accounts
        self._bearer = bearer
        self._metered = metered
        self._on_key_used = on_key_used

    async def owner(self, request: Request) -> Owner:
        """Return the owner of the request's key. Raise MissingCredentials, InvalidCredentials or MissingScope.

        Every invalid combination of the two headers costs the same, one hash and one lookup, and gets the same answer.
        A bearer token that is no valid key counts as no credentials.
        """
        owner = await self._find_owner(request)
        request.state.project_id = owner.project_id
        request.state.authenticated_at = asyncio.get_running_loop().time()
        self._on_key_used(owner.key_id)
        _check_scope(request, owner)
        return owner

    async def check_after_body(self, request: Request) -> None:
        """Check the key again if the body took long to arrive. Raise like ``owner``, which was called before it.

        Otherwise a client could use a key after its end by holding back the last byte of a request.
        """
        await self.owner_after_body(request)

    async def owner_after_body(self, request: Request) -> Owner | None:
        """Check like ``check_after_body``. Return the owner as it is now, or None if the body took not long."""
        if asyncio.get_running_loop().time() - request.state.authenticated_at < _TRUSTED_SECONDS:
            return None
        owner = await self._find_owner(request)
        _check_scope(request, owner)
        return owner

    async def wait_until_invalid(self, owner: Owner, *, clock: Clock) -> None:
        """Wait until the key is revoked or expires."""
        valid = True
        while valid:
            await clock.sleep(_KEY_CHECK_SECONDS)
            try:
                valid = await self._accounts.is_valid_key(owner.key_id)
            except StoreDown as error:
                log.warning("failed to check the key of an open answer, retrying", extra={"reason": str(error)})

    async def owner_with_funds(self, request: Request) -> Owner:
        """Return the owner if the organization has funds. Raise InsufficientQuota if not."""
        owner = await self.owner(request)
        if not self.has_funds(owner):
            raise InsufficientQuota
        return owner

    def has_funds(self, owner: Owner) -> bool:
        """Return whether the owner may spend; always True without metering."""
        return not self._metered or owner.funds > 0

    async def _find_owner(self, request: Request) -> Owner:
        key, project_id = self._credentials(request)
        owner = await self._accounts.owner_of(key_digest(key), project_id)
        if owner is None:
            raise MissingCredentials if project_id is None else InvalidCredentials
        return owner

    def _credentials(self, request: Request) -> tuple[str, str | None]:
        """Return the key and the project, or None for the key's own project if the key is the bearer token."""
        if not any(name in request.headers for name in (_KEY, _PROJECT)):
            if self._bearer and (token := _bearer_token(request)):
                return token, None
            raise MissingCredentials
        key, project_id = _header(request, _KEY), _header(request, _PROJECT).lower()
        if not key or not project_id:
            raise MissingCredentials
        return key, project_id


def _check_scope(request: Request, owner: Owner) -> None:
    """Raise MissingScope if the key may not be used for the request."""
    scope = _needed_scope(request)
    if scope is not None and not owner.may(scope):
        raise MissingScope(scope)


def _needed_scope(request: Request) -> str | None:
    """Return the scope that a request needs; None if every key may make it."""
    path = request.scope["path"]
    if path.startswith(_MODELS_PATH):
        return None
    if not path.startswith(_BATCH_PATHS):
        return INFERENCE_SCOPE
    return READ_SCOPE if request.method in _READING else BATCH_SCOPE


def _header(request: Request, name: str) -> str:
    """Return a header. One that was sent twice is joined by commas, as HTTP defines, and so matches no key."""
    return ", ".join(request.headers.getlist(name))


def _bearer_token(request: Request) -> str:
    scheme, _, token = _header(request, "authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

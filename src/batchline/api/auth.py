"""Authenticates requests by key and project, and checks whether the organization has funds."""

from collections.abc import Callable

from starlette.requests import Request

from batchline.domain.errors import InsufficientQuota, InvalidCredentials, MissingCredentials
from batchline.domain.ids import key_digest
from batchline.domain.records import Owner
from batchline.ports import Accounts


class Auth:
    """Authenticates requests by the headers ``x-api-key`` and ``x-project-id``, or by a bearer token if allowed."""

    def __init__(self, *, accounts: Accounts, bearer: bool, metered: bool, on_key_used: Callable[[str], None]) -> None:
        self._accounts = accounts
        self._bearer = bearer
        self._metered = metered
        self._on_key_used = on_key_used

    async def owner(self, request: Request) -> Owner:
        """Return the owner of the request's key. Raise MissingCredentials or InvalidCredentials.

        Every invalid combination costs the same, one hash and one lookup, and gets the same answer.
        """
        key, project_id = self._credentials(request)
        owner = await self._accounts.owner_of(key_digest(key), project_id)
        if owner is None:
            raise InvalidCredentials
        request.state.project_id = owner.project_id
        self._on_key_used(owner.key_id)
        return owner

    async def owner_with_funds(self, request: Request) -> Owner:
        """Return the owner if the organization has funds. Raise InsufficientQuota if not."""
        owner = await self.owner(request)
        if not self.has_funds(owner):
            raise InsufficientQuota
        return owner

    def has_funds(self, owner: Owner) -> bool:
        """Return whether the owner may spend; always True without metering."""
        return not self._metered or owner.funds > 0

    def _credentials(self, request: Request) -> tuple[str, str | None]:
        key, project_id = _header(request, "x-api-key"), _header(request, "x-project-id").lower()
        if self._bearer and not key and (token := _bearer_token(request)):
            return token, project_id or None
        if not key or not project_id:
            raise MissingCredentials
        return key, project_id


def _header(request: Request, name: str) -> str:
    """Return a header. One that was sent twice is joined by commas, as HTTP defines, and so matches no key."""
    return ", ".join(request.headers.getlist(name))


def _bearer_token(request: Request) -> str:
    scheme, _, token = _header(request, "authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

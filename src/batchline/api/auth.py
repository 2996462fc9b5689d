"""Who is asking: a key and its project, by two headers; and whether there is anything left to spend."""

from collections.abc import Callable

from starlette.requests import Request

from batchline.domain.errors import InsufficientQuota, InvalidCredentials, MissingCredentials
from batchline.domain.ids import key_digest
from batchline.domain.records import Owner
from batchline.ports import Accounts


class Auth:
    def __init__(self, *, accounts: Accounts, bearer: bool, metered: bool, used: Callable[[str], None]) -> None:
        self._accounts = accounts
        self._bearer = bearer
        self._metered = metered
        self._used = used

    async def owner(self, request: Request) -> Owner:
        """Raises MissingCredentials, or InvalidCredentials after one hash and one lookup, whatever is wrong."""
        key, project_id = self._credentials(request)
        owner = await self._accounts.owner_of(key_digest(key), project_id)
        if owner is None:
            raise InvalidCredentials
        request.state.project_id = owner.project_id
        self._used(owner.key_id)
        return owner

    async def spender(self, request: Request) -> Owner:
        """An owner who has something left to spend. Raises InsufficientQuota."""
        owner = await self.owner(request)
        if not self.has_funds(owner):
            raise InsufficientQuota
        return owner

    def has_funds(self, owner: Owner) -> bool:
        return not self._metered or owner.funds > 0

    def _credentials(self, request: Request) -> tuple[str, str | None]:
        key, project_id = _header(request, "x-api-key"), _header(request, "x-project-id").lower()
        if self._bearer and not key and (token := _bearer_token(request)):
            return token, project_id or None
        if not key or not project_id:
            raise MissingCredentials
        return key, project_id


def _header(request: Request, name: str) -> str:
    """A header sent twice is read as HTTP has it, joined by commas: then it is no key and no project."""
    return ", ".join(request.headers.getlist(name))


def _bearer_token(request: Request) -> str:
    scheme, _, token = _header(request, "authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""

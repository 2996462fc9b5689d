"""Who is asking: a key and its project, by two headers."""

from starlette.requests import Request

from batchline.domain.errors import InvalidCredentials, MissingCredentials
from batchline.domain.ids import key_digest
from batchline.domain.records import Owner
from batchline.ports import Accounts


class Auth:
    def __init__(self, *, accounts: Accounts) -> None:
        self._accounts = accounts

    async def owner(self, request: Request) -> Owner:
        """Raises MissingCredentials, or InvalidCredentials after one hash and one lookup, whatever is wrong."""
        key, project_id = _header(request, "x-api-key"), _header(request, "x-project-id")
        if not key or not project_id:
            raise MissingCredentials
        owner = await self._accounts.owner_of(key_digest(key), project_id.lower())
        if owner is None:
            raise InvalidCredentials
        request.state.project_id = owner.project_id
        return owner


def _header(request: Request, name: str) -> str:
    """A header sent twice is read as HTTP has it, joined by commas: then it is no key and no project."""
    return ", ".join(request.headers.getlist(name))

"""The routes of ``/v1/models``."""

import asyncio
import math

from msgspec import DecodeError, Struct
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.auth import Auth
from batchline.api.lists import Lists
from batchline.domain.chat import model_not_found
from batchline.domain.errors import BadGateway, GatewayTimeout, InvalidRequest, NotFound
from batchline.domain.models import Catalog
from batchline.domain.records import Owner
from batchline.domain.replies import Fault, FaultKind, Reply
from batchline.domain.wire import ModelList, ModelObject
from batchline.ports import Clock, SyncUpstream

Models = list[ModelObject]

_PATH = "/v1/models"
_OWNER = "batchline"
_NO_SUCH_ROUTE = frozenset({404, 405, 501})
_TIMEOUT_SECONDS = 10.0
"""The time for the list of the upstream. It is short, because all who ask for the list wait together."""
_LISTED_SECONDS, _NOT_LISTED_SECONDS = 5.0, 1.0
"""The time for which a list of the upstream is reused, or the error if it gave none. A client may ask 500 times a
second, and each request to the upstream takes a connection."""


class _UpstreamModel(Struct):
    """A model in the list of an upstream."""

    id: str
    created: int | None = None
    owned_by: str | None = None


class _UpstreamList(Struct):
    data: list[_UpstreamModel]


_upstream_list = Decoder(_UpstreamList)


class _Unlisted(Struct, frozen=True):
    """The reason why the upstream gave no list."""

    error: type[BadGateway | GatewayTimeout]
    message: str


class UpstreamModels:
    """The list of the default upstream, which gets every line if no models are configured.

    All who ask at once wait for the same request to the upstream.
    """

    def __init__(self, upstream: SyncUpstream | None, *, clock: Clock) -> None:
        self._upstream, self._clock = upstream, clock
        self._reading = asyncio.Lock()
        self._found: Models | _Unlisted = []
        self._due_at = -math.inf

    async def read(self) -> Models:
        """Return the models, read at most a few seconds ago. Raise BadGateway or GatewayTimeout."""
        async with self._reading:
            if self._upstream is not None and self._clock.steady() >= self._due_at:
                self._found = _models_of(await _ask(self._upstream))
                seconds = _NOT_LISTED_SECONDS if isinstance(self._found, _Unlisted) else _LISTED_SECONDS
                self._due_at = self._clock.steady() + seconds
            if isinstance(self._found, _Unlisted):
                raise self._found.error(self._found.message)
            return self._found


class ModelRoutes:
    """Lists the models that are configured, or those of the default upstream if none are."""

    def __init__(self, *, auth: Auth, lists: Lists, catalog: Catalog, upstream_models: UpstreamModels) -> None:
        self._auth, self._lists = auth, lists
        self._catalog, self._upstream_models = catalog, upstream_models

    async def list(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return self._lists.answer(owner, lambda: self._list(owner))

    async def retrieve(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return self._lists.answer(owner, lambda: self._find(request, owner))

    async def _list(self, owner: Owner) -> ModelList:
        return ModelList(object="list", data=await self._models(owner))

    async def _find(self, request: Request, owner: Owner) -> ModelObject:
        models = await self._models(owner)
        model_id: str = request.path_params["model"]
        if not model_id:
            raise InvalidRequest("A model id is required", param="model")
        for model in models:
            if model.id == model_id:
                return model
        raise NotFound(model_not_found(model_id).message, code="model_not_found", param="model")

    async def _models(self, owner: Owner) -> Models:
        if self._catalog.takes_any:
            return await self._upstream_models.read()
        return [_model(model.id) for model in self._catalog.enabled(owner.project_id)]


async def _ask(upstream: SyncUpstream) -> Reply:
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await upstream.get(_PATH)
    except TimeoutError:
        return Fault(kind=FaultKind.TIMEOUT, detail=f"no list of models within {_TIMEOUT_SECONDS:g} seconds")


def _models_of(reply: Reply) -> Models | _Unlisted:
    if isinstance(reply, Fault):
        return _gateway_error(reply)
    if reply.status in _NO_SUCH_ROUTE:
        return []
    if not 200 <= reply.status < 300:
        return _Unlisted(BadGateway, f"The upstream answered with status {reply.status} when asked for its models")
    try:
        models = _upstream_list.decode(reply.body).data
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return _Unlisted(BadGateway, "The upstream's list of models cannot be read")
    return [_model(model.id, created=model.created, owned_by=model.owned_by) for model in models]


def _model(model_id: str, *, created: int | None = None, owned_by: str | None = None) -> ModelObject:
    return ModelObject(id=model_id, object="model", created=created or 0, owned_by=owned_by or _OWNER)


def _gateway_error(fault: Fault) -> _Unlisted:
    if fault.kind is FaultKind.TIMEOUT:
        return _Unlisted(GatewayTimeout, "The upstream did not list its models in time")
    return _Unlisted(BadGateway, "The upstream cannot be reached to list its models")

"""The routes of ``/v1/models``."""

from collections.abc import Mapping

from msgspec import DecodeError, Struct
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from batchline.api.auth import Auth
from batchline.api.responses import json_response
from batchline.domain.chat import model_not_found
from batchline.domain.errors import BadGateway, GatewayTimeout, InvalidRequest, NotFound
from batchline.domain.models import DEFAULT_UPSTREAM, Catalog
from batchline.domain.replies import Fault, FaultKind
from batchline.domain.wire import ModelList, ModelObject
from batchline.ports import SyncUpstream

Models = list[ModelObject]

_PATH = "/v1/models"
_OWNER = "batchline"
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


class _UpstreamModel(Struct):
    """A model in the list of an upstream."""

    id: str
    created: int | None = None
    owned_by: str | None = None


class _UpstreamList(Struct):
    data: list[_UpstreamModel]


_upstream_list = Decoder(_UpstreamList)


class ModelRoutes:
    """Lists the models that are configured, or those of the default upstream if none are."""

    def __init__(self, *, auth: Auth, catalog: Catalog, upstreams: Mapping[str, SyncUpstream]) -> None:
        self._auth = auth
        self._catalog = catalog
        self._upstreams = upstreams

    async def list(self, request: Request) -> Response:
        return json_response(ModelList(object="list", data=await self._models(request)))

    async def retrieve(self, request: Request) -> Response:
        models = await self._models(request)
        model_id: str = request.path_params["model"]
        if not model_id:
            raise InvalidRequest("A model id is required", param="model")
        for model in models:
            if model.id == model_id:
                return json_response(model)
        raise NotFound(model_not_found(model_id).message, code="model_not_found", param="model")

    async def _models(self, request: Request) -> Models:
        owner = await self._auth.owner(request)
        if self._catalog.takes_any:
            return await self._upstream_models()
        return [_model(model.id) for model in self._catalog.enabled(owner.project_id)]

    async def _upstream_models(self) -> Models:
        """Return the list of the default upstream, which gets every line if no models are configured."""
        upstream = self._upstreams.get(DEFAULT_UPSTREAM)
        if upstream is None:
            return []
        reply = await upstream.get(_PATH)
        if isinstance(reply, Fault):
            raise _gateway_error(reply)
        if reply.status in _NO_SUCH_ROUTE:
            return []
        if not 200 <= reply.status < 300:
            raise BadGateway(f"The upstream answered with status {reply.status} when asked for its models")
        try:
            models = _upstream_list.decode(reply.body).data
        except (DecodeError, UnicodeDecodeError, RecursionError):
            raise BadGateway("The upstream's list of models cannot be read") from None
        return [_model(model.id, created=model.created, owned_by=model.owned_by) for model in models]


def _model(model_id: str, *, created: int | None = None, owned_by: str | None = None) -> ModelObject:
    return ModelObject(id=model_id, object="model", created=created or 0, owned_by=owned_by or _OWNER)


def _gateway_error(fault: Fault) -> BadGateway | GatewayTimeout:
    if fault.kind is FaultKind.TIMEOUT:
        return GatewayTimeout("The upstream did not list its models in time")
    return BadGateway("The upstream cannot be reached to list its models")

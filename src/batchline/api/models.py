"""``/v1/models``."""

from collections.abc import Mapping

from msgspec import DecodeError, Struct, to_builtins
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from batchline.api.auth import Auth
from batchline.api.responses import json_response
from batchline.domain.chat import no_such_model
from batchline.domain.errors import BadGateway, GatewayTimeout, InvalidRequest, NotFound
from batchline.domain.models import DEFAULT_UPSTREAM, Catalog
from batchline.domain.replies import Fault, FaultKind
from batchline.ports import SyncUpstream

_PATH = "/v1/models"
_OWNER = "batchline"
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model as the API shows it; 0 where nobody says when it was made."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = _OWNER


class _Told(Struct):
    id: str
    created: int | None = None
    owned_by: str | None = None


class _List(Struct):
    data: list[_Told]


_list = Decoder(_List)


class ModelRoutes:
    def __init__(self, *, auth: Auth, catalog: Catalog, upstreams: Mapping[str, SyncUpstream]) -> None:
        self._auth = auth
        self._catalog = catalog
        self._upstreams = upstreams

    async def list(self, request: Request) -> Response:
        models = await self._models(request)
        return json_response({"object": "list", "data": to_builtins(models)})

    async def retrieve(self, request: Request) -> Response:
        models = await self._models(request)
        model_id: str = request.path_params["model"]
        if not model_id:
            raise InvalidRequest("A model id is required", param="model")
        for model in models:
            if model.id == model_id:
                return json_response(model)
        raise NotFound(no_such_model(model_id).message, code="model_not_found", param="model")

    async def _models(self, request: Request) -> tuple[ListedModel, ...]:
        owner = await self._auth.owner(request)
        if self._catalog.takes_any:
            return await self._upstreams_own()
        return tuple(ListedModel(id=model.id) for model in self._catalog.enabled(owner.project_id))

    async def _upstreams_own(self) -> tuple[ListedModel, ...]:
        """Where any id goes to the default upstream, its list is the best there is."""
        upstream = self._upstreams.get(DEFAULT_UPSTREAM)
        if upstream is None:
            return ()
        reply = await upstream.get(_PATH)
        if isinstance(reply, Fault):
            raise _unknown(reply)
        if reply.status in _NO_SUCH_ROUTE:
            return ()
        if not 200 <= reply.status < 300:
            raise BadGateway(f"The upstream answered with status {reply.status} when asked for its models")
        try:
            told = _list.decode(reply.body).data
        except (DecodeError, UnicodeDecodeError, RecursionError):
            raise BadGateway("The upstream's list of models cannot be read") from None
        return tuple(
            ListedModel(id=model.id, created=model.created or 0, owned_by=model.owned_by or _OWNER) for model in told
        )


def _unknown(fault: Fault) -> BadGateway | GatewayTimeout:
    if fault.kind is FaultKind.TIMEOUT:
        return GatewayTimeout("The upstream did not tell its models in time")
    return BadGateway("The upstream cannot be asked for its models")

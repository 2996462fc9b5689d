"""The catalog of models: which upstreams serve each, under which name, at what price, and for which projects."""

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from msgspec import Struct

from batchline.domain.money import Price
from batchline.domain.records import Lane

DEFAULT_UPSTREAM = "default"
MAX_MODEL_CHARACTERS = 256
"""More characters than the id of any model has. Ids are stored with each charge, and label metrics."""
CLASSIFIER_UPSTREAM = "classifier"
"""The upstream that runs in this process."""


class ModelKind(StrEnum):
    CHAT = "chat"
    CLASSIFICATION = "classification"
    """A model whose answer is a JSON document, as a string."""


class Model(Struct, frozen=True, kw_only=True):
    """A model that requests may name."""

    id: str
    upstreams: tuple[str, ...] = (DEFAULT_UPSTREAM,)
    """The upstreams that serve the model; a line may go to any of them."""
    name: str
    """The name of the model at its upstreams."""
    kind: ModelKind = ModelKind.CHAT
    price: Price = Price()
    max_tokens: int | None = None
    """The most input tokens that are sent; None if the service does not count them."""
    error_on_max_token: bool = True
    projects: frozenset[str] | None = None
    """Ids of the projects that may use the model; None if all may."""
    paths: frozenset[str] = frozenset()
    """Routes whose requests go to this model if they name none."""

    def is_open_to(self, project_id: str) -> bool:
        """Return whether a project may use the model."""
        return self.projects is None or project_id in self.projects


@lru_cache(maxsize=16)
def _unlisted(model_id: str) -> Model:
    """Return a model that is not configured; cached, since nearly all lines of a batch name the same model."""
    return Model(id=model_id, name=model_id)


class Catalog:
    """The models that are configured. If none are, the default upstream takes every model id."""

    def __init__(self, models: Iterable[Model] = ()) -> None:
        self._models = {model.id: model for model in models}

    @property
    def takes_any(self) -> bool:
        """Whether every model id is accepted, because none are configured."""
        return not self._models

    def find(self, model_id: str, project_id: str) -> Model | None:
        """Return a model, or None if it does not exist or is not enabled for the project: both must look the same."""
        if self.takes_any:
            return _unlisted(model_id)
        model = self._models.get(model_id)
        return model if model is not None and model.is_open_to(project_id) else None

    def serving(self, path: str, project_id: str) -> Model | None:
        """Return the model that serves a route for requests that name no model."""
        return next((model for model in self.enabled(project_id) if path in model.paths), None)

    def enabled(self, project_id: str) -> list[Model]:
        """Return the models that a project may use."""
        return [model for model in self._models.values() if model.is_open_to(project_id)]

    def served(self) -> list[Model | None]:
        """Return every model that lines may be claimed for; None stands for every model."""
        return [None] if self.takes_any else list(self._models.values())

    def upstreams_of(self, model_id: str) -> tuple[str, ...]:
        """Return the upstreams that run, or refuse, the lines of a model."""
        model = self._models.get(model_id)
        return (DEFAULT_UPSTREAM,) if model is None else model.upstreams


def lanes_of(model: Model | None) -> list[Lane]:
    """Return the lanes of a model, without those of projects that may not use it.

    Lines of such projects are refused, even if the upstreams of the model are busy.
    """
    if model is None:
        return [Lane(model=None, project_id=None)]
    if model.projects is None:
        return [Lane(model=model.id, project_id=None)]
    return [Lane(model=model.id, project_id=project_id) for project_id in model.projects]

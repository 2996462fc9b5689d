"""The models that may be asked: where each is served, under which name, at what price, and for whom."""

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from msgspec import Struct

from batchline.domain.money import Price
from batchline.domain.records import Lane

DEFAULT_UPSTREAM = "default"
CLASSIFIER_UPSTREAM = "classifier"
"""The one that runs in this process."""


class ModelKind(StrEnum):
    CHAT = "chat"
    CLASSIFICATION = "classification"
    """Its answer is a JSON document, as a string."""


class Model(Struct, frozen=True, kw_only=True):
    id: str
    upstreams: tuple[str, ...] = (DEFAULT_UPSTREAM,)
    """Who serves it; any of them will do."""
    name: str
    """What its upstreams call it."""
    kind: ModelKind = ModelKind.CHAT
    price: Price = Price()
    max_tokens: int | None = None
    """Most tokens of input; None asks nobody."""
    error_on_max_token: bool = True
    projects: frozenset[str] | None = None
    """Ids of the projects that may use it; None for all."""
    paths: frozenset[str] = frozenset()
    """Routes it answers when a request names no model."""

    def is_open_to(self, project_id: str) -> bool:
        return self.projects is None or project_id in self.projects


@lru_cache(maxsize=16)
def _unlisted(model_id: str) -> Model:
    """Kept, since nearly all lines of a batch name the same."""
    return Model(id=model_id, name=model_id)


class Catalog:
    """The models that are configured; where none are, any id goes to the default upstream."""

    def __init__(self, models: Iterable[Model] = ()) -> None:
        self._models = {model.id: model for model in models}

    @property
    def takes_any(self) -> bool:
        return not self._models

    def find(self, model_id: str, project_id: str) -> Model | None:
        """None when there is no such model, or none for this project, which must look the same."""
        if self.takes_any:
            return _unlisted(model_id)
        model = self._models.get(model_id)
        return model if model is not None and model.is_open_to(project_id) else None

    def serving(self, path: str, project_id: str) -> Model | None:
        """The model that answers a route for requests that name none."""
        return next((model for model in self.enabled(project_id) if path in model.paths), None)

    def enabled(self, project_id: str) -> list[Model]:
        return [model for model in self._models.values() if model.is_open_to(project_id)]

    def served(self) -> list[Model | None]:
        """Every model that lines may be claimed for; None for whatever they name."""
        return [None] if self.takes_any else list(self._models.values())

    def upstreams_of(self, model_id: str) -> tuple[str, ...]:
        """Where lines of a model are run, or refused."""
        model = self._models.get(model_id)
        return (DEFAULT_UPSTREAM,) if model is None else model.upstreams


def lanes_of(model: Model | None) -> list[Lane]:
    """All lines of a model, but for those of projects that may not use it: they are refused, whoever is busy."""
    if model is None:
        return [Lane(model=None, project_id=None)]
    if model.projects is None:
        return [Lane(model=model.id, project_id=None)]
    return [Lane(model=model.id, project_id=project_id) for project_id in model.projects]

"""Describes a service to people and to commands: its version, its upstreams, and the settings that it runs with.

A service logs the description when it starts, and writes it into the lock file of its data folder. So `batchline run`
can tell who answers, and can refuse settings that the running service does not have.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct
from pydantic import SecretStr

from batchline import __version__
from batchline.domain.models import CLASSIFIER_UPSTREAM, DEFAULT_UPSTREAM
from batchline.settings import Settings

_NOT_COMPARED = frozenset({"config", "data_dir", "host", "port"})
"""Settings that say where a service is, not what it does."""
_DIGEST_BYTES = 12
_MAX_MODELS = 8
"""The most models of an upstream that are listed by name."""


class ServiceDescription(Struct, frozen=True, kw_only=True):
    """The description that a service gives of itself."""

    version: str
    answers: list[str]
    """One line of text for each upstream: its name, its URL and its models."""
    digests: dict[str, str]
    """The digest of the value of each setting. The values may be secrets."""


def describe(settings: Settings) -> ServiceDescription:
    """Return the description of a service with these settings."""
    return ServiceDescription(
        version=__version__,
        answers=list(_answers(settings)),
        digests={name: _digest(settings, name) for name in Settings.model_fields if name not in _NOT_COMPARED},
    )


def differing(settings: Settings, running: ServiceDescription | None) -> list[str]:
    """Return the names of the settings that were given here and that the running service does not have.

    Settings that were not given here do not differ, whatever the service has.
    """
    known = {} if running is None else running.digests
    given = [name for name in Settings.model_fields if name in settings.model_fields_set - _NOT_COMPARED]
    return [name for name in given if known.get(name) != _digest(settings, name)]


def _digest(settings: Settings, name: str) -> str:
    value = settings.model_dump(include={name})[name]
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _answers(settings: Settings) -> Iterable[str]:
    if settings.embeds_model:
        yield (
            "embedded model SmolLM2-135M: a toy, for trying (answers to "
            f"{', '.join(settings.embedded_names)}; name a model server with --upstream-url)"
        )
    for name, upstream in settings.all_upstreams.items():
        yield f"{name} {_without_credentials(upstream.url)} ({_models_of(settings, name)})"
    if settings.classifies:
        yield f"built-in classifier ({_models_of(settings, CLASSIFIER_UPSTREAM)})"


def _models_of(settings: Settings, upstream: str) -> str:
    models = [model_id for model_id, model in settings.models.items() if upstream in model.upstream]
    if not models:
        return "every model id" if upstream == DEFAULT_UPSTREAM and not settings.models else "no model"
    more = len(models) - _MAX_MODELS
    return ", ".join(models[:_MAX_MODELS]) + (f" and {more} more" if more > 0 else "")


def _without_credentials(url: str) -> str:
    """Return a URL without a user name, a password and a query, which may be secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

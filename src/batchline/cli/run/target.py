"""Where a run sends its batch: to a server, or to a service on a data folder of this machine."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import click

from batchline.cli.loading import RUN_VARIABLES, load_settings
from batchline.cli.options import flag, variable
from batchline.cli.run.credentials import Credentials, local_credentials
from batchline.cli.run.local_service import LocalService

BASE_URL, API_KEY, PROJECT_ID = RUN_VARIABLES


class Target(Protocol):
    """A target and the advice for the user when something goes wrong at it."""

    name: str
    """The name under which the journal stores it."""

    credentials: Credentials
    may_be_starting: bool
    """Whether a service that cannot be reached may still be starting."""

    if_unreachable: str
    if_denied: str
    if_interrupted: str

    def url(self) -> str:
        """Return the URL without ``/v1``. Start the service first if needed."""

    def closing_notice(self) -> str | None:
        """Return what to tell the user if ``close`` has to wait, else None."""

    def close(self) -> None:
        """Stop the service if this run started it."""


class ServerTarget:
    """A server that the user named."""

    may_be_starting = False
    if_unreachable = f"Is the server running, and is {BASE_URL} right? Unset it to run without a server"
    if_denied = f"Set {API_KEY} and {PROJECT_ID} to the values that `batchline keys create` printed on the server"
    if_interrupted = "The server continues with what was submitted. Run the same command again to resume."

    def __init__(self, base_url: str, credentials: Credentials) -> None:
        self.name, self.credentials = base_url, credentials

    def url(self) -> str:
        return self.name

    def closing_notice(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class LocalTarget:
    """A service on a data folder of this machine."""

    may_be_starting = True
    if_unreachable = "Run the same command again to resume"
    if_denied = "The key of the data folder was revoked. Run the same command again to get a new one"
    if_interrupted = "Run the same command again to resume."

    def __init__(self, name: str, credentials: Credentials, service: LocalService) -> None:
        self.name, self.credentials, self._service = name, credentials, service

    def url(self) -> str:
        return self._service.url()

    def closing_notice(self) -> str | None:
        if not self._service.is_own:
            return None
        return "Stopping; lines in flight may finish. Press Ctrl-C again to stop at once."

    def close(self) -> None:
        self._service.close()


def target_for(
    base_url: str | None, flags: Mapping[str, Any], *, pause: Callable[[float], None], on_wait: Callable[[str], None]
) -> Target:
    """Return the server if one is named, else the data folder of the settings."""
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if base_url is None:
        return _local_target(given, pause=pause, on_wait=on_wait)
    if given:
        raise click.UsageError(
            f"{', '.join(map(flag, given))}: this sets the service that a run without a server starts, but {BASE_URL} "
            "or --base-url names a server; remove one of them"
        )
    return ServerTarget(_root_url(base_url), _environment_credentials())


def _local_target(
    given: Mapping[str, str], *, pause: Callable[[float], None], on_wait: Callable[[str], None]
) -> LocalTarget:
    settings = load_settings(**given)
    credentials = local_credentials(settings)
    service = LocalService(settings.data_dir, environment=_environment_with(given), pause=pause, on_wait=on_wait)
    return LocalTarget(str(settings.data_dir.resolve()), credentials, service)


def _environment_with(given: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with the given settings, which as flags would show in the process list."""
    ours = {variable(name): value for name, value in given.items()}
    return {name: value for name, value in os.environ.items() if name.upper() not in ours} | ours


def _root_url(base_url: str) -> str:
    """Return a base URL without ``/v1``. Raise UsageError if it is not usable."""
    address = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not address.isascii() or not address.isprintable() or parts.query or parts.fragment:
        raise click.UsageError(f"{BASE_URL} or --base-url: expected a URL such as http://127.0.0.1:8000/v1")
    return address


def _environment_credentials() -> Credentials:
    key, project_id = (os.environ.get(name, "").strip() for name in (API_KEY, PROJECT_ID))
    for name, value in ((API_KEY, key), (PROJECT_ID, project_id)):
        if not value or not value.isascii() or not value.isprintable():
            raise WrongCredentials(f"{name} is {'not usable' if value else 'not set'}. {ServerTarget.if_denied}.")
    return Credentials(api_key=key, project_id=project_id)


class WrongCredentials(click.ClickException):
    """The credentials are missing, unusable or refused."""

    exit_code = 4

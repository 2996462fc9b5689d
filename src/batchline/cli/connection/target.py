"""Finds the target of a command's requests: a server, or a service on a data folder of this machine."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import urlsplit

import click

from batchline.cli.connection.credentials import Credentials, local_credentials
from batchline.cli.connection.local_service import LocalService, LockHolder, OnWait, url_of_another_folder
from batchline.cli.loading import BASE_URL_VARIABLES, KEY_VARIABLES, RUN_VARIABLES, load_settings, source_of
from batchline.cli.options import flag, variable
from batchline.cli.store import require_store
from batchline.client.client import is_batchline
from batchline.service_description import differing
from batchline.settings import Settings

BASE_URL, API_KEY, PROJECT_ID = RUN_VARIABLES
_BASE_URL_FLAG = "--base-url"
_PROBE_SECONDS = 5.0


class Target(Protocol):
    """A target and the advice for the user when something goes wrong at it."""

    name: str
    """The name under which the journal stores it."""

    speaker: str
    """The name of the service that refuses a request, for a message."""

    credentials: Credentials
    may_be_starting: bool
    """Whether a service that cannot be reached may still be starting."""

    if_unreachable: str
    if_denied: str
    if_key_unknown: str
    """The advice if the server does not know the key. It says then that none was sent."""
    if_interrupted: str

    def url(self) -> str:
        """Return the URL without ``/v1``. Start the service first if needed."""

    def introduction(self) -> list[str]:
        """Return lines that say who answers. ``url`` was called before."""

    def is_batchline(self) -> bool:
        """Return whether the server is batchline, and not another one with OpenAI's API."""

    def has_worker(self) -> bool:
        """Return whether a service that runs lines may be there."""

    def closing_notice(self) -> str | None:
        """Return what to tell the user if ``close`` has to wait, else None."""

    def close(self) -> None:
        """Stop the service if this command started it."""


class ServerTarget:
    """A server that the user named."""

    may_be_starting = False
    if_interrupted = "The server continues with what was submitted. Run the same command again to resume."

    def __init__(self, base_url: str, credentials: Credentials, *, named_by: str, key_from: str) -> None:
        """``named_by`` is the flag or the variable that names the server, ``key_from`` the variable with the key."""
        self.name, self.credentials = base_url, credentials
        self.speaker = base_url
        leave = "Leave it out" if named_by == _BASE_URL_FLAG else "Unset it"
        self.if_unreachable = f"Is the server running, and is {named_by} right? {leave} to run without a server"
        self.if_denied = _advice_on_key(key_from)
        self.if_key_unknown = f"The server refuses the key in {key_from} (wrong, expired or revoked)"

    def url(self) -> str:
        return self.name

    def introduction(self) -> list[str]:
        return [f"Server {self.name}"]

    def is_batchline(self) -> bool:
        return is_batchline(self.name, timeout=_PROBE_SECONDS)

    def has_worker(self) -> bool:
        return True

    def closing_notice(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class LocalTarget:
    """A service on a data folder of this machine."""

    may_be_starting = True
    if_unreachable = "Run the same command again to resume"
    if_denied = "The key of the data folder was revoked. Run the same command again to get a new one"
    if_key_unknown = "The service refuses the key of the data folder"
    if_interrupted = "Run the same command again to resume."

    def __init__(self, name: str, credentials: Credentials, service: LocalService) -> None:
        self.name, self.credentials, self._service = name, credentials, service
        self.speaker = f"The service on {name}"

    def url(self) -> str:
        return self._service.url()

    def introduction(self) -> list[str]:
        holder = self._service.holder
        if holder is None or holder.description is None:
            return [f"Data folder: {self.name}"]
        whose = "started for this command" if self._service.is_own else f"already running, pid {holder.pid}"
        return [
            f"batchline {holder.description.version} on {holder.url} ({whose})",
            f"Data folder: {self.name}",
            *(f"Answers come from: {answer}" for answer in holder.description.answers),
        ]

    def is_batchline(self) -> bool:
        return True

    def has_worker(self) -> bool:
        return not self._service.is_own and self._service.holder is not None

    def closing_notice(self) -> str | None:
        if not self._service.is_own:
            return None
        return "Stopping; lines in flight may finish. Press Ctrl-C again to stop at once."

    def close(self) -> None:
        self._service.close()


def target_for(
    base_url: str | None,
    flags: Mapping[str, Any],
    *,
    pause: Callable[[float], None],
    on_wait: OnWait,
    runs_lines: bool = True,
) -> Target:
    """Return the server if one is named, else the data folder of the settings.

    ``runs_lines`` says that the command has lines to run. Only such a command creates a data folder, and a service
    that it starts runs lines.
    """
    given = _given(flags)
    named_by, url = named_server(base_url)
    if url is None:
        return _local_target(given, pause=pause, on_wait=on_wait, runs_lines=runs_lines)
    if given:
        raise click.UsageError(
            f"{', '.join(map(flag, given))}: this sets the service on a data folder of this machine, but {named_by} "
            "names a server; remove one of them"
        )
    key_from, credentials = _environment_credentials()
    return ServerTarget(_root_url(url, named_by), credentials, named_by=named_by, key_from=key_from)


@contextmanager
def flags_with_data(base_url: str | None, flags: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the flags of a command that stores nothing.

    If no server is named, and there is no data of a service, they name a temporary folder with the same settings.
    """
    if named_server(base_url)[1] is not None or _has_data(load_settings(**_given(flags))):
        yield flags
        return
    with TemporaryDirectory(prefix="batchline-") as folder:
        temporary = {**flags, "data_dir": folder}
        local_credentials(load_settings(**_given(temporary)))
        yield temporary


def _has_data(settings: Settings) -> bool:
    """Return whether there is data of a service, in the folder or in that of a service that was probably meant."""
    from batchline.app import has_database  # noqa: PLC0415 (all of the service: not for --help)

    return has_database(settings) or url_of_another_folder(settings) is not None


def named_server(base_url: str | None) -> tuple[str, str | None]:
    """Return where a server is named, and its URL; None if none is."""
    if base_url:
        return _BASE_URL_FLAG, base_url
    for name in BASE_URL_VARIABLES:
        if value := os.environ.get(name, "").strip():
            return name, value
    return _BASE_URL_FLAG, None


def _given(flags: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in flags.items() if value is not None}


def _local_target(
    given: Mapping[str, str], *, pause: Callable[[float], None], on_wait: OnWait, runs_lines: bool
) -> LocalTarget:
    settings = load_settings(**given)
    if not runs_lines:
        require_store(settings)
    credentials = local_credentials(settings)
    service = LocalService(
        settings.data_dir,
        environment=_environment_with(given),
        runs_lines=runs_lines,
        pause=pause,
        on_wait=on_wait,
        on_found=lambda holder: _refuse_other_settings(settings, given, holder),
    )
    return LocalTarget(str(settings.data_dir.resolve()), credentials, service)


def _refuse_other_settings(settings: Settings, given: Mapping[str, str], holder: LockHolder) -> None:
    """Raise UsageError if the service that runs already does not have the settings that were given."""
    names = differing(settings, holder.description)
    if not names:
        return
    answers = "" if holder.description is None else f" Its answers come from: {'; '.join(holder.description.answers)}."
    raise click.UsageError(
        f"{', '.join(source_of(name, given) for name in names)}: the service that already runs on this data folder "
        f"({holder.url}, pid {holder.pid}) has another value, and the command uses that service.{answers} Leave the "
        "setting out, stop that service, or choose another folder with --data-dir."
    )


def _environment_with(given: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with the given settings, which as flags would show in the process list."""
    ours = {variable(name): value for name, value in given.items()}
    return {name: value for name, value in os.environ.items() if name.upper() not in ours} | ours


def _root_url(base_url: str, named_by: str) -> str:
    """Return a base URL without ``/v1``. Raise UsageError if it is not usable."""
    address = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not address.isascii() or not address.isprintable() or parts.query or parts.fragment:
        raise click.UsageError(f"{named_by}: expected a URL such as http://127.0.0.1:8000/v1")
    return address


def _environment_credentials() -> tuple[str, Credentials]:
    """Return the variable with the key, and the credentials. Without a project, the key is sent as a bearer token."""
    name = next((name for name in KEY_VARIABLES if os.environ.get(name, "").strip()), API_KEY)
    key, project_id = (os.environ.get(variable_name, "").strip() for variable_name in (name, PROJECT_ID))
    for variable_name, value in ((name, key), (PROJECT_ID, project_id)):
        if value and not (value.isascii() and value.isprintable()):
            raise WrongCredentials(f"{variable_name} is not usable. {_advice_on_key(name)}.")
    if not key:
        raise WrongCredentials(f"Neither {' nor '.join(KEY_VARIABLES)} is set. {_advice_on_key(name)}.")
    return name, Credentials(api_key=key, project_id=project_id)


def _advice_on_key(name: str) -> str:
    return (
        f"Set {name} to a key that `batchline keys create` printed on the server, and {PROJECT_ID} to its project if "
        "the server needs it"
    )


class WrongCredentials(click.ClickException):
    """The credentials are missing, unusable or refused."""

    exit_code = 4

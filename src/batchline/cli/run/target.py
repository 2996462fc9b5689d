"""Where a job is done: on a server, or on a data folder of this machine; and what to say when that fails."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import click

from batchline.cli.loading import RUN_VARIABLES, load_settings
from batchline.cli.options import flag, variable
from batchline.cli.run.credentials import Credentials, folder_credentials
from batchline.cli.run.local_service import Folder

BASE_URL, API_KEY, PROJECT_ID = RUN_VARIABLES


class Place(Protocol):
    name: str
    """What a journal remembers it by."""

    credentials: Credentials
    may_be_late: bool
    """Whether a service that cannot be reached may be on its way."""

    if_unreachable: str
    if_denied: str
    if_left: str

    def url(self) -> str:
        """Without ``/v1``."""

    def completer(self) -> str | None:
        """What ``close`` will wait for, if for anything."""

    def close(self) -> None: ...


class ServerPlace:
    may_be_late = False
    if_unreachable = f"Is the server running, and is {BASE_URL} right? Without it, a run needs no server"
    if_denied = f"Set {API_KEY} and {PROJECT_ID} to those that `batchline keys create` printed on the server"
    if_left = "What was submitted goes on at the server. Run the same command again to pick it up."

    def __init__(self, base_url: str, credentials: Credentials) -> None:
        self.name, self.credentials = base_url, credentials

    def url(self) -> str:
        return self.name

    def completer(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class FolderPlace:
    may_be_late = True
    if_unreachable = "Run the same command again to go on"
    if_denied = "The key of the folder was revoked. Run the same command again for a new one"
    if_left = "Run the same command again to go on."

    def __init__(self, name: str, credentials: Credentials, folder: Folder) -> None:
        self.name, self.credentials, self._folder = name, credentials, folder

    def url(self) -> str:
        return self._folder.url()

    def completer(self) -> str | None:
        if not self._folder.serves_itself:
            return None
        return "Stopping; lines in flight may finish. Press Ctrl-C again to stop at once."

    def close(self) -> None:
        self._folder.close()


def place_for(
    base_url: str | None, flags: Mapping[str, Any], *, pause: Callable[[float], None], tell: Callable[[str], None]
) -> Place:
    """A server where one is named, else the data folder of the settings."""
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if base_url is None:
        return _folder_place(given, pause=pause, tell=tell)
    if given:
        raise click.UsageError(
            f"{', '.join(map(flag, given))}: a setting of the service that a run starts for itself, "
            f"but {BASE_URL} or --base-url names a server"
        )
    return ServerPlace(_root_of(base_url), _credentials_of_environment())


def _folder_place(
    given: Mapping[str, str], *, pause: Callable[[float], None], tell: Callable[[str], None]
) -> FolderPlace:
    settings = load_settings(**given)
    credentials = folder_credentials(settings)
    folder = Folder(settings.data_dir, environment=_environment_with(given), pause=pause, tell=tell)
    return FolderPlace(str(settings.data_dir.resolve()), credentials, folder)


def _environment_with(given: Mapping[str, str]) -> dict[str, str]:
    """Settings go to the service as variables: a secret among them would stand in the list of processes."""
    ours = {variable(name): value for name, value in given.items()}
    return {name: value for name, value in os.environ.items() if name.upper() not in ours} | ours


def _root_of(base_url: str) -> str:
    address = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not address.isascii() or not address.isprintable() or parts.query or parts.fragment:
        raise click.UsageError(f"{BASE_URL} or --base-url: expected a URL such as http://127.0.0.1:8000/v1")
    return address


def _credentials_of_environment() -> Credentials:
    key, project_id = (os.environ.get(name, "").strip() for name in (API_KEY, PROJECT_ID))
    for name, value in ((API_KEY, key), (PROJECT_ID, project_id)):
        if not value or not value.isascii() or not value.isprintable():
            raise NoCredentials(f"{name} is {'not usable' if value else 'not set'}. {ServerPlace.if_denied}.")
    return Credentials(api_key=key, project_id=project_id)


class NoCredentials(click.ClickException):
    exit_code = 4

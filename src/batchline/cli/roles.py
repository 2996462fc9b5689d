"""``batchline serve``, ``api`` and ``worker``: the commands that run the service until it gets a signal to stop."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import byte_progress
from batchline.settings import Settings

FOLDER_TAKEN = 75
"""The exit code if another process serves the data folder: EX_TEMPFAIL of sysexits.h."""

Progress = Callable[[str, int, int], None]
"""Called with the name of what is downloaded, the bytes downloaded so far, and the bytes in total."""
Role = Callable[[Settings, Progress], Coroutine[Any, Any, None]]


@click.command(short_help="Run the whole service on one machine.", cls=Command)
@settings_options()
def serve(**flags: Any) -> None:
    """Run the whole service on one machine: API, worker, database and files.

    It runs as one process, and starts worker processes only while one process cannot keep up.
    """
    run_role("serve", flags)


@click.command(cls=Command)
@settings_options()
def api(**flags: Any) -> None:
    """Run an API node. Needs PostgreSQL and a bucket; any number of nodes can run at once."""
    run_role("api", flags)


@click.command(cls=Command)
@settings_options()
def worker(**flags: Any) -> None:
    """Run a worker. Needs PostgreSQL and a bucket; any number of workers can run at once.

    It serves only /healthz, /readyz and /metrics.
    """
    run_role("worker", flags)


class _FolderTaken(click.ClickException):
    exit_code = FOLDER_TAKEN


def run_role(name: str, flags: dict[str, Any], *, progress: Progress | None = None) -> None:
    """Run the role of this name in ``batchline.app`` with these flags. Raise ClickException if it cannot start.

    Without ``progress``, a download is shown on the terminal, if there is one.
    """
    settings = load_settings(**flags)
    from batchline import app  # noqa: PLC0415 (all of the service: not for --help)

    role: Role = getattr(app, name)
    try:
        app.configure_logs(level=settings.log_level, form=settings.log_format)
        with _download_progress() as show:
            app.run(role(settings, progress or show))
    except app.FolderTaken as error:
        raise _FolderTaken(str(error)) from None
    except app.StartupError as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def _download_progress() -> Iterator[Progress]:
    """Provide a callback that shows each download on a terminal, in a line of its own. The log has it in any case."""
    with ExitStack() as lines:
        shown: dict[str, Callable[[int, int], None]] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in shown:
                shown[name] = lines.enter_context(byte_progress(f"Downloading {name} (only once)"))
            shown[name](done, total)
            if done == total:
                lines.close()
                shown.clear()

        yield show

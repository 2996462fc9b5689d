"""The connection of a client command: a client of the server or of the data folder, closed at the end."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import click
from msgspec import Struct

from batchline.cli.connection.explain import explain_errors
from batchline.cli.connection.stopping import stop_on_signals
from batchline.cli.connection.target import Target, flags_with_data, target_for
from batchline.cli.run.display import TerminalLine, can_redraw
from batchline.cli.text import printable
from batchline.client.client import Client
from batchline.client.retry import Retrier
from batchline.system import SystemClock


class ClientSession(Struct, frozen=True, kw_only=True):
    """The target, the client and the display of a client command."""

    client: Client
    retrier: Retrier
    target: Target
    pause: Callable[[float], None]
    stage: Callable[[str], None]
    """Shows on a terminal what is being done."""
    clear: Callable[[], None]
    """Removes what ``stage`` showed."""


@contextmanager
def connect(
    base_url: str | None, flags: Mapping[str, Any], *, needs_worker: bool = False, needs_data: bool = True
) -> Iterator[ClientSession]:
    """Yield a session. Raise ClickException with an explanation if a request fails, and exit at Ctrl-C.

    On a data folder that no service uses, a service without a worker is started for the command, so that a command that
    only reads runs no line. ``needs_worker`` says that the command waits for lines to run: then it fails instead.
    ``needs_data`` says that there must be a data folder; else a temporary one is used if there is none.
    """
    clock = SystemClock()
    line = TerminalLine(sys.stderr, steady=clock.steady) if can_redraw(sys.stderr) else None

    def stage(text: str, *, fraction: float | None = None) -> None:
        if line is not None:
            line.stage(text, fraction=fraction)

    def clear() -> None:
        if line is not None:
            line.clear()

    with (
        stop_on_signals(),
        asyncio.Runner() as runner,
        nullcontext(flags) if needs_data else flags_with_data(base_url, flags) as chosen_flags,
    ):

        def pause(seconds: float) -> None:
            runner.run(clock.sleep(seconds))

        target = target_for(base_url, chosen_flags, pause=pause, on_wait=stage, runs_lines=False)
        if needs_worker and not target.has_worker():
            raise click.ClickException(
                f"No service runs on {target.name}, so no line would run. Start one with: batchline serve"
            )
        retrier = Retrier(pause=pause, on_retry=_say_retry, await_server=target.may_be_starting)
        client = Client(locate=target.url, headers=target.credentials.headers)
        with closing(target), explain_errors(target), client:
            target.url()
            clear()
            yield ClientSession(client=client, retrier=retrier, target=target, pause=pause, stage=stage, clear=clear)


def _say_retry(reason: str) -> None:
    click.echo(f"{printable(reason)}; trying again", err=True)

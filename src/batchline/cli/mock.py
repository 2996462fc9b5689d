"""``batchline mock``: runs the scripted upstream, for tests of batches without a model."""

import asyncio
import signal

import click
import uvloop

from batchline.cli.help import Command
from batchline.upstream.mock.script import Plan, Script
from batchline.upstream.mock.server import serve_mock

_STATUS = click.IntRange(200, 599)
_PERCENT = click.FloatRange(0, 100)
_SECONDS = click.FloatRange(0, 86_400)


class _StatusPercent(click.ParamType[tuple[int, float]]):
    """A status code and the percentage of attempts that get it."""

    name = "CODE=PERCENT"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        code, _, percent = value.partition("=")
        return _STATUS(code, param, ctx), _PERCENT(percent, param, ctx)


@click.command(cls=Command)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=9100,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--delay", default=0.0, type=_SECONDS, metavar="SECONDS", help="Delay of every answer.")
@click.option(
    "--status",
    multiple=True,
    type=_StatusPercent(),
    help="Percentage of attempts that get this status; can be repeated.",
)
@click.option("--cut", default=0.0, type=_PERCENT, metavar="PERCENT", help="Answers that are cut off.")
@click.option(
    "--drop", default=0.0, type=_PERCENT, metavar="PERCENT", help="Connections that are closed without an answer."
)
@click.option(
    "--html", default=0.0, type=_PERCENT, metavar="PERCENT", help="Answers that are an HTML page instead of JSON."
)
@click.option("--hang", default=0.0, type=_PERCENT, metavar="PERCENT", help="Requests that are never answered.")
@click.option("--retry-after", type=_SECONDS, metavar="SECONDS", help="Retry-After header of 429 and 503.")
@click.option("--seed", metavar="N", default=0, show_default=True, help="Selects which requests get the faults.")
def mock(
    *,
    host: str,
    port: int,
    delay: float,
    status: tuple[tuple[int, float], ...],
    cut: float,
    drop: float,
    html: float,
    hang: float,
    retry_after: float | None,
    seed: int,
) -> None:
    """Serve scripted answers in the format of OpenAI, for tests.

    It is not a model. A prompt can select its answer with [[status=503 times=2]], [[delay=1.5]], [[cut]], [[html]],
    [[drop]], [[hang]], [[huge=20000000]] or [[crash]], and for a stream with [[pause=0.1]].
    """
    try:
        plan = Plan(status=dict(status), cut=cut, drop=drop, html=html, hang=hang, delay=delay, retry_after=retry_after)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        uvloop.run(_serve(host, port, Script(plan, seed=seed)))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _serve(host: str, port: int, script: Script) -> None:
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    server = await serve_mock(host=host, port=port, script=script)
    click.echo(f"batchline mock listens on {server.base_url} (scripted answers, not a model)")
    await stopped.wait()
    await server.close()

"""The parts that every run uses: the target, the display, the clock, and the signal to stop."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import click
from msgspec import Struct

from batchline.cli.connection.explain import RESUME, explain_errors
from batchline.cli.connection.stopping import Stopped
from batchline.cli.connection.target import Target, target_for
from batchline.cli.output import say
from batchline.cli.run.display import Display, stderr_display
from batchline.cli.run.files import RunFiles
from batchline.cli.run.journal import Journal, JournalUnusable
from batchline.cli.run.report import SavedResults
from batchline.cli.run.runner import BatchRun, RunOptions
from batchline.cli.text import printable
from batchline.client.client import Client
from batchline.client.models import model_decoder
from batchline.system import SystemClock, SystemRandom


class RunContext(Struct, frozen=True, kw_only=True):
    """The target of a run and what it is run with."""

    target: Target
    display: Display
    clock: SystemClock
    pause: Callable[[float], None]

    def run_batch(self, files: RunFiles, options: RunOptions) -> SavedResults:
        """Run one batch, or resume it. Raise ClickException."""
        with self._open_run(files, options) as batch_run:
            return batch_run.run()

    def give_up_batch(self, files: RunFiles) -> None:
        """Cancel the batch that an earlier run created for these files. Raise ClickException."""
        with self._open_run(files, RunOptions(restart=True)) as batch_run:
            batch_run.give_up()

    @contextmanager
    def _open_run(self, files: RunFiles, options: RunOptions) -> Iterator[BatchRun]:
        with closing(_open_journal(files)) as journal:
            yield BatchRun(
                files,
                options,
                target=self.target,
                journal=journal,
                display=self.display,
                clock=self.clock,
                random=SystemRandom(),
                pause=self.pause,
            )

    def models(self) -> list[str]:
        """Return the ids of the models that can be used. Raise ClickException."""
        with (
            explain_errors(self.target),
            Client(locate=self.target.url, headers=self.target.credentials.headers) as client,
        ):
            return [model_decoder.decode(raw).id for raw in client.models()]


@contextmanager
def open_context(base_url: str | None, flags: Mapping[str, Any]) -> Iterator[RunContext]:
    """Yield the context of a run, after printing who answers. Start a service if needed, and stop it at the end."""
    clock = SystemClock()
    display = stderr_display(steady=clock.steady)
    with asyncio.Runner() as runner:

        def pause(seconds: float) -> None:
            runner.run(clock.sleep(seconds))

        target = target_for(base_url, flags, pause=pause, on_wait=display.stage)
        with _advise_when_stopped(target), closing(target), _clear_before_errors(target, display):
            with explain_errors(target, advice=RESUME):
                target.url()
            display.clear()
            for line in target.introduction():
                say(printable(line), indent=2, err=True)
            yield RunContext(target=target, display=display, clock=clock, pause=pause)


def _open_journal(files: RunFiles) -> Journal:
    try:
        return Journal(files.journal)
    except JournalUnusable as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def _clear_before_errors(target: Target, display: Display) -> Iterator[None]:
    """Remove the progress line before an error is printed. If stopping takes a while, say so."""
    try:
        yield
    except (Stopped, click.ClickException) as error:
        display.clear()
        if isinstance(error, Stopped) and (notice := target.closing_notice()) is not None:
            say(notice, err=True)
        raise


@contextmanager
def _advise_when_stopped(target: Target) -> Iterator[None]:
    """Print how to resume, after the target was closed."""
    try:
        yield
    except Stopped:
        say(target.if_interrupted, err=True)
        raise

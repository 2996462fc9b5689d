"""``python -m bench``: measures, prints tables and writes everything as JSON."""

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from bench.context import FULL, QUICK, BenchContext
from bench.parts import PARTS
from bench.results import Results, print_progress
from bench.services import BACKENDS, running_backend
from bench.upstream import CompiledUpstream, running_upstream

_RESULTS = Path(__file__).with_name("results.json")
_SWITCH_SECONDS = 0.0005


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Take three or four minutes, to see whether something broke; do not quote the figures.",
)
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Run this part alone; may be repeated.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    default=BACKENDS,
    type=click.Choice(BACKENDS),
    help="Where batchline stores its state; both by default. The others are compared with the first one.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), default=_RESULTS, help="The file for the JSON."
)
def main(quick: bool, only: tuple[str, ...], backends: tuple[str, ...], output: Path) -> None:
    """Measure batchline and its alternatives on this machine."""
    # SIGTERM ends everything that was started, as an error does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The thread that samples the memory must not delay a poll.
    sys.setswitchinterval(_SWITCH_SECONDS)
    results = Results(output, quick=quick)
    with ExitStack() as stack:
        # The results so far are also printed after an error.
        stack.callback(lambda: print(results.scoreboard().text(), flush=True))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-bench-")))
        upstream = stack.enter_context(running_upstream(folder))
        running = [stack.enter_context(running_backend(name, folder)) for name in backends]
        results.upstream = upstream.name
        if not isinstance(upstream, CompiledUpstream):
            results.leave_out(
                "upstream.c", f"it cannot be compiled here; {upstream.name} is used in its place and is slower"
            )
        _measure(
            BenchContext(folder, upstream, running, QUICK if quick else FULL, results), only or tuple(PARTS), results
        )
    results.write(whole=True)
    print_progress(f"Written to {output} after {results.clock()}")


def _measure(context: BenchContext, names: Sequence[str], results: Results) -> None:
    for place, name in enumerate(names, 1):
        results.begin_part(name, place=place, of=len(names))
        result = PARTS[name](context)
        results.add_part(result)
        for table in result.tables:
            print(table.text(), flush=True)


if __name__ == "__main__":
    main()

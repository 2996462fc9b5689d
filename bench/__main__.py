"""``python -m bench``: measure, print tables, write everything as JSON."""

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from bench.course import FULL, QUICK, Course
from bench.parts import PARTS
from bench.results import Results, say
from bench.services import BACKENDS, running_backend
from bench.upstream import CompiledUpstream, running_upstream

_RESULTS = Path(__file__).with_name("results.json")
_SWITCH_SECONDS = 0.0005


@click.command()
@click.option("--quick", is_flag=True, help="Three or four minutes, to see whether something broke; not to be quoted.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="This part alone; may be repeated.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    default=BACKENDS,
    type=click.Choice(BACKENDS),
    help="What batchline keeps its state in; both if not given, and the first is what others are compared with.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), default=_RESULTS, help="Where the JSON goes."
)
def main(quick: bool, only: tuple[str, ...], backends: tuple[str, ...], output: Path) -> None:
    """Measure batchline against what people would use instead, on this machine."""
    # Ends what was started, as an error does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The thread that looks at the memory must not keep a poll waiting.
    sys.setswitchinterval(_SWITCH_SECONDS)
    results = Results(output, quick=quick)
    with ExitStack() as stack:
        # What is known is shown also when something breaks.
        stack.callback(lambda: print(results.scoreboard().text(), flush=True))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-bench-")))
        upstream = stack.enter_context(running_upstream(folder))
        running = [stack.enter_context(running_backend(name, folder)) for name in backends]
        results.upstream = upstream.name
        if not isinstance(upstream, CompiledUpstream):
            results.leave_out("upstream.c", f"it cannot be compiled here; {upstream.name} stands in and is slower")
        _measure(Course(folder, upstream, running, QUICK if quick else FULL, results), only or tuple(PARTS), results)
    results.write(whole=True)
    say(f"Written to {output} after {results.clock()}")


def _measure(course: Course, names: Sequence[str], results: Results) -> None:
    for place, name in enumerate(names, 1):
        results.begin_part(name, place=place, of=len(names))
        told = PARTS[name](course)
        results.add_part(told)
        for table in told.tables:
            print(table.text(), flush=True)


if __name__ == "__main__":
    main()

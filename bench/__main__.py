"""``python -m bench``: measure, print tables, write everything as JSON."""

import os
import platform
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import psutil  # type: ignore[import-untyped]
from msgspec.json import encode, format

from bench.course import FULL, QUICK, Course, say
from bench.parts import PARTS
from bench.services import BACKENDS, running_backend
from bench.upstream import CompiledUpstream, running_upstream

_RESULTS = Path(__file__).with_name("results.json")
_SWITCH_SECONDS = 0.0005


@click.command()
@click.option("--quick", is_flag=True, help="A minute or two, to see whether something broke; not to be quoted.")
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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-bench-")))
        upstream = stack.enter_context(running_upstream(folder))
        running = [stack.enter_context(running_backend(name, folder)) for name in backends]
        course = Course(folder, upstream, running, QUICK if quick else FULL)
        if not isinstance(upstream, CompiledUpstream):
            course.leave_out("upstream.c", f"it cannot be compiled here; {upstream.name} stands in and is slower")
        told = {name: _measure(name, course) for name in only or PARTS}
    document = {"machine": _machine(), "quick": quick, "upstream": upstream.name, "left_out": course.left_out}
    output.write_bytes(format(encode(document | {"parts": told}), indent=1))
    say(f"Written to {output}")


def _measure(name: str, course: Course) -> Any:
    data, tables = PARTS[name](course)
    for table in tables:
        print(table.text(), flush=True)
    return data


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()

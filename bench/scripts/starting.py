"""A script is measured from when it could start until it is done, without the time that Python and imports take."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def when_told() -> Iterator[None]:
    """Wait for a line of the standard input; tell when the work is over, and wait for the end of the input."""
    print("ready", flush=True)
    sys.stdin.readline()
    yield
    print("done", flush=True)
    sys.stdin.read()

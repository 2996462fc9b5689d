"""Starts and ends the measured time of a script, so that the start of Python and imports are not in it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed() -> Iterator[None]:
    """Print "ready", wait for a line on stdin, run the block, print "done", and wait for the end of stdin."""
    print("ready", flush=True)
    sys.stdin.readline()
    yield
    print("done", flush=True)
    sys.stdin.read()

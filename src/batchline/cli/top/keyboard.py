"""Reads single keys from the terminal while a screen is shown."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_KEYS = 64
"""Keys that are read at once, such as those of a paste."""


@contextmanager
def key_pressed(key: str) -> Iterator[asyncio.Event]:
    """Yield an event that is set once a key is pressed. Without a terminal it never is."""
    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, _MOST_KEYS)
        if key.encode() in typed:
            pressed.set()
        if not typed:
            # The terminal is gone. Its reader would be called again and again.
            loop.remove_reader(descriptor)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

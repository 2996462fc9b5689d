"""The service of one run: ``batchline serve`` that stops when the process that started it has ended, in any way.

That process holds the other end of our standard input, and no other process does.
"""

import os
import signal
from threading import Thread

from batchline.cli.roles import serve

_STDIN = 0
_GRACE_SECONDS = 5


def _stop_with_parent() -> None:
    while os.read(_STDIN, 1024):
        pass
    # The kernel kills the service if it does not stop in time, so that a killed run leaves no process behind.
    signal.alarm(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Thread(target=_stop_with_parent, daemon=True).start()
    serve.main(["--host", "127.0.0.1", "--port", "0"], prog_name="batchline serve")

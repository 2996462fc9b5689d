"""The service of one run: ``serve`` that leaves when the process that started it is gone, however that ended.

That process holds the other end of our standard input, and nobody else does.
"""

import os
import signal
from threading import Thread

from batchline.cli.serve import serve

_STDIN = 0
_GRACE_SECONDS = 5


def _leave_with_parent() -> None:
    while os.read(_STDIN, 1024):
        pass
    # The kernel ends what does not end by itself: a run that was killed leaves nothing behind.
    signal.alarm(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Thread(target=_leave_with_parent, daemon=True).start()
    serve.main(["--host", "127.0.0.1", "--port", "0"], prog_name="batchline serve")

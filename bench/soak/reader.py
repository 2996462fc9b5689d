"""Reads the two lists of one tenant as a console does, in a process of its own, until its standard input ends.

In one process with the other clients of the soak, a read would wait for their threads too. It writes one line for each
read: its seconds, or the fault.
"""

import json
import select
import sys
from http.client import HTTPException
from time import monotonic

from tests.support.service import call

_PATHS = ("/v1/batches?limit=20", "/v1/files?limit=20")
_EVERY_SECONDS = 0.1


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    while not select.select([sys.stdin], [], [], _EVERY_SECONDS)[0]:
        for path in _PATHS:
            print(_read(asked["port"], path, asked["credentials"]), flush=True)


def _read(port: int, path: str, credentials: dict[str, str]) -> str:
    began = monotonic()
    try:
        reply = call(port, "GET", path, headers=credentials)
    except (OSError, HTTPException) as error:
        return f"{path}: {type(error).__name__}: {error}"
    seconds = monotonic() - began
    return f"{seconds:.6f}" if reply.status == 200 else f"{path} answered {reply.status}"


if __name__ == "__main__":
    main()

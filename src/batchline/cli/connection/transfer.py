"""Downloads a file, and resumes if the connection breaks."""

from collections.abc import Callable
from pathlib import Path

from batchline import durable
from batchline.client.client import Client
from batchline.client.retry import TRANSIENT, Retrier


def download(
    client: Client, file_id: str, target: Path, *, retrier: Retrier, on_progress: Callable[[int, int], None]
) -> None:
    """Download a file, which appears at ``target`` only when it is complete.

    ``on_progress`` gets the number of bytes so far and the total. Attempts that got more bytes do not count as failed.
    """
    part, failures = target.with_name(f"{target.name}.part"), 0
    with part.open("wb") as file:
        while True:
            before = file.tell()
            try:
                client.download(file_id, file, on_progress=on_progress)
                break
            except TRANSIENT as error:
                failures = 1 if file.tell() > before else failures + 1
                retrier.wait(error, failures=failures)
        file.flush()
        durable.sync(file.fileno())
    durable.replace(part, target)

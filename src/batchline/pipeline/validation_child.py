"""Does the work of the child processes of the validation pool. Arguments and results are pickled on their way.

The first file of a service waits until its child has imported this module, so it imports nothing that validation does
not need.
"""

import os
import signal
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

from msgspec import msgpack

from batchline.domain.limits import InputLimits
from batchline.domain.records import NewShard
from batchline.pipeline.rows.requests import write_requests
from batchline.pipeline.survey import digests_in_file, survey_file
from batchline.pipeline.validate import validate_file
from batchline.ports import TableForm


def begin() -> None:
    """Prepare the process. It ends with its parent, however that ends."""
    # A terminal sends Ctrl-C to the whole process group, but the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def validate(source: Path, work: Path, endpoint: str, limits: InputLimits) -> bytes:
    """Validate a file, and return the encoded Verdict.

    Thousands of shards are returned as one bytes object and not as thousands of pickled ones.
    """
    return msgpack.encode(validate_file(source=source, work=work, endpoint=endpoint, limits=limits))


def write_table_requests(source: Path, target: Path, form: bytes, max_rows: int) -> bytes:
    """Write a request for each row of a table, and return the encoded TableVerdict."""
    return msgpack.encode(write_requests(source, target, msgpack.decode(form, type=TableForm), max_rows=max_rows))


def digests(work: Path, shards: bytes, project_id: str, endpoint: str, sent_as: bytes | None) -> bytes:
    """Return the digests of all lines of a work file."""
    decoded = msgpack.decode(shards, type=list[NewShard])
    return digests_in_file(work, decoded, project_id=project_id, endpoint=endpoint, sent_as=sent_as)


def survey(work: Path, shards: bytes) -> bytes:
    """Survey a work file, and return the encoded Survey."""
    return msgpack.encode(survey_file(work, msgpack.decode(shards, type=list[NewShard])))

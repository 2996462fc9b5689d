"""The targets: one for each format that strangers, upstreams or backups bring."""

from collections.abc import Callable

from tests.fuzz.fuzzer import Target
from tests.fuzz.targets.archives import ArchiveTarget
from tests.fuzz.targets.framing import FramingTarget
from tests.fuzz.targets.jsonl import JsonLinesTarget
from tests.fuzz.targets.multipart import MultipartTarget
from tests.fuzz.targets.sse import EventStreamTarget

TARGETS: dict[str, Callable[[], Target]] = {
    target.name: target
    for target in (MultipartTarget, JsonLinesTarget, FramingTarget, EventStreamTarget, ArchiveTarget)
}
EXECUTIONS = {"multipart": 1000, "jsonl": 500, "framing": 300, "sse": 300, "archives": 40}
"""The number of new inputs of a short run: a second or two for each target."""

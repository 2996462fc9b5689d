"""Says on a terminal why lines of a batch wait (D11), and which of these reasons a person should know."""

from datetime import UTC, datetime

from batchline.domain import wait_text
from batchline.domain.wait_text import AnyWait
from batchline.domain.waiting import WaitReason

_USUAL = frozenset({WaitReason.SLOTS, WaitReason.RETRYING, WaitReason.QUEUED})
"""The reasons for which lines of a batch that makes progress wait anyway."""
_PAUSES = frozenset({WaitReason.UPSTREAM_PAUSED, WaitReason.STORAGE, WaitReason.HELD})


def is_unusual(wait: AnyWait) -> bool:
    """Return whether a reason is worth showing while the batch makes progress."""
    return wait.reason not in _USUAL or (wait.reason == WaitReason.SLOTS and wait.by_other_projects > 0)


def is_pause(wait: AnyWait) -> bool:
    """Return whether no line can run until something outside the batch changes, so that its end cannot be estimated."""
    return wait.reason in _PAUSES


def is_held(wait: AnyWait) -> bool:
    """Return whether the batch is held because nearly all of its lines failed (G6)."""
    return wait.reason == WaitReason.HELD


def describe_wait(wait: AnyWait) -> str:
    """Return why lines wait, as a sentence without a full stop, with times in the zone of this machine."""
    return wait_text.describe_wait(wait, moment=_local_time)


def _local_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%H:%M:%S")

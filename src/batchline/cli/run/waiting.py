"""Says in plain words why lines of a batch wait (D11)."""

from collections.abc import Callable
from datetime import UTC, datetime

from batchline.cli.text import without_legacy
from batchline.client.models import RemoteWait
from batchline.domain.models import DEFAULT_UPSTREAM
from batchline.domain.waiting import WaitReason

_CREDENTIALS = frozenset({"http_401", "http_403"})
_USUAL = frozenset({WaitReason.SLOTS, WaitReason.RETRYING, WaitReason.QUEUED})
"""The reasons for which lines of a batch that makes progress wait anyway."""
_PAUSES = frozenset({WaitReason.UPSTREAM_PAUSED, WaitReason.STORAGE, WaitReason.HELD})


def is_unusual(wait: RemoteWait) -> bool:
    """Return whether a reason is worth showing while the batch makes progress."""
    return wait.reason not in _USUAL or (wait.reason == WaitReason.SLOTS and wait.by_other_projects > 0)


def is_pause(wait: RemoteWait) -> bool:
    """Return whether no line can run until something outside the batch changes, so that no end can be foretold."""
    return wait.reason in _PAUSES


def is_held(wait: RemoteWait) -> bool:
    """Return whether the batch is held because nearly all of its lines failed (G6)."""
    return wait.reason == WaitReason.HELD


def describe_wait(wait: RemoteWait) -> str:
    """Return why lines wait, as a sentence without a full stop."""
    describe = _DESCRIPTIONS.get(wait.reason)
    return f"waiting: {wait.reason}" if describe is None else describe(wait)


def _pause(wait: RemoteWait) -> str:
    paused = _upstream(wait) if wait.model is None else f"model {wait.model} of {_upstream(wait)}"
    if wait.detail in _CREDENTIALS:
        return f"waiting: {paused} does not accept the credentials ({wait.detail}); check the API key of the upstream"
    why = "refuses every line" if wait.detail == "http_429" else "is unavailable"
    return f"waiting: {paused} is paused because it {why} ({wait.detail})"


def _storage(_: RemoteWait) -> str:
    return "waiting: answers must be stored first, and the storage is slow or unavailable"


def _quarantine(wait: RemoteWait) -> str:
    return f"waiting: {_upstream(wait)} crashed, and the lines that may have caused it are tried first"


def _retry_after(wait: RemoteWait) -> str:
    return f"waiting until {_local_time(wait.until)}, as {_upstream(wait)} asked (Retry-After)"


def _rate_limit(wait: RemoteWait) -> str:
    if wait.rate is None:
        return f"waiting: {_upstream(wait)} accepts no more lines of model {wait.model} at the moment"
    rate = f"{wait.rate:.1f}".removesuffix(".0") if wait.rate < 10 else f"{wait.rate:,.0f}"
    return (
        f"waiting: {_upstream(wait)} accepts {rate} {'line' if rate == '1' else 'lines'} a second of model {wait.model}"
    )


def _slots(wait: RemoteWait) -> str:
    slots = f"all {wait.limit:,}"
    others = wait.by_other_projects
    if not others:
        return f"waiting for a slot: {slots} are taken"
    if others >= wait.in_flight:
        return f"waiting for a slot: {slots} are taken by other projects"
    return f"waiting for a slot: {slots} are taken, {others:,} by other projects"


def _retrying(wait: RemoteWait) -> str:
    return f"waiting: {wait.lines:,} {'line' if wait.lines == 1 else 'lines'} will be tried again after a fault"


def _queued(wait: RemoteWait) -> str:
    if not wait.workers:
        return "waiting: no worker is running; start `batchline serve` or `batchline worker`"
    return "waiting for a worker to take the lines"


def _upstream(wait: RemoteWait) -> str:
    return "the upstream" if wait.upstream == DEFAULT_UPSTREAM else f"the upstream {wait.upstream}"


def _local_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%H:%M:%S")


def _held(wait: RemoteWait) -> str:
    return f"held, because nearly all lines fail with {wait.code}: {without_legacy(wait.message)}"


_DESCRIPTIONS: dict[str, Callable[[RemoteWait], str]] = {
    WaitReason.HELD: _held,
    WaitReason.UPSTREAM_PAUSED: _pause,
    WaitReason.STORAGE: _storage,
    WaitReason.QUARANTINE: _quarantine,
    WaitReason.RETRY_AFTER: _retry_after,
    WaitReason.RATE_LIMIT: _rate_limit,
    WaitReason.SLOTS: _slots,
    WaitReason.RETRYING: _retrying,
    WaitReason.QUEUED: _queued,
}

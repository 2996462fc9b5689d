"""Says in plain words why lines of a batch wait (D11)."""

from collections.abc import Callable

from msgspec import Struct, convert, to_builtins

from batchline.domain.line_errors import without_legacy
from batchline.domain.models import DEFAULT_UPSTREAM
from batchline.domain.replies import FaultKind
from batchline.domain.waiting import Wait, WaitReason

_CREDENTIALS = frozenset({"http_401", "http_403"})
_DETAILS: dict[str, str] = {FaultKind.REFUSED: "no connection"}
"""Words for details that could be misread: credentials are refused too."""

Moment = Callable[[int], str]
"""Turns Unix seconds into the text of a time."""


class AnyWait(Struct, frozen=True):
    """A reason with the fields of all reasons; those that it does not have are empty.

    A client reads with it what a newer server sends, also a reason that it does not know.
    """

    reason: str
    upstream: str = ""
    model: str | None = None
    detail: str = ""
    code: str = ""
    message: str = ""
    since: int = 0
    until: int = 0
    rate: float | None = None
    in_flight: int = 0
    limit: int = 0
    by_other_projects: int = 0
    lines: int = 0
    workers: int = 0


def any_wait(wait: Wait) -> AnyWait:
    """Return a reason with the fields of all reasons."""
    return convert(to_builtins(wait), AnyWait)


def describe_wait(wait: AnyWait, *, moment: Moment) -> str:
    """Return why lines wait, as a sentence without a full stop."""
    describe = _DESCRIPTIONS.get(wait.reason)
    return f"waiting: {wait.reason}" if describe is None else describe(wait, moment)


def _held(wait: AnyWait, moment: Moment) -> str:
    why = f"because nearly all lines fail with {wait.code}: {without_legacy(wait.message)}"
    return f"held, {why}" if not wait.since else f"held since {moment(wait.since)}, {why}"


def _pause(wait: AnyWait, moment: Moment) -> str:
    paused = _upstream(wait) if wait.model is None else f"model {wait.model} of {_upstream(wait)}"
    since = f" since {moment(wait.since)}" if wait.since else ""
    if wait.detail in _CREDENTIALS:
        return (
            f"waiting: {paused} does not accept the credentials{since} ({wait.detail}); check the API key of the "
            "upstream"
        )
    why = "refuses every line" if wait.detail == "http_429" else "is unavailable"
    return f"waiting: {paused} is paused{since} because it {why} ({_DETAILS.get(wait.detail, wait.detail)})"


def _storage(_wait: AnyWait, _moment: Moment) -> str:
    return "waiting: answers must be stored first, and the storage is slow or unavailable"


def _quarantine(wait: AnyWait, _moment: Moment) -> str:
    return f"waiting: {_upstream(wait)} crashed, and the lines that may have caused it are tried first"


def _retry_after(wait: AnyWait, moment: Moment) -> str:
    return f"waiting until {moment(wait.until)}, as {_upstream(wait)} asked (Retry-After)"


def _rate_limit(wait: AnyWait, _moment: Moment) -> str:
    if wait.rate is None:
        return f"waiting: {_upstream(wait)} accepts no more lines of model {wait.model} at the moment"
    rate = f"{wait.rate:.1f}".removesuffix(".0") if wait.rate < 10 else f"{wait.rate:,.0f}"
    return (
        f"waiting: {_upstream(wait)} accepts {rate} {'line' if rate == '1' else 'lines'} a second of model {wait.model}"
    )


def _slots(wait: AnyWait, _moment: Moment) -> str:
    slots = f"all {wait.limit:,}"
    others = wait.by_other_projects
    if not others:
        return f"waiting for a slot: {slots} are taken"
    if others >= wait.in_flight:
        return f"waiting for a slot: {slots} are taken by other projects"
    return f"waiting for a slot: {slots} are taken, {others:,} by other projects"


def _retrying(wait: AnyWait, _moment: Moment) -> str:
    return f"waiting: {wait.lines:,} {'line' if wait.lines == 1 else 'lines'} will be tried again after a fault"


def _queued(wait: AnyWait, _moment: Moment) -> str:
    if not wait.workers:
        return "waiting: no worker is running; start `batchline serve` or `batchline worker`"
    return "waiting for a worker to take the lines"


def _upstream(wait: AnyWait) -> str:
    return "the upstream" if wait.upstream == DEFAULT_UPSTREAM else f"the upstream {wait.upstream}"


_DESCRIPTIONS: dict[str, Callable[[AnyWait, Moment], str]] = {
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

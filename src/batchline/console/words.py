"""Says in words what a batch waits for, and what to do about lines that failed."""

from batchline.console.text import moment, plural, rate
from batchline.domain.waiting import (
    HeldWait,
    QuarantineWait,
    QueueWait,
    RateLimitWait,
    RetryAfterWait,
    RetryWait,
    SlotsWait,
    StorageWait,
    UpstreamPause,
    Wait,
)

_PAUSES = {
    "refused": "it refuses connections",
    "timeout": "it does not answer in time",
    "http_401": "it does not accept the API key of this service",
    "http_403": "it does not accept the API key of this service",
}

_REMEDIES = {
    "authentication_error": "Check the key: the one that created the batch may be revoked, or the upstream refused "
    "the operator's.",
    "batch_cancelled": "These lines never ran. Rerun them if you still need them.",
    "batch_expired": "These lines did not start within the completion window. Rerun them.",
    "request_too_large": "The request is too large for the upstream. Shorten it.",
    "context_length_exceeded": "Shorten the prompts or lower max_tokens, for example with a rerun and a patch.",
    "insufficient_quota": "No money is left, here or at the upstream. Add funds, then rerun the lines.",
    "internal_error": "The upstream failed every attempt, or a worker died of the line. Rerun it when the upstream is "
    "well.",
    "invalid_request_error": "The upstream refused the request as it is. Read the sample, mend the field it names, and "
    "rerun with a patch.",
    "not_found_error": "The model does not exist here, or the project may not use it. Rerun with a patch that names "
    "another model.",
    "rate_limit_exceeded": "The upstream had no room for the line until the end. Rerun it later.",
}
_OTHER_REMEDY = "Read the sample, mend its cause, and rerun the failed lines."


def remedy_for(code: str) -> str:
    """Return what a person can do about lines that failed with a code."""
    return _REMEDIES.get(code, _OTHER_REMEDY)


def wait_text(wait: Wait) -> str:
    """Return what lines of a batch wait for, as a sentence."""
    if isinstance(wait, HeldWait):
        return f"Held since {moment(wait.since)}: nearly all lines failed with {wait.code}. Release it or cancel it."
    if isinstance(wait, UpstreamPause):
        subject = f"The upstream {wait.upstream}" if wait.model is None else f"Model {wait.model} at {wait.upstream}"
        reason = _PAUSES.get(wait.detail, wait.detail.replace("_", " "))
        return f"{subject} is paused since {moment(wait.since)}: {reason}. Lines start when it answers again."
    if isinstance(wait, StorageWait):
        return "Answers must be stored before more lines start: the storage is unavailable or slow."
    if isinstance(wait, QuarantineWait):
        return f"The upstream {wait.upstream} crashed. Lines that may have caused it are tried in small groups first."
    return _busy_text(wait)


def _busy_text(wait: RetryAfterWait | RateLimitWait | SlotsWait | RetryWait | QueueWait) -> str:
    if isinstance(wait, RetryAfterWait):
        return f"The upstream {wait.upstream} asks to wait until {moment(wait.until)} before the next line."
    if isinstance(wait, RateLimitWait):
        pace = "" if wait.rate is None else f"; {rate(wait.rate)} start now"
        return f"The upstream {wait.upstream} limits the rate of {wait.model}{pace}."
    if isinstance(wait, SlotsWait):
        others = f", {wait.by_other_projects} of them from other projects" if wait.by_other_projects else ""
        return f"The upstream {wait.upstream} is busy: {wait.in_flight} of {wait.limit} requests in flight{others}."
    if isinstance(wait, RetryWait):
        return f"{plural(wait.lines, 'line')} wait for the next attempt after a fault."
    if wait.workers == 0:
        return "No worker runs. Start one with `batchline worker`, or ask the operator."
    return "Lines wait for a worker to take them."

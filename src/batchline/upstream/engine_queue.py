"""Reads how many requests wait inside an inference engine, from the Prometheus page of the engine.

::

    engine      requests that wait             requests that are processed
    vLLM        vllm:num_requests_waiting      vllm:num_requests_running
    SGLang      sglang:num_queue_reqs          sglang:num_running_reqs
    llama.cpp   llamacpp:requests_deferred     llamacpp:requests_processing
    TGI         tgi_queue_size                 tgi_batch_current_size

Some engines and proxies write an underscore in place of the colon. SGLang and llama.cpp have the page only if they are
started with --enable-metrics or --metrics.
"""

import re
from collections.abc import Mapping

from batchline.domain.engine_queue import QueueLength
from batchline.domain.replies import Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.http import HttpUpstream

_PATH = "/metrics"
_TIMEOUT_SECONDS = 2.0
_MAX_PAGE_BYTES = 1024 * 1024
_MAX_REQUESTS = 1e9
"""A larger number of requests is not believed. The bound also keeps every sum finite."""

_ENGINE_NAMES = (
    (b"vllm:num_requests_waiting", b"vllm:num_requests_running"),
    (b"sglang:num_queue_reqs", b"sglang:num_running_reqs"),
    (b"llamacpp:requests_deferred", b"llamacpp:requests_processing"),
    (b"tgi_queue_size", b"tgi_batch_current_size"),
)
_NAMES = tuple(
    dict.fromkeys(
        spelling
        for waiting, running in _ENGINE_NAMES
        for spelling in ((waiting, running), (waiting.replace(b":", b"_"), running.replace(b":", b"_")))
    )
)
_SAME_REQUESTS_LABELS = frozenset({b"tp_rank", b"pp_rank", b"moe_ep_rank", b"priority"})
"""Labels that do not divide the requests of an engine. The ranks of one SGLang replica all count the same requests, and
with priorities SGLang writes the total beside the number of each priority. So the largest sample is the right one."""

_STRING = rb'"(?:[^"\\\n]++|\\.)*+"'
_LABEL = re.compile(rb"(%b|[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*(%b)" % (_STRING, _STRING))
_SAMPLE = re.compile(
    rb"^[ \t]*+(?P<name>%b)" % b"|".join(re.escape(name) for names in _NAMES for name in names)
    + rb'(?:[ \t]*+\{(?P<labels>(?:[^"}\n]++|%b)*+)\}[ \t]*+|[ \t]++)' % _STRING
    + rb"(?P<value>[-+.0-9eE]{1,64}+)"
    + rb"(?:[ \t]++[-+.0-9eE]++)?+[ \t\r]*+$",  # a timestamp may follow
    re.MULTILINE,
)
"""A line with a number of one of the names. The quantifiers are possessive, so that no page takes more than linear time
to search."""

_SampleLabels = frozenset[tuple[bytes, bytes]]


class EngineQueueReader:
    """Reads the queue length of the engine behind one upstream URL.

    The request goes to the same origin as the lines and carries the same key and headers, because an engine that was
    started with a key may protect its page with it. Redirects are not followed.
    """

    def __init__(self, base_url: str, *, api_key: str | None, headers: Mapping[str, str], clock: Clock) -> None:
        """Raise ValueError if the URL, the key or a header is invalid."""
        self._upstream = HttpUpstream(
            base_url,
            api_key=api_key,
            headers=headers,
            connect_timeout=_TIMEOUT_SECONDS,
            request_timeout=_TIMEOUT_SECONDS,
            max_answer_bytes=_MAX_PAGE_BYTES,
            clock=clock,
        )

    async def read(self) -> QueueLength | Reply | None:
        """Return the queue length, the reply of a server that is failing, or None if the server does not report one."""
        try:
            reply = await self._upstream.get(_PATH)
        finally:
            # Many servers close a connection that was idle for 5 s, which is also the time between two reads.
            await self._upstream.close()
        if isinstance(reply, Fault):
            return None if reply.kind in {FaultKind.GARBLED, FaultKind.UNREADABLE} else reply
        if reply.status in {408, 429} or (reply.status >= 500 and reply.status != 501):
            return reply
        return parse_queue_length(reply.body) if reply.status == 200 else None


def parse_queue_length(page: bytes) -> QueueLength | None:
    """Return the queue length that a Prometheus page reports, or None if it reports none.

    The samples of several models or replicas are added up. If the page has the names of several engines, the first
    engine of the list above is used.
    """
    totals = _totals(page)
    for waiting, running in _NAMES:
        if waiting in totals:
            return QueueLength(running=totals.get(running), waiting=totals[waiting])
    return None


def _totals(page: bytes) -> dict[bytes, float]:
    values: dict[tuple[bytes, _SampleLabels], float] = {}
    for sample in _SAMPLE.finditer(page):
        value = _number_of_requests(sample["value"])
        if value is not None:
            key = sample["name"], _dividing_labels(sample["labels"] or b"")
            values[key] = max(value, values.get(key, 0.0))
    totals: dict[bytes, float] = {}
    for (name, _), value in values.items():
        totals[name] = totals.get(name, 0.0) + value
    return totals


def _dividing_labels(labels: bytes) -> _SampleLabels:
    """Return the labels whose samples count different requests."""
    return frozenset((name, value) for name, value in _LABEL.findall(labels) if name not in _SAME_REQUESTS_LABELS)


def _number_of_requests(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= _MAX_REQUESTS else None

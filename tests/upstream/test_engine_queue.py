"""The queue length of an inference engine, read from its Prometheus page over real sockets (D9)."""

import asyncio
import tracemalloc
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from batchline.domain.engine_queue import QueueLength
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.system import SystemClock
from batchline.upstream import engine_queue
from batchline.upstream.engine_queue import EngineQueueReader, parse_queue_length
from tests.support.raw_server import KEY, Behaviour, Peer, answer, chunked, serving

anyio = pytest.mark.anyio
MIB = 1024 * 1024

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/Model-8B"} 57.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/Model-8B"} 12.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/Model-8B",reason="capacity"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="org/Model-8B"} 1.234567e+06
"""
SGLANG = b"""\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 4.0
"""
LLAMA = b"""\
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 46
"""
TGI = b"""\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8
# TYPE tgi_queue_size gauge
tgi_queue_size 5
"""
WAITING = "vllm:num_requests_waiting"


@pytest.mark.rule("D9", "The queue lengths of vLLM, SGLang, llama.cpp and TGI are understood.")
@pytest.mark.parametrize(
    ("page", "length"),
    [
        (VLLM, QueueLength(running=57, waiting=12)),
        (SGLANG, QueueLength(running=3, waiting=4)),
        (LLAMA, QueueLength(running=4, waiting=46)),
        (TGI, QueueLength(running=8, waiting=5)),
    ],
    ids=["vllm", "sglang", "llamacpp", "tgi"],
)
def test_each_engine_is_understood_in_both_spellings(page: bytes, length: QueueLength) -> None:
    assert parse_queue_length(page) == length
    assert parse_queue_length(page.replace(b":", b"_")) == length
    assert parse_queue_length(page.replace(b"\n", b"\r\n")) == length


@pytest.mark.parametrize(
    ("samples", "waiting"),
    [
        ([f"{WAITING} 3"], 3),
        ([f"{WAITING}\t3"], 3),
        ([f"  {WAITING}   3  "], 3),
        ([f"{WAITING}{{}} 3"], 3),
        ([f"{WAITING}{{}}3"], 3),
        ([f'{WAITING} {{ model_name = "m" , }} 3'], 3),
        ([f"{WAITING} 3 1700000000000"], 3),
        ([f"{WAITING} 3 -1"], 3),
        ([f"{WAITING} 3 1700000000.123"], 3),
        ([f"{WAITING} 1.5e+01"], 15),
        ([f"{WAITING} +3."], 3),
        ([f"{WAITING} -0"], 0),
        ([f'{WAITING}{{model_name="a b {{c}} , d=\\"7\\" # \\\\"}} 3'], 3),
        ([f'{WAITING}{{model_name="}} 9"}} 3'], 3),
        ([f'{WAITING}{{model_name="\\n{WAITING} 9"}} 3'], 3),
        ([f'{WAITING}{{model_name="a\r{WAITING} 9"}} 3'], 3),
        ([f'{WAITING}{{"a.b"="1"}} 3', f'{WAITING}{{"a.b"="2"}} 4'], 7),
        ([f'{WAITING}{{model_name="\N{SNOWMAN}"}} 3'], 3),
    ],
)
def test_a_sample_may_be_written_in_any_valid_way(samples: list[str], waiting: float) -> None:
    assert parse_queue_length("\n".join(samples).encode()) == QueueLength(running=None, waiting=waiting)


@pytest.mark.parametrize(
    "line",
    [
        f"# {WAITING} 3",
        f"#{WAITING} 3",
        f"{WAITING}",
        f"{WAITING} ",
        f"{WAITING}3",
        f"{WAITING}_total 3",
        f"my_{WAITING} 3",
        f"{WAITING} NaN",
        f"{WAITING} +Inf",
        f"{WAITING} -1",
        f"{WAITING} 1e300",
        f"{WAITING} 1e999",
        f"{WAITING} 1e",
        f"{WAITING} 1_000",
        f"{WAITING} 0x10",
        f"{WAITING} three",
        f"{WAITING} \u0663",
        f"{WAITING} 3 now",
        f"{WAITING} 3 4 5",
        f"{WAITING}{{ 3",
        f'{WAITING}{{model_name="m}} 3',
        f'{WAITING}{{model_name="m\\"}} 3',
        f'{WAITING}{{model_name="m"}}',
        f"{WAITING} {'9' * 100}",
        f"say {WAITING} 3",
        f'{{"{WAITING}": 3}}',
        "vllm:num_requests_running 3",
    ],
)
def test_a_line_that_is_no_number_of_waiting_requests_counts_as_nothing(line: str) -> None:
    assert parse_queue_length(line.encode()) is None
    assert parse_queue_length(f"{line}\n{WAITING} 7\n{line}\n".encode()) is not None


@pytest.mark.rule("D9", "The queues of several models and replicas behind one upstream are added up.")
def test_the_samples_of_several_models_and_replicas_are_added_up() -> None:
    page = "\n".join(
        f'{name}{{engine="{engine}",model_name="{model}"}} {value}'
        for name, value in ((WAITING, 2.5), ("vllm:num_requests_running", 10))
        for engine in (0, 1)
        for model in ("a", "b")
    )
    assert parse_queue_length(page.encode()) == QueueLength(running=40, waiting=10)


def test_the_ranks_of_one_replica_count_the_same_requests() -> None:
    """SGLang writes a sample for each pipeline rank, and on request for each tensor rank."""
    page = "\n".join(
        f'sglang:num_queue_reqs{{dp_rank="{dp}",model_name="m",pp_rank="{pp}",tp_rank="{tp}"}} {10 + pp}'
        for dp in (0, 1)
        for pp in (0, 1)
        for tp in (0, 1)
    )
    assert parse_queue_length(page.encode()) == QueueLength(running=None, waiting=22)


def test_priorities_are_not_added_to_their_total() -> None:
    """SGLang with --enable-priority-scheduling."""
    page = "\n".join(
        f'sglang:num_queue_reqs{{model_name="m",priority="{priority}"}} {value}'
        for priority, value in (("1", 2), ("", 5), ("9", 3))
    )
    assert parse_queue_length(page.encode()) == QueueLength(running=None, waiting=5)


def test_a_page_in_both_spellings_or_of_two_engines_is_not_counted_twice() -> None:
    assert parse_queue_length(VLLM + VLLM.replace(b":", b"_")) == QueueLength(running=57, waiting=12)
    assert parse_queue_length(LLAMA + VLLM) == QueueLength(running=57, waiting=12)
    assert parse_queue_length(VLLM + VLLM) == QueueLength(running=57, waiting=12)


labels = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), st.text(max_size=20), max_size=4)


@given(st.lists(st.tuples(labels, st.integers(0, 10**6)), min_size=1, max_size=8))
def test_what_the_official_client_writes_is_read_back(samples: list[tuple[dict[str, str], int]]) -> None:
    """For any values of the labels, quotes, line ends and braces included."""
    names = sorted({f"label_{name}" for some, _ in samples for name in some})
    registry = CollectorRegistry()
    waiting = Gauge(WAITING, 'Text with { and " and \\ and\nlines.', names, registry=registry)
    written: dict[tuple[str, ...], int] = {}
    for some, value in samples:
        key = tuple(some.get(name.removeprefix("label_"), "") for name in names)
        (waiting.labels(*key) if names else waiting).set(value)
        written[key] = value
    assert parse_queue_length(generate_latest(registry)) == QueueLength(running=None, waiting=sum(written.values()))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_make_it_fail(before: bytes, after: bytes) -> None:
    parse_queue_length(before + b"\n" + WAITING.encode() + after)
    length = parse_queue_length(before + b"\n" + WAITING.encode() + b" 3\n" + after)
    assert length is None or length.waiting >= 0


@pytest.mark.parametrize(
    "line", [b'{a="' + b"\\" * MIB, b'{a="b",' * 100_000, b"{" * MIB, b" " * MIB + b"x", b" " + b"1" * MIB, b"\n" * MIB]
)
def test_no_page_takes_long(line: bytes) -> None:
    """A pattern that backtracks would take minutes for these."""
    assert parse_queue_length(WAITING.encode() + line) is None


def reader(
    port: int, *, base: str = "/v1", api_key: str | None = KEY, headers: Mapping[str, str] | None = None
) -> EngineQueueReader:
    url = f"http://127.0.0.1:{port}{base}"
    return EngineQueueReader(url, api_key=api_key, headers=headers or {}, clock=SystemClock())


async def read(behave: Behaviour) -> QueueLength | Reply | None:
    async with serving(behave) as wire:
        return await reader(wire.port).read()


def sends(data: bytes) -> Behaviour:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        await peer.left()

    return behave


@anyio
@pytest.mark.rule("D9", "The queue length comes from the engine's own page /metrics.")
@pytest.mark.parametrize("wire", [answer(VLLM), chunked(VLLM[:100], VLLM[100:])], ids=["plain", "chunked"])
async def test_the_page_of_an_engine_is_read(wire: bytes) -> None:
    assert await read(sends(wire)) == QueueLength(running=57, waiting=12)


@anyio
@pytest.mark.parametrize(("base", "target"), [("/v1", "/metrics"), ("/v1/", "/metrics"), ("/x/v1", "/x/metrics")])
async def test_the_request_goes_to_the_same_origin_with_the_same_credentials(base: str, target: str) -> None:
    """It has the key and the headers of the upstream, and it is a GET request."""
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(answer(VLLM))
        await peer.left()

    async with serving(behave) as wire:
        await reader(wire.port, base=base, headers={"X-Team": "batch"}).read()
        await reader(wire.port, base=base, api_key=None).read()
    with_key, without_key = seen
    assert with_key.startswith(f"GET {target} HTTP/1.1\r\n".encode())
    assert f"\r\nAuthorization: Bearer {KEY}\r\n".encode() in with_key
    assert b"\r\nX-Team: batch\r\n" in with_key
    assert b"Authorization" not in without_key


@anyio
async def test_each_read_has_its_own_connection() -> None:
    """A server that closes idle connections after 5 s would close it at the moment of the next read."""
    async with serving(sends(answer(VLLM))) as wire:
        queue = reader(wire.port)
        for _ in range(3):
            assert await queue.read() == QueueLength(running=57, waiting=12)
        assert wire.accepted == 3


@anyio
@pytest.mark.parametrize(
    "wire",
    [
        answer(b"not found", status="404 Not Found"),
        answer(VLLM, status="404 Not Found"),
        answer(b"", 'WWW-Authenticate: Bearer realm="x"', status="401 Unauthorized"),
        answer(b"", status="403 Forbidden"),
        answer(b"", status="405 Method Not Allowed"),
        answer(b'{"error":"start with --metrics"}', status="501 Not Implemented"),
        answer(b"", status="204 No Content"),
        answer(b""),
        answer(b'{"vllm:num_requests_waiting": 3}'),
        answer(b"<!doctype html>\n<p>vllm:num_requests_waiting 3</p>\n"),
        answer(b"# TYPE process_open_fds gauge\nprocess_open_fds 45.0\n"),
        answer(bytes(range(256)) * 100),
        answer(VLLM, "Content-Encoding: gzip"),
        b"\x16\x03\x01\x02\x00\x01 this is not HTTP",
    ],
)
async def test_a_server_that_reports_no_queue_is_recognized(wire: bytes) -> None:
    assert await read(sends(wire)) is None


@anyio
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
async def test_a_redirect_is_not_followed(status: str) -> None:
    """The key must not reach another server."""
    async with serving(sends(answer(VLLM))) as other:
        location = f"Location: http://127.0.0.1:{other.port}/metrics"
        assert await read(sends(answer(b"", location, status=status))) is None
        assert other.accepted == 0


@anyio
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_failing_server_is_told_from_one_without_a_queue(status: int) -> None:
    reply = await read(sends(answer(b"", status=f"{status} Status")))
    assert isinstance(reply, Answer)
    assert reply.status == status


@anyio
async def test_a_server_that_is_gone_is_told_from_one_without_a_queue() -> None:
    async def hang_up(peer: Peer) -> None:
        await peer.request()

    async with serving(hang_up) as wire:
        broken = await reader(wire.port).read()
    refused = await reader(wire.port).read()
    assert [reply.kind for reply in (broken, refused) if isinstance(reply, Fault)] == [
        FaultKind.BROKEN,
        FaultKind.REFUSED,
    ]


async def _say_nothing(peer: Peer) -> None:
    await peer.left()


async def _drip(peer: Peer) -> None:
    await peer.send(answer(VLLM)[:-1])
    await peer.left()


@anyio
@pytest.mark.parametrize("behave", [_say_nothing, _drip])
async def test_a_slow_page_is_given_up(behave: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_queue, "_TIMEOUT_SECONDS", 0.1)
    reply = await read(behave)
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.TIMEOUT


@anyio
@pytest.mark.parametrize("announced", [True, False])
async def test_a_huge_page_is_not_read(announced: bool) -> None:
    """Over 1 MiB: neither if its length is announced, nor if it never ends."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        if announced:
            await peer.send(answer(VLLM + b"#" * MIB))
        else:
            await peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + VLLM)
            while True:
                await peer.send(b"#" * 65536)

    tracemalloc.start()
    try:
        assert await read(behave) is None
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@anyio
async def test_a_page_below_the_limit_is_read() -> None:
    page = b"# " + b"x" * (MIB - 2 - len(VLLM) - 1) + b"\n" + VLLM
    assert len(page) == MIB
    assert await read(sends(answer(page))) == QueueLength(running=57, waiting=12)


@anyio
async def test_a_read_can_be_cancelled() -> None:
    arrived = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        arrived.set()
        await peer.left()

    async with serving(behave) as wire:
        reading = asyncio.create_task(reader(wire.port).read())
        await arrived.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


@anyio
async def test_a_real_engine_is_read(llama_url: str) -> None:
    """llama.cpp itself, started with its page."""
    length = await EngineQueueReader(llama_url, api_key=None, headers={}, clock=SystemClock()).read()
    assert isinstance(length, QueueLength)
    assert length.waiting >= 0
    assert length.running is not None

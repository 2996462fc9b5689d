"""The messages between `batchline serve` and its worker processes.

They travel over the child's stdin and stdout as msgpack, each one behind its length.
"""

from asyncio import StreamReader
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder
from pydantic import SecretStr

from batchline.domain.fleet import Report
from batchline.settings import Settings
from batchline.telemetry.aggregate import MetricSample

_LENGTH_BYTES = 4


class StartMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a child. It carries all settings, secrets included: no other process can read the pipe."""

    owner: str
    settings: Mapping[str, Any]


class SharesMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The reply to a heartbeat: how many lines the child may have in flight, by upstream."""

    shares: dict[str, int]


class StopMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The request to start nothing more, to let what is in flight finish, and to end."""


class HeartbeatMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The state of a child, and its metrics so far."""

    report: Report
    caps: Mapping[str, int]
    cpu_share: float
    """The share of one core that the child used since its last heartbeat."""
    samples: Sequence[MetricSample]


class BatchLeftMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The child holds no shard of a batch any more, so the batch may be ready to finalize."""


class GoodbyeMessage(Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a child, with the final state of its metrics."""

    samples: Sequence[MetricSample]


ToWorker = StartMessage | SharesMessage | StopMessage
FromWorker = HeartbeatMessage | BatchLeftMessage | GoodbyeMessage


def _plain(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


_encoder = Encoder(enc_hook=_plain)
_to_worker: Decoder[ToWorker] = Decoder(ToWorker)
_from_worker: Decoder[FromWorker] = Decoder(FromWorker)


def encode_message(message: ToWorker | FromWorker) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_to_worker(reader: StreamReader) -> ToWorker:
    """Return the next message to a child. Raise IncompleteReadError at the end of the stream."""
    return _to_worker.decode(await _read(reader))


async def read_from_worker(reader: StreamReader) -> FromWorker:
    """Return the next message from a child. Raise IncompleteReadError at the end of the stream."""
    return _from_worker.decode(await _read(reader))


async def _read(reader: StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big"))


def dump_settings(settings: Settings) -> dict[str, Any]:
    """Return every setting with its value, so that a child reads neither the file nor the variables again."""
    return settings.model_dump(exclude={"config"})

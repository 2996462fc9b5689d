"""What `batchline serve` and its hands say to each other over the hand's stdin and stdout: messages in msgpack, each
behind its length."""

from asyncio import StreamReader
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder
from pydantic import SecretStr

from batchline.domain.fleet import Report
from batchline.settings import Settings
from batchline.telemetry.elsewhere import Counted

_LENGTH_BYTES = 4


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """The first word to a hand. The settings are whole, secrets too: a pipe is not for others to read."""

    owner: str
    settings: Mapping[str, Any]


class Allowed(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a beat: lines that may be in flight, by upstream."""

    shares: dict[str, int]


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Start nothing more, let what is in flight finish, and end."""


class Beat(Struct, frozen=True, kw_only=True, tag=True):
    report: Report
    caps: Mapping[str, int]
    busy: float
    """What part of a core it used."""
    numbers: Sequence[Counted]


class ShardDone(Struct, frozen=True, kw_only=True, tag=True):
    """A batch may be over."""


class Farewell(Struct, frozen=True, kw_only=True, tag=True):
    """The last numbers."""

    numbers: Sequence[Counted]


ToHand = Begin | Allowed | Stop
FromHand = Beat | ShardDone | Farewell


def _plain(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


_encoder = Encoder(enc_hook=_plain)
_to_hand: Decoder[ToHand] = Decoder(ToHand)
_from_hand: Decoder[FromHand] = Decoder(FromHand)


def packed(message: ToHand | FromHand) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_to_hand(reader: StreamReader) -> ToHand:
    """Raises IncompleteReadError at the end."""
    return _to_hand.decode(await _read(reader))


async def read_from_hand(reader: StreamReader) -> FromHand:
    """Raises IncompleteReadError at the end."""
    return _from_hand.decode(await _read(reader))


async def _read(reader: StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big"))


def told_settings(settings: Settings) -> dict[str, Any]:
    """Every setting as it was found, so that the file and the variables it came from are not read again."""
    return settings.model_dump(exclude={"config"})

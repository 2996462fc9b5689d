"""Input files to validate, built line by line."""

import json
from pathlib import Path
from typing import Any

from batchline.domain.limits import InputLimits
from batchline.domain.lines import Line, decode_lines
from batchline.pipeline.validate import validate_file
from batchline.ports import Verdict

CHAT = "/v1/chat/completions"
EMBED = "/v1/embeddings"
BOM = b"\xef\xbb\xbf"


class Bench:
    """Validates files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "input.jsonl"
        self.work = folder / "work"

    def validate(self, data: bytes, *, endpoint: str = CHAT, limits: InputLimits | None = None) -> Verdict:
        self.source.write_bytes(data)
        return validate_file(
            source=self.source, work=self.work, endpoint=endpoint, limits=InputLimits() if limits is None else limits
        )

    def faults(self, *lines: bytes, endpoint: str = CHAT, limits: InputLimits | None = None) -> list[tuple[str, Any]]:
        verdict = self.validate(b"\n".join(lines), endpoint=endpoint, limits=limits)
        if verdict.faults:
            assert verdict.shards == []
            assert verdict.lines == 0
        return [(fault.message, fault.line) for fault in verdict.faults]

    def kept(self, *lines: bytes, limits: InputLimits | None = None) -> list[Line]:
        verdict = self.validate(b"\n".join(lines), limits=limits)
        assert verdict.faults == []
        kept = list(decode_lines(self.work.read_bytes()))
        assert len(kept) == verdict.lines == sum(shard.lines for shard in verdict.shards)
        return kept


def line(custom_id: str = "a", **changes: Any) -> bytes:
    """Return a valid line with some fields changed. ``...`` removes a field."""
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def with_body(body: str) -> bytes:
    return f'{{"custom_id":"a","method":"POST","url":"{CHAT}","body":{body}}}'.encode()


def padded(size: int, custom_id: str = "a") -> bytes:
    """Return a valid line of exactly so many bytes."""
    bare = line(custom_id, body={"p": ""})
    return line(custom_id, body={"p": "x" * (size - len(bare))})

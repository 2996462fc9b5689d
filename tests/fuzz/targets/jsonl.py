"""An input file of a batch, read by the validation and by Python's own JSON parser."""

import json
import math
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from batchline.domain import request_rules
from batchline.domain.limits import InputLimits, ShardLimits
from batchline.domain.lines import decode_lines
from batchline.domain.request_rules import FieldRules, RequestRules, strictest
from batchline.pipeline import validate
from batchline.pipeline.validate import validate_file

_CHAT = "/v1/chat/completions"
_SHARDS = ShardLimits(max_lines=4, max_bytes=4_000, min_lines=1, pieces=2, max_other_models=3)


def _limits() -> InputLimits:
    linked = FieldRules(media_hosts=frozenset({"img.example"}))
    return InputLimits(
        max_bytes=60_000,
        max_lines=40,
        max_line_bytes=8_000,
        endpoints=(_CHAT, "/v1/embeddings"),
        models=frozenset({"m"}),
        rules=RequestRules(default=strictest([FieldRules(), linked]), by_model={"m": FieldRules()}),
    )


class JsonLinesTarget:
    """A file is refused with its faults, or its work file has what another parser reads in the same lines."""

    name = "jsonl"
    modules: tuple[ModuleType, ...] = (validate, request_rules)
    seeds: tuple[bytes, ...] = ()
    dictionary: tuple[bytes, ...] = (
        *(
            b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n',
            b"\n",
            b"\r\n",
            b"\r",
        ),
        *(
            b'"custom_id":',
            b'"method":',
            b'"url":',
            b'"body":',
            b'"model":',
            b'"Model":',
            b'"stream":true',
            b'"stream":1',
        ),
        *(
            b'"messages":[{"role":"user","content":"',
            b'"content":[{"type":"image_url","image_url":{"url":"http://h/"}}]',
        ),
        *(
            b'"tools":[{"type":"web_search"}]',
            b'{"file_id":"f"}',
            b'{"type":"item_reference"}',
            b'"id":"i"',
            b'"image":"http://h/"',
            b'"chat_template_kwargs":{"chat_template":"t"}',
            b'"input":',
            b'"prompt":',
            b'"background":true',
            b"/v1/embeddings",
            b"post",
        ),
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b'"',
            b"\\",
            b"\\ud800",
            b"\\u0066",
            b"\\ud83d\\ude00",
            b"\\u0000",
            b"null",
            b"1e999",
        ),
        *(
            b"\xef\xbb\xbf",
            b"\xed\xa0\x80",
            b"\xc3",
            b"\xe2\x80\xa8",
            b"\x00",
            b"\x0c",
            b" ",
            b"\t",
            b"NaN",
            b"-0",
            b"{}",
        ),
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=_memory())

    def run(self, data: bytes) -> None:
        source, work = Path(self._folder.name, "source"), Path(self._folder.name, "work")
        source.write_bytes(data)
        verdict = validate_file(source=source, work=work, endpoint=_CHAT, limits=_limits(), shards=_SHARDS)
        if verdict.faults:
            assert not verdict.shards
            assert all(fault.message for fault in verdict.faults)
            return
        kept = work.read_bytes()
        written = [
            line for each in verdict.shards for line in decode_lines(kept[each.offset : each.offset + each.length])
        ]
        assert sorted(line.index for line in written) == list(range(verdict.lines))
        given = [json.loads(text, parse_constant=_refuse) for text in _text_lines(data)]
        assert len(given) == verdict.lines
        for line in written:
            request = given[line.index]
            assert json.loads(line.custom_id) == request["custom_id"]
            assert _same(json.loads(line.body), request["body"])

    def close(self) -> None:
        self._folder.cleanup()


def _text_lines(data: bytes) -> list[str]:
    text = data.removeprefix(b"\xef\xbb\xbf").decode()
    return [line for line in text.split("\n") if line.strip(" \t\r")]


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def _same(left: Any, right: Any) -> bool:
    """Compare documents; an infinite number stands for any that is too large."""
    if isinstance(left, float) and isinstance(right, float) and math.isinf(left):
        return math.isinf(right)
    return bool(left == right)


def _memory() -> str | None:
    """Return the folder of a file system in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

"""Validation of input files, message by message (C2, C3, C5, C7, C14)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.limits import InputLimits
from batchline.domain.records import SHARED_LANE
from batchline.domain.request_rules import FieldRules, RequestRules
from tests.support.input_files import BOM, CHAT, EMBED, Bench, line, with_body

TWO_ENDPOINTS = InputLimits(endpoints=(CHAT, EMBED))
_RULED = InputLimits(rules=RequestRules())
DEEP = 100_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


NOT_JSON = {
    "cut off": b"{",
    "NaN": with_body('{"a":NaN}'),
    "Infinity": with_body('{"a":-Infinity}'),
    "trailing comma": with_body('{"a":1,}'),
    "single quotes": b"{'custom_id':'a'}",
    "two values": line() + line(),
    "comment": line() + b"//",
    "leading zero": with_body('{"a":01}'),
    "lone surrogate in the body": with_body('{"a":"\\ud800 and more text"}'),
    "lone surrogate in a key": with_body('{"\\udc00":1}'),
    "lone surrogate in custom_id": b'{"custom_id":"\\ud800"}',
    "control character": with_body('{"a":"\x01"}'),
    "UTF-8 broken in the body": with_body('{"a":"?"}').replace(b"?", b"\xff"),
    "UTF-8 broken in custom_id": line("?").replace(b"?", b"\xc3"),
    "UTF-8 surrogate": with_body('{"a":"?"}').replace(b"?", b"\xed\xa0\x80"),
    "UTF-16": line().decode().encode("utf-16-be"),
    "byte-order mark past the start": BOM + line(),
    "form feed": b"\x0c",
    "deep array": with_body('{"a":' + "[" * DEEP + "]" * DEEP + "}"),
    "array that is too deep for some": with_body('{"a":' + "[" * 900 + "]" * 900 + "}"),
    "deep object": with_body('{"a":' * DEEP + "1" + "}" * DEEP),
    "deep where an object should be": b"[" * DEEP + b"]" * DEEP,
    "broken after a wrong type": b'{"custom_id":1,"method":"POST",}',
}


@pytest.mark.rule("C4", "Blank is only space, tab and CR.")
@pytest.mark.rule("C4", "UTF-8 is required.")
@pytest.mark.rule("C4", "Nesting that breaks a parser is not valid JSON, never a crash.")
@pytest.mark.parametrize("bad", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_rfc_8259_is_refused(bench: Bench, bad: bytes) -> None:
    """C2, C4: strict JSON in UTF-8, and a parser that breaks is a refusal, never a crash."""
    assert bench.faults(line("0"), bad) == [("Line 2 is not valid JSON", 2)]


@pytest.mark.parametrize("bad", [b"[]", b"1", b'"text"', b"null", b"true", b"[1]", b" -1.5e3 "])
def test_a_line_must_be_an_object(bench: Bench, bad: bytes) -> None:
    """C2."""
    assert bench.faults(line("0"), bad) == [("Line 2 must be a JSON object", 2)]


def shown(value: object) -> str:
    return f"{value!r:.20}"


@pytest.mark.rule("C2", "Messages are exactly the contract's: a missing custom_id.")
@pytest.mark.parametrize("bad", [..., "", 1, None, [], {}], ids=shown)
def test_custom_id_is_a_non_empty_string(bench: Bench, bad: object) -> None:
    """C2, C5."""
    assert bench.faults(line("0"), line(custom_id=bad)) == [("Line 2 is missing custom_id", 2)]  # type: ignore[arg-type]


@pytest.mark.rule("C2", "Messages: a custom_id that was used before.")
def test_custom_ids_are_unique(bench: Bench) -> None:
    """C2, C5: compared as text, however it is escaped."""
    assert bench.faults(line("é"), line("b"), b"{}", line("é")) == [
        ("Line 3 is missing custom_id", 3),
        ('Line 4 duplicates custom_id "é"', 4),
    ]
    escaped, raw = json.dumps("é").encode(), '"é"'.encode()
    assert escaped != raw
    assert bench.faults(line("é"), line("é").replace(escaped, raw)) == [('Line 2 duplicates custom_id "é"', 2)]


@pytest.mark.parametrize("length", [1, 39, 40, 41, 500])
@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_custom_ids_are_compared_whole(bench: Bench, letter: str, length: int) -> None:
    """C5: to the last character, however long they are and however they are remembered."""
    one, other = (letter * (length - 1) + last for last in "ab")
    assert len(bench.kept(line(one), line(other))) == 2
    assert bench.faults(line(one), line(other), line(one)) == [
        (f'Line 3 duplicates custom_id "{one[:200]}"', 3),
    ]


def test_an_offending_line_has_used_its_custom_id(bench: Bench) -> None:
    """C2: a previous line already used it, whatever else was wrong there."""
    assert bench.faults(line("a", method="GET"), line("a")) == [
        ('Line 1 method must be "POST"', 1),
        ('Line 2 duplicates custom_id "a"', 2),
    ]


@pytest.mark.rule("C2", "Messages: a method that is not POST.")
@pytest.mark.parametrize("bad", [..., "GET", "", " POST", "PO\u017fT", "po\u017ft", None, 1, ["POST"]], ids=shown)
def test_method_is_post(bench: Bench, bad: object) -> None:
    """C2, C5."""
    assert bench.faults(line("0"), line(method=bad)) == [('Line 2 method must be "POST"', 2)]


@pytest.mark.parametrize("good", ["post", "Post", "pOsT"])
def test_the_case_of_the_method_does_not_matter(bench: Bench, good: str) -> None:
    """C5."""
    assert len(bench.kept(line(method=good))) == 1


@pytest.mark.parametrize("bad", [..., None, 1, [CHAT], {}], ids=shown)
def test_url_is_a_string(bench: Bench, bad: object) -> None:
    """C2: also where no line has said yet what the url of the file is."""
    assert bench.faults(line("0"), line(url=bad)) == [("Line 2 is missing url", 2)]
    assert bench.faults(line(url=bad)) == [("Line 1 is missing url", 1)]


@pytest.mark.rule("C2", "Messages: a url that is no batch endpoint.")
@pytest.mark.parametrize("bad", ["", EMBED, CHAT + "/", CHAT.upper(), " " + CHAT, "https://h" + CHAT])
def test_url_is_exactly_an_allowed_endpoint(bench: Bench, bad: str) -> None:
    """C2, C5, C14."""
    assert bench.faults(line("0"), line(url=bad)) == [(f'Line 2 url "{bad}" is not an allowed batch endpoint', 2)]


@pytest.mark.rule("C2", "Messages: a url that differs from the first line's.")
def test_lines_share_one_url(bench: Bench) -> None:
    """C2, C4: Y is the first line's url."""
    lines = [line("0", url=EMBED), line("1"), line("2", url=EMBED)]
    message = f'Line 2 url "{CHAT}" does not match the batch endpoint "{EMBED}"'
    assert bench.faults(*lines, endpoint=EMBED, limits=TWO_ENDPOINTS) == [(message, 2)]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (line(..., url=EMBED), "Line 1 is missing custom_id"),  # type: ignore[arg-type]
        (line("0", url=EMBED, body=1), "Line 1 is missing body"),
    ],
    ids=["custom_id", "body"],
)
def test_the_first_url_counts_on_an_offending_line_too(bench: Bench, first: bytes, message: str) -> None:
    """C4: the first line's url is Y even if that line has another fault."""
    mismatch = f'Line 2 url "{CHAT}" does not match the batch endpoint "{EMBED}"'
    assert bench.faults(first, line("1"), limits=TWO_ENDPOINTS) == [(message, 1), (mismatch, 2)]


@pytest.mark.parametrize("first", [b"{", line("0", url="/nowhere"), line("0", url=...)], ids=["json", "url", "none"])
def test_without_an_allowed_first_url_the_next_one_counts(bench: Bench, first: bytes) -> None:
    """C4: lines are measured against a url they can match."""
    faults = bench.faults(first, line("1", url=EMBED), line("2"), limits=TWO_ENDPOINTS)
    assert faults[1:] == [(f'Line 3 url "{CHAT}" does not match the batch endpoint "{EMBED}"', 3)]


@pytest.mark.parametrize("bad", [..., None, {}, [], [{"a": 1}], "text", 1, True], ids=shown)
def test_body_is_a_non_empty_object(bench: Bench, bad: object) -> None:
    """C2, C5."""
    assert bench.faults(line("0"), line(body=bad)) == [("Line 2 is missing body", 2)]


@pytest.mark.rule("C2", "Messages: stream=true.")
@pytest.mark.parametrize("body", ['{"stream":true}', '{"a":1,"stream" :\ttrue }', '{"str\\u0065am":true}'])
def test_streaming_is_refused(bench: Bench, body: str) -> None:
    """C2: on the body's own value, however it is written."""
    message = "Line 2 has stream=true; streaming is not supported in batch mode"
    assert bench.faults(line("0"), with_body(body)) == [(message, 2)]


@pytest.mark.parametrize("body", ['{"stream":false}', '{"stream":null}', '{"stream":"true"}', '{"a":{"stream":true}}'])
def test_only_true_means_streaming(bench: Bench, body: str) -> None:
    """C2."""
    assert len(bench.kept(with_body(body))) == 1


@pytest.mark.rule("D6", "A line with a field that may not reach the upstream is refused.")
@pytest.mark.parametrize(
    ("body", "offence"),
    [
        ('{"Model":"dear"}', '"Model" is not a field; write model'),
        ('{"m\\u006fdels":["dear"]}', '"models" may not be set at this service'),
        ('{"tools":[{"type":"mcp"}]}', '"tools" may only have tools of these types: custom, function'),
    ],
)
def test_a_field_that_may_not_reach_the_upstream_is_refused(bench: Bench, body: str, offence: str) -> None:
    """D6: with all other faults of the file, before anything runs."""
    message = f"Line 2 has a body that is not allowed: {offence}"
    assert bench.faults(line("0"), with_body(body), limits=_RULED) == [(message, 2)]
    own = RequestRules(by_model={"own": FieldRules(forbidden=frozenset({"seed"}))})
    seeded = with_body('{"model":"own","seed":1}')
    assert bench.faults(line("0"), seeded, limits=InputLimits(rules=own)) == [
        ('Line 2 has a body that is not allowed: "seed" may not be set at this service', 2)
    ]


@pytest.mark.parametrize("flag", ["1", '"true"', "[true]"])
def test_a_stream_that_is_no_flag_is_refused(bench: Bench, flag: str) -> None:
    """D6: an upstream may take it for true."""
    message = "Line 2 has a stream that is neither false nor null"
    assert bench.faults(line("0"), with_body(f'{{"stream":{flag}}}'), limits=_RULED) == [(message, 2)]


@pytest.mark.rule("C4", "The size is checked first, then the order of C2.")
def test_the_first_rule_that_fails_is_the_lines_error(bench: Bench) -> None:
    """C4: the size, then the order of C2; mending one fault brings out the next."""
    everything_wrong: dict[str, Any] = {"custom_id": "", "method": "GET", "url": None, "body": {}, "pad": "x" * 300}
    limits = InputLimits(max_line_bytes=300, endpoints=(CHAT, EMBED))
    mends: list[tuple[dict[str, Any], str]] = [
        ({}, "Line 2 exceeds maximum size of 300 bytes"),
        ({"pad": ""}, "Line 2 is missing custom_id"),
        ({"custom_id": "0"}, 'Line 2 duplicates custom_id "0"'),
        ({"custom_id": "1"}, 'Line 2 method must be "POST"'),
        ({"method": "POST"}, "Line 2 is missing url"),
        ({"url": "/x"}, 'Line 2 url "/x" is not an allowed batch endpoint'),
        ({"url": EMBED}, f'Line 2 url "{EMBED}" does not match the batch endpoint "{CHAT}"'),
        ({"url": CHAT}, "Line 2 is missing body"),
        ({"body": {"stream": True}}, "Line 2 has stream=true; streaming is not supported in batch mode"),
    ]
    for mend, message in mends:
        everything_wrong |= mend
        assert bench.faults(line("0"), json.dumps(everything_wrong).encode(), limits=limits) == [(message, 2)]
    assert bench.faults(b"{" + b"x" * 300, limits=limits) == [("Line 1 exceeds maximum size of 300 bytes", 1)]


@pytest.mark.rule("C4", "X and Y are cut at 200 characters.")
def test_quotes_are_cut(bench: Bench) -> None:
    """C4: X and Y at 200 characters, not bytes."""
    long, other = "é" * 300, "/" + "y" * 300
    shown = "é" * 200
    limits = InputLimits(endpoints=(other, long))
    assert bench.faults(line(long), line(long)) == [(f'Line 2 duplicates custom_id "{shown}"', 2)]
    assert bench.faults(line(url=long)) == [(f'Line 1 url "{shown}" is not an allowed batch endpoint', 1)]
    assert bench.faults(line("0", url=other), line("1", url=long), limits=limits) == [
        (f'Line 2 url "{shown}" does not match the batch endpoint "{other[:200]}"', 2)
    ]
    assert bench.faults(line(url=other), endpoint=long, limits=limits) == [
        (f'endpoint "{shown}" does not match the url "{other[:200]}" used by the input file', None)
    ]


@pytest.mark.rule("C2", "Messages: a file without lines.")
@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n\n", b" \t\r\n\r\n \t", b"\r", BOM, BOM + b"\r\n"])
def test_a_file_needs_a_line(bench: Bench, data: bytes) -> None:
    """C2, C4: blank is only space, tab and CR."""
    assert bench.faults(data) == [("Input file contains no JSONL lines", None)]


@pytest.mark.rule("C2", "Messages: an endpoint that the file does not use.")
def test_the_endpoint_is_compared_last(bench: Bench) -> None:
    """C2, C4: after every line passed, and it blames no line."""
    message = f'endpoint "{EMBED}" does not match the url "{CHAT}" used by the input file'
    assert bench.faults(line("0"), line("1"), endpoint=EMBED) == [(message, None)]
    assert bench.faults(line("0"), b"1", endpoint=EMBED) == [("Line 2 must be a JSON object", 2)]
    assert bench.faults(b"", endpoint=EMBED) == [("Input file contains no JSONL lines", None)]


def test_a_file_too_large_is_not_read(bench: Bench) -> None:
    """C2, C4, C14: known from its size; no line is blamed, not even a broken one."""
    good = line()
    message = f"Input file exceeds maximum size of {len(good)} bytes"
    limits = InputLimits(max_bytes=len(good))
    assert bench.faults(good, limits=limits) == []
    assert bench.faults(good + b"\n", limits=limits) == [(message, None)]
    assert bench.faults(b"{" * (len(good) + 1), limits=limits) == [(message, None)]


@pytest.mark.rule("C14", "Every limit is a setting, and noticed at the first line beyond.")
def test_too_many_lines_are_noticed_at_the_first_beyond(bench: Bench) -> None:
    """C2, C4, C14: noticed at the first line beyond the limit; blank lines are not counted; earlier faults first."""
    limits = InputLimits(max_lines=2)
    message = ("Input file exceeds maximum of 2 lines", None)
    assert bench.faults(b"", line("0"), b" ", line("1"), b"", b"\t", limits=limits) == []
    assert bench.faults(line("0"), line("1"), line("2"), limits=limits) == [message]
    assert bench.faults(line("0"), b"1", b"{", b"{", limits=limits) == [("Line 2 must be a JSON object", 2), message]
    assert bench.faults(line("0"), line("1"), line("2"), limits=limits, endpoint=EMBED) == [message]


def test_lines_that_offend_are_counted(bench: Bench) -> None:
    """C4: the limit is on the lines of the file, good or not, overlong ones too."""
    limits = InputLimits(max_lines=2, max_line_bytes=200)
    faults = bench.faults(b"x" * 500, b"{", line("2"), limits=limits)
    assert [message for message, _ in faults] == [
        "Line 1 exceeds maximum size of 200 bytes",
        "Line 2 is not valid JSON",
        "Input file exceeds maximum of 2 lines",
    ]


@pytest.mark.rule("C14", "The limits are the contract's by default.")
def test_the_contracts_limits_are_the_defaults() -> None:
    """C14."""
    assert InputLimits() == InputLimits(
        max_bytes=209_715_200, max_lines=50_000, max_line_bytes=1_048_576, endpoints=(CHAT,)
    )


@pytest.mark.rule("C3", "Up to 100 offending lines are listed.")
def test_up_to_a_hundred_faults_are_listed(bench: Bench) -> None:
    """C3: of the whole file, in its order."""
    faults = bench.faults(line("0"), *[b"1"] * 150)
    assert faults == [(f"Line {number} must be a JSON object", number) for number in range(2, 102)]


LOSSLESS = [
    '{"n":123456789012345678901234567890}',
    '{"n":' + "9" * 10_000 + "}",
    '{"n":[1.10,1e400,-0,-0.0,1E+2,0.1000000000000000055511151231257827]}',
    '{"z":1,"a":2,"m":{"z":1,"a":{"b":[]}}}',
    '{"t":"é漢😀\\u00e9\\ud83d\\ude00\\/\\u0000\u2028\u0085\x7f"}',
    '{"é😀":1,"":2}',
]


@pytest.mark.rule("C5", "body is handed on without loss.")
@pytest.mark.parametrize("body", LOSSLESS, ids=range(len(LOSSLESS)))
def test_bodies_lose_nothing(bench: Bench, body: str) -> None:
    """C4, C5: values keep their very bytes, keys their order."""
    assert bench.kept(with_body(body))[0].body.decode() == body


def test_of_a_repeated_key_the_last_counts_and_is_sent(bench: Bench) -> None:
    """C4: what was validated is what is sent."""
    one = b'{"custom_id":7,"custom_id":"a","method":"GET","method":"POST","url":"/x","url":"%s",' % CHAT.encode()
    body = b'"body":{"first":1},"body":{"stream":true,"model":"m","stream":false}}'
    kept = bench.kept(one + body)
    assert (kept[0].custom_id, kept[0].body) == (b'"a"', b'{"stream":false,"model":"m"}')
    message = "Line 1 has stream=true; streaming is not supported in batch mode"
    assert bench.faults(with_body('{"stream":false,"stream":true}')) == [(message, 1)]
    assert bench.faults(with_body('{"a":1},"body":{}')) == [("Line 1 is missing body", 1)]


@pytest.mark.rule("C5", "custom_id is unique in the file and returned verbatim.")
@pytest.mark.parametrize("custom_id", ["\u2028\u2029\u0085", '\x00\x1f"\\/', "é漢😀", " ", "x" * 900_000])
def test_custom_ids_are_kept_verbatim(bench: Bench, custom_id: str) -> None:
    """C5, D1: any Unicode, any length the line allows, and nothing in it ends a line of a result file."""
    text = bench.kept(line(custom_id))[0].custom_id.decode()
    assert json.loads(text) == custom_id
    assert text.splitlines() == [text]


@pytest.mark.rule("C7", "When a create is answered with 200, its work file is on the disk.")
def test_the_work_file_is_durable_before_the_verdict(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: synced when everything is in it; a refused file costs no sync."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    bench.kept(line("0"), line("1"))
    assert synced == [bench.work.stat().st_size]
    bench.faults(line("0"), b"1")
    assert len(synced) == 1


def test_prompts_that_begin_alike_stand_together_in_the_work_file(bench: Bench) -> None:
    """Whatever the file's order, an engine meets them one after another; each line keeps its index and its body."""
    systems = [f"{n} " * 100 for n in range(3)]
    chats = [
        [{"role": "system", "content": systems[n % 3]}, {"role": "user", "content": f"question {n}"}] for n in range(9)
    ]
    kept = bench.kept(*(line(f"c{n}", body={"messages": messages}) for n, messages in enumerate(chats)))
    assert [found.index for found in kept] == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    for found in kept:
        assert found.custom_id == f'"c{found.index}"'.encode()
        assert json.loads(found.body) == {"messages": chats[found.index]}


def test_an_input_file_gives_the_same_work_file_again(bench: Bench) -> None:
    """C12: whatever models are configured then, its lines are divided as they were."""
    models = [f"other-{n}" for n in range(70)] + ["zeta"]
    data = b"\n".join(line(str(n), body={"model": models[n % len(models)]}) for n in range(3 * len(models)))
    first = bench.validate(data, limits=InputLimits(models=frozenset(["zeta"])))
    written, own = bench.work.read_bytes(), {shard.model for shard in first.shards} - {SHARED_LANE}
    assert len(own) == 65
    limits = InputLimits.to_repeat(size=len(data), lines=first.lines, endpoint=CHAT, own_shards=own)
    assert bench.validate(data, limits=limits) == first
    assert bench.work.read_bytes() == written

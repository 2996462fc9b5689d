"""The script: what a prompt asks for, what the rates draw, and that a seed decides it all."""

import asyncio
import json
from collections import Counter
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.replies import Answer, Fault, FaultKind
from batchline.upstream.mock.directives import DirectiveInvalid, directive_for_attempt, parse_directives
from batchline.upstream.mock.script import Ending, Outcome, Plan, Script, ScriptedUpstream
from tests.support.raw_server import ManualClock

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


def chat(*contents: object, role: str = "user") -> bytes:
    messages = [{"role": role, "content": content} for content in contents]
    return json.dumps({"model": "some-model", "messages": messages}).encode()


def decide(prompt: str, *, plan: Plan | None = None) -> Outcome:
    return Script(plan).decide(CHAT, chat(prompt))


def error_of(outcome: Outcome) -> dict[str, object]:
    error = json.loads(outcome.body)["error"]
    assert isinstance(error, dict)
    return error


def test_the_answer_is_plainly_mechanical() -> None:
    """The shape is OpenAI's; the text says what it is, and repeats no more than 200 characters."""
    body = chat("first words", "x" * 300)
    document = json.loads(Script().decide(CHAT, body).body)
    assert document == {
        "id": document["id"],
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "some-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "scripted answer to: " + "x" * 200, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "system_fingerprint": "fp_scripted",
    }


def test_the_same_request_gets_the_same_answer() -> None:
    """D5: a line that is run again is answered alike, and another line is not."""
    script = Script()
    first, again, other = (script.decide(CHAT, chat(prompt)).body for prompt in ("a", "a", "b"))
    assert first == again
    assert json.loads(first)["id"] != json.loads(other)["id"]


def test_the_last_user_message_gives_the_directive() -> None:
    body = json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "[[status=500]]"},
                {"role": "user", "content": [{"type": "text", "text": "parts "}, {"type": "text", "text": "[[html]]"}]},
                {"role": "assistant", "content": "[[status=501]]"},
                {"role": "tool", "content": None},
            ],
        }
    ).encode()
    assert Script().decide(CHAT, body).content_type == "text/html"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("[[status=503]]", {"status": 503, "ending": Ending.WHOLE}),
        ("[[status=429 retry-after=1.5]]", {"status": 429, "retry_after": 1.5}),
        ("[[status=429]] please [[retry-after=2]]", {"status": 429, "retry_after": 2}),
        ("[[delay=1.5]]", {"status": 200, "delay": 1.5}),
        ("[[cut]]", {"ending": Ending.CUT, "status": 200}),
        ("[[drop delay=2]]", {"ending": Ending.DROP, "delay": 2}),
        ("[[hang]]", {"ending": Ending.HANG}),
        ("[[crash]]", {"ending": Ending.CRASH}),
        ("[[html]]", {"status": 200, "content_type": "text/html"}),
        ("[[html status=502]]", {"status": 502, "content_type": "text/html"}),
        ("[[redirect]]", {"status": 307, "location": "/v1/elsewhere"}),
        ("[[status=204]]", {"status": 204, "body": b""}),
        ("no [[Wiki link]] and no [[]] is a directive", {"status": 200, "ending": Ending.WHOLE}),
        ("[[status=503 ]] [[cut]]", {"status": 503, "ending": Ending.WHOLE}),
    ],
)
def test_directives(prompt: str, expected: dict[str, object]) -> None:
    """A user's own file can say what shall happen to each of its lines."""
    outcome = decide(prompt)
    assert {name: getattr(outcome, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "status", "type_and_code"),
    [
        ("[[error=context_length_exceeded]]", 400, ("invalid_request_error", "context_length_exceeded")),
        ("[[status=429]]", 429, ("rate_limit_exceeded", "rate_limit_exceeded")),
        ("[[status=429 error=insufficient_quota]]", 429, ("insufficient_quota", "insufficient_quota")),
        ("[[status=401]]", 401, ("authentication_error", None)),
        ("[[status=500]]", 500, ("server_error", None)),
    ],
)
def test_errors_have_the_usual_shape(prompt: str, status: int, type_and_code: tuple[str, str | None]) -> None:
    """D2: what tells one 400 or 429 from another stands in the error's code."""
    outcome = decide(prompt)
    error = error_of(outcome)
    assert (outcome.status, (error["type"], error["code"])) == (status, type_and_code)


@pytest.mark.parametrize(
    "directive",
    [
        "status=abc",
        "status",
        "status=199",
        "status=600",
        "status=５03",
        "delay=-1",
        "delay=nan",
        "delay=1e9",
        "huge=0",
        "huge=67108865",
        "huge",
        "cut=1",
        "times=0 cut",
        "cut drop",
        "cut cut",
        "status=500 status=501",
        "cut tims=2",
        "error=",
        "error=Not-A-Code",
    ],
)
def test_a_directive_that_cannot_be_followed_says_so(directive: str) -> None:
    """A slip in a test file shows at once, instead of quietly testing nothing."""
    outcome = decide(f"[[{directive}]]")
    assert outcome.status == 400
    assert "directive" in str(error_of(outcome)["message"]) or "contradicts" in str(error_of(outcome)["message"])


def test_directives_hold_for_the_tries_they_name() -> None:
    """D3: one after the other, then fine; every request is counted for itself."""
    script = Script()
    body = chat("[[status=503 times=1]] [[cut times=2]] [[delay=1 times=3]]")
    outcomes = [script.decide(CHAT, body) for _ in range(4)]
    assert [(outcome.status, outcome.ending, outcome.delay) for outcome in outcomes] == [
        (503, Ending.WHOLE, 1),
        (200, Ending.CUT, 1),
        (200, Ending.WHOLE, 1),
        (200, Ending.WHOLE, 0),
    ]
    assert script.decide(CHAT, chat("[[status=503 times=1]] another")).status == 503


@pytest.mark.parametrize("size", [1_000, 16 * 1024 * 1024])
@pytest.mark.parametrize("prompt", ["", "words", "makes the usage one digit longer "])
def test_huge_answers_have_exactly_the_size_asked_for(size: int, prompt: str) -> None:
    """D1: the limit on answers can be tried on both sides of the edge."""
    body = decide(f"[[huge={size}]]{prompt}").body
    assert len(body) == size
    assert json.loads(body)["object"] == "chat.completion"


def test_pretty_answers_say_the_same_over_many_lines() -> None:
    """D1: an answer with line breaks between its tokens."""
    body = decide("[[pretty]]").body
    assert body.count(b"\n") > 10
    assert json.loads(body)["choices"][0]["message"]["content"] == "scripted answer to: [[pretty]]"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model":"m"}',
        b'{"model":"m","messages":[],"input":[]}',
        b'{"model":"m","x":' + b"[" * 5000,
        b'{"model":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}],"input":"\\ud800"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
def test_what_is_no_request_is_told_so(path: str, body: bytes) -> None:
    assert Script().decide(path, body).status == 400


def test_unknown_paths_are_not_found() -> None:
    assert Script().decide("/v1/nothing", chat("a")).status == 404


@pytest.mark.parametrize(("given_input", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)])
def test_embeddings_are_small_and_mechanical(given_input: object, count: int) -> None:
    """C14: every kind of input OpenAI takes."""
    body = json.dumps({"model": "e", "input": given_input}).encode()
    document = json.loads(Script().decide(EMBEDDINGS, body).body)
    assert [len(item["embedding"]) for item in document["data"]] == [8] * count


def test_embeddings_follow_directives_too() -> None:
    body = json.dumps({"model": "e", "input": ["a", "[[status=500]]"]}).encode()
    assert Script().decide(EMBEDDINGS, body).status == 500


def fates(script: Script, *, count: int = 2000) -> list[str]:
    outcomes = (script.decide(CHAT, chat(f"line {n}")) for n in range(count))
    return [
        outcome.content_type if outcome.content_type == "text/html" else f"{outcome.ending} {outcome.status}"
        for outcome in outcomes
    ]


def test_rates_come_out_as_planned() -> None:
    """Shares of a plan are met over many requests, and what is not named is answered."""
    drawn = Counter(fates(Script(Plan(status={429: 10, 503: 5}, cut=20, html=10, redirect=5), seed=1)))
    expected = {"whole 429": 10, "whole 503": 5, "cut 200": 20, "text/html": 10, "whole 307": 5, "whole 200": 50}
    assert drawn.keys() == expected.keys()
    for fate, percent in expected.items():
        assert drawn[fate] / 20 == pytest.approx(percent, abs=2.5)


def test_a_seed_decides_and_another_decides_otherwise() -> None:
    plan = Plan(cut=50)
    assert fates(Script(plan, seed=1)) == fates(Script(plan, seed=1))
    assert fates(Script(plan, seed=1)) != fates(Script(plan, seed=2))


def test_each_try_is_drawn_anew() -> None:
    """D3: a line that failed by chance can succeed when it is tried again."""
    script = Script(Plan(cut=50))
    assert len({script.decide(CHAT, chat("a")).ending for _ in range(50)}) == 2


def test_directives_go_before_rates() -> None:
    """What a prompt says holds exactly, also for the tries after its faults."""
    script = Script(Plan(status={500: 100}, delay=3))
    body = chat("[[status=503 times=1]]")
    assert [script.decide(CHAT, body).status for _ in range(2)] == [503, 200]
    later = script.decide(CHAT, chat("[[delay=1]]"))
    assert (later.status, later.delay) == (500, 1)


def test_a_plan_can_change_while_tries_are_kept() -> None:
    script = Script(Plan(status={500: 100}))
    assert script.decide(CHAT, chat("a")).status == 500
    script.follow(Plan())
    assert script.decide(CHAT, chat("a")).status == 200
    assert list(script.tries.values()) == [2]


@pytest.mark.parametrize("status", [429, 503])
def test_the_plan_may_ask_for_patience(status: int) -> None:
    """D3: Retry-After goes with 429 and 503, not with other faults."""
    plan = Plan(retry_after=4)
    assert decide(f"[[status={status}]]", plan=plan).retry_after == 4
    assert decide("[[status=500]]", plan=plan).retry_after is None


@pytest.mark.parametrize(
    "text", ['{"cut": 60, "drop": 41}', '{"cut": -1}', '{"cats": 1}', '{"status": {"99": 1}}', '{"delay": -1}']
)
def test_a_plan_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Plan)


def test_shares_that_add_up_to_a_hundred_are_fine() -> None:
    """Sums of decimals are a hair over 100 in floating point."""
    assert fates(Script(Plan(status={500: 33.3, 502: 33.3, 503: 16.7}, cut=16.7)), count=50).count("whole 200") == 0


def test_in_process_delays_pass_on_the_clock() -> None:
    """The simulation's time is the only one there is."""
    clock = ManualClock()
    upstream = ScriptedUpstream(
        Script(), clock=clock, request_timeout=600, max_answer_bytes=10_000, on_crash=lambda: None
    )
    assert isinstance(asyncio.run(upstream.post(CHAT, chat("[[delay=500]]"))), Answer)
    assert clock.seconds == 500
    reply = asyncio.run(upstream.post(CHAT, chat("[[hang]]")))
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.TIMEOUT
    assert clock.seconds == 1100


@given(st.text(max_size=80) | st.text(alphabet="[]= cutstatus503times\n", max_size=60))
def test_no_prompt_breaks_the_reader(text: str) -> None:
    """Prompts are anybody's text."""
    with suppress(DirectiveInvalid):
        directive_for_attempt(parse_directives(f"[[{text}]] [[status={text}"), 1)

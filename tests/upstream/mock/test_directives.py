"""Directives: what a prompt may ask the mock upstream to do, and which brackets are invalid."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.upstream.mock.directives import DirectiveInvalid, directive_for_attempt, parse_directives
from batchline.upstream.mock.script import Ending, Script, ScriptedOutcome

CHAT = "/v1/chat/completions"


def chat(prompt: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()


def decide(prompt: str) -> ScriptedOutcome:
    return Script().decide(CHAT, chat(prompt))


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
    """A user's file can say what happens to each of its lines."""
    outcome = decide(prompt)
    assert {name: getattr(outcome, name) for name in expected} == expected


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
def test_an_invalid_directive_is_answered_with_400(directive: str) -> None:
    """A typing error in a test file shows at once, instead of silently testing nothing."""
    outcome = decide(f"[[{directive}]]")
    assert outcome.status == 400
    message = json.loads(outcome.body)["error"]["message"]
    assert "is not a valid directive" in message or "contradicts" in message


def test_directives_apply_to_the_attempts_they_name() -> None:
    """D3: one after the other, then a normal answer; the attempts of each request are counted separately."""
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


@given(st.text(max_size=80) | st.text(alphabet="[]= cutstatus503times\n", max_size=60))
def test_no_prompt_breaks_the_parser(text: str) -> None:
    """A prompt may be any text."""
    with suppress(DirectiveInvalid):
        directive_for_attempt(parse_directives(f"[[{text}]] [[status={text}"), 1)

"""The script: which outcome a plan and its seed give each attempt, and how directives override them."""

import json
from collections import Counter

import msgspec
import pytest

from batchline.domain.replies import Answer, Fault, FaultKind
from batchline.upstream.mock.script import Plan, Script, ScriptedOutcome, ScriptedUpstream
from tests.support.raw_server import ManualClock

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


def chat(*contents: object, role: str = "user") -> bytes:
    messages = [{"role": role, "content": content} for content in contents]
    return json.dumps({"model": "some-model", "messages": messages}).encode()


def decide(prompt: str, *, plan: Plan | None = None) -> ScriptedOutcome:
    return Script(plan).decide(CHAT, chat(prompt))


def test_the_same_request_gets_the_same_answer() -> None:
    """D5: a line that is sent again gets the same answer, and another line gets another."""
    script = Script()
    first, again, other = (script.decide(CHAT, chat(prompt)).body for prompt in ("a", "a", "b"))
    assert first == again
    assert json.loads(first)["id"] != json.loads(other)["id"]


def test_unknown_paths_are_not_found() -> None:
    assert Script().decide("/v1/nothing", chat("a")).status == 404


def test_embeddings_follow_directives_too() -> None:
    body = json.dumps({"model": "e", "input": ["a", "[[status=500]]"]}).encode()
    assert Script().decide(EMBEDDINGS, body).status == 500


def drawn_outcomes(script: Script, *, count: int = 2000) -> list[str]:
    outcomes = (script.decide(CHAT, chat(f"line {n}")) for n in range(count))
    return [
        outcome.content_type if outcome.content_type == "text/html" else f"{outcome.ending} {outcome.status}"
        for outcome in outcomes
    ]


def test_rates_come_out_as_planned() -> None:
    """The percentages of a plan are reached over many requests, and the rest is answered normally."""
    drawn = Counter(drawn_outcomes(Script(Plan(status={429: 10, 503: 5}, cut=20, html=10, redirect=5), seed=1)))
    expected = {"whole 429": 10, "whole 503": 5, "cut 200": 20, "text/html": 10, "whole 307": 5, "whole 200": 50}
    assert drawn.keys() == expected.keys()
    for outcome_name, percent in expected.items():
        assert drawn[outcome_name] / 20 == pytest.approx(percent, abs=2.5)


def test_the_seed_determines_the_outcomes() -> None:
    plan = Plan(cut=50)
    assert drawn_outcomes(Script(plan, seed=1)) == drawn_outcomes(Script(plan, seed=1))
    assert drawn_outcomes(Script(plan, seed=1)) != drawn_outcomes(Script(plan, seed=2))


def test_each_attempt_is_drawn_separately() -> None:
    """D3: a line that failed can succeed when it is retried."""
    script = Script(Plan(cut=50))
    assert len({script.decide(CHAT, chat("a")).ending for _ in range(50)}) == 2


def test_directives_override_the_plan() -> None:
    """A prompt's directives are followed exactly, also in the attempts after its faults."""
    script = Script(Plan(status={500: 100}, delay=3))
    body = chat("[[status=503 times=1]]")
    assert [script.decide(CHAT, body).status for _ in range(2)] == [503, 200]
    later = script.decide(CHAT, chat("[[delay=1]]"))
    assert (later.status, later.delay) == (500, 1)


def test_a_new_plan_keeps_the_counts_of_attempts() -> None:
    script = Script(Plan(status={500: 100}))
    assert script.decide(CHAT, chat("a")).status == 500
    script.follow(Plan())
    assert script.decide(CHAT, chat("a")).status == 200
    assert list(script.tries.values()) == [2]


@pytest.mark.parametrize("status", [429, 503])
def test_the_plan_may_send_retry_after(status: int) -> None:
    """D3: Retry-After goes with 429 and 503, not with other faults."""
    plan = Plan(retry_after=4)
    assert decide(f"[[status={status}]]", plan=plan).retry_after == 4
    assert decide("[[status=500]]", plan=plan).retry_after is None


@pytest.mark.parametrize(
    "text", ['{"cut": 60, "drop": 41}', '{"cut": -1}', '{"cats": 1}', '{"status": {"99": 1}}', '{"delay": -1}']
)
def test_an_invalid_plan_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Plan)


def test_percentages_may_add_up_to_a_hundred() -> None:
    """In floating point, such sums of decimals are slightly over 100."""
    assert (
        drawn_outcomes(Script(Plan(status={500: 33.3, 502: 33.3, 503: 16.7}, cut=16.7)), count=50).count("whole 200")
        == 0
    )


@pytest.mark.anyio
async def test_in_process_delays_pass_on_the_clock() -> None:
    """A simulation has no other time than that of its clock."""
    clock = ManualClock()
    upstream = ScriptedUpstream(
        Script(), clock=clock, request_timeout=600, max_answer_bytes=10_000, on_crash=lambda: None
    )
    assert isinstance(await upstream.post(CHAT, chat("[[delay=500]]")), Answer)
    assert clock.seconds == 500
    reply = await upstream.post(CHAT, chat("[[hang]]"))
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.TIMEOUT
    assert clock.seconds == 1100

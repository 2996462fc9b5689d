"""The tokens of an input, estimated from a few lines that the tokenizers of upstreams count (G5)."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from batchline.domain.estimates import request_tokens
from batchline.domain.limits import InputLimits
from batchline.domain.models import Catalog, Model
from batchline.pipeline import token_sample
from batchline.pipeline.survey import survey_file
from batchline.pipeline.token_sample import CountedTokens, TokenSampler
from batchline.pipeline.validate import validate_file
from batchline.ports import ModelSurvey

CHAT = "/v1/chat/completions"


class Bytes:
    """A tokenizer with a token for each byte of a body. It stops to answer after so many counts."""

    def __init__(self, *, answers: int = 1_000_000) -> None:
        self.asked: list[bytes] = []
        self._answers = answers
        self.in_flight = self.most_in_flight = 0

    async def count(self, body: bytes) -> int:
        raise AssertionError("an estimate is not wanted")

    async def count_exactly(self, body: bytes) -> int | None:
        self.asked.append(body)
        answered = len(self.asked) <= self._answers
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return len(body) if answered else None


class Silent(Bytes):
    async def count_exactly(self, body: bytes) -> int | None:
        self.asked.append(body)
        await asyncio.Event().wait()
        return None


def body(n: int, *, model: str = "m") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": f"{n} " + "x" * (n % 90)}]}).encode()


def survey(model: str, lines: int, *, sampled: int) -> ModelSurvey:
    bodies = [body(n, model=model) for n in range(lines)]
    tokens = sum(map(request_tokens, bodies))
    sample = bodies[:: max(1, lines // sampled)]
    return ModelSurvey(model=model, lines=lines, input_tokens=tokens, output_tokens_at_most=None, sample=sample)


def count(surveys: Sequence[ModelSurvey], tokens: Bytes, catalog: Catalog | None = None) -> dict[str, CountedTokens]:
    sampler = TokenSampler(tokens={"default": tokens}, catalog=catalog or Catalog())
    return asyncio.run(sampler.count(surveys, project_id="p"))


@pytest.mark.rule("G5", "Few lines are all counted by the model's own tokenizer.")
def test_few_lines_are_all_counted() -> None:
    tokens = Bytes()
    found = count([survey("m", 20, sampled=20)], tokens)
    assert found == {"m": CountedTokens(sum(len(body(n)) for n in range(20)), 20)}
    assert len(tokens.asked) == 20
    assert tokens.most_in_flight == 4


@pytest.mark.rule("G5", "Many lines are estimated from a few that were counted.")
def test_many_lines_are_like_those_that_were_counted() -> None:
    found = count([survey("m", 3_000, sampled=30)], Bytes())
    assert found["m"].lines == 30
    assert found["m"].tokens == pytest.approx(sum(len(body(n)) for n in range(3_000)), rel=0.05)


def test_lines_are_counted_as_they_are_sent() -> None:
    tokens = Bytes()
    count([survey("m", 1, sampled=1)], tokens, Catalog([Model(id="m", name="its name upstream")]))
    assert [json.loads(asked)["model"] for asked in tokens.asked] == ["its name upstream"]


@pytest.mark.parametrize("answers", [0, 7])
def test_an_upstream_that_stops_to_answer_is_asked_little_more(answers: int) -> None:
    tokens, given = Bytes(answers=answers), survey("m", 300, sampled=30)
    found = count([given], tokens)
    assert len(tokens.asked) <= answers + 4
    assert found["m"].lines == answers
    if not answers:
        assert found["m"].tokens == given.input_tokens


def test_an_upstream_that_never_answers_holds_up_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sample, "_TIMEOUT_SECONDS", 0.01)
    given = survey("m", 300, sampled=30)
    assert count([given], Silent()) == {"m": CountedTokens(given.input_tokens)}


def test_only_the_largest_of_many_models_are_counted() -> None:
    tokens = Bytes()
    surveys = [survey(f"m{n}", n + 1, sampled=5) for n in range(10)]
    found = count([*surveys, survey("", 50, sampled=5)], tokens)
    assert {name for name, counted in found.items() if counted.lines} == {"m7", "m8", "m9"}
    assert len(found) == 11


def test_a_model_that_no_upstream_serves_is_estimated() -> None:
    tokens = Bytes()
    count([survey("m", 5, sampled=5)], tokens, Catalog([Model(id="other", name="other")]))
    count([survey("m", 5, sampled=5)], tokens, Catalog([Model(id="m", name="m", upstreams=("far",))]))
    assert tokens.asked == []


def test_a_sample_is_taken_evenly_and_is_small(tmp_path: Path) -> None:
    source, work = tmp_path / "source", tmp_path / "work"
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": json.loads(body(n))} for n in range(5_000)]
    lines[17]["body"]["messages"][0]["content"] = "x" * 500_000
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = validate_file(source=source, work=work, endpoint=CHAT, limits=InputLimits())
    [found] = survey_file(work, verdict.shards).models
    assert 16 <= len(found.sample) <= 32
    assert sum(map(len, found.sample)) < 10_000
    places = [int(json.loads(sampled)["messages"][0]["content"].split()[0]) for sampled in found.sample]
    assert min(places) < 500
    assert max(places) > 4_500

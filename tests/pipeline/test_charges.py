"""The engine with metering and configured models: charges and quota (D4, F2), and the rules of models (D6, D7)."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchline.domain.errors import InvalidRequest
from batchline.domain.records import Batch
from batchline.domain.replies import Answer
from batchline.domain.states import BatchStatus
from tests.support.engine_harness import Bench

ONE: dict[str, Any] = {"metering": True, "models": {"m": {"input_price": "2", "output_price": "2"}}}
"""A line costs as many nano-units as its tokens, times a thousand: half of 2 units for a million."""

TWO: dict[str, Any] = {
    "upstreams": {"second": {"url": "http://second/v1"}},
    "models": {"m": {}, "n": {"upstream": "second", "name": "org/n-7b"}},
}


def tokens(record: dict[str, Any]) -> int:
    total: int = record["response"]["body"]["usage"]["total_tokens"] if record["response"] else 0
    return total


@pytest.mark.rule("D4", "A batch costs what the usage in its output file says.")
def test_a_batch_costs_what_the_usage_in_its_output_file_says(tmp_path: Path) -> None:
    """D4: to the nano-unit, and nothing for lines that failed."""
    with closing(Bench(tmp_path, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            prompts = ["[[status=400]]" if n % 10 == 0 else "word " * (n % 7) for n in range(300)]
            batch = await bench.ended(await bench.batch(f"{prompt} {n}" for n, prompt in enumerate(prompts)))
            assert (batch.completed, batch.failed) == (270, 30)
            records = (await bench.records(batch)).values()
            assert 10**9 - await bench.funds() == 1000 * sum(map(tokens, records))
            entries = await bench.rows.usage(since=0, until=10**10)
            assert sum(entry.requests for entry in entries) == 270
            assert {(entry.batch_id, entry.model) for entry in entries} == {(batch.id, "m")}

        bench.play(scene())


class _WithUsage:
    """Wraps an upstream, and writes another usage into its answers, or none."""

    def __init__(self, inner: Any, usage: object) -> None:
        self._inner, self._usage = inner, usage

    async def post(self, path: str, body: bytes) -> Any:
        reply = await self._inner.post(path, body)
        if not isinstance(reply, Answer):
            return reply
        answer = json.loads(reply.body)
        answer.pop("usage", None)
        return replace(reply, body=json.dumps(answer | ({"usage": self._usage} if self._usage else {})).encode())


def _estimate(record: dict[str, Any], body: object) -> int:
    """Return the tokens of a line by the rule of E2: one for four bytes of the request and of the answer."""
    answer = json.dumps(record["response"]["body"]).encode()
    return -(-len(json.dumps(body).encode()) // 4) + -(-len(answer) // 4)


@pytest.mark.rule("E2", "A line whose upstream reports no usage, or what is no count, is charged by the estimate.")
@pytest.mark.parametrize(
    "usage", [None, {"prompt_tokens": -1, "completion_tokens": 5}, {"prompt_tokens": 1.5, "completion_tokens": 1}]
)
def test_a_line_whose_upstream_reports_no_usage_is_charged_by_the_estimate(tmp_path: Path, usage: object) -> None:
    """D4, E2: as a synchronous call is, and the batch counts the tokens that it was charged for."""
    with closing(Bench(tmp_path, upstream=lambda inner, _: _WithUsage(inner, usage), **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            bodies = [{"model": "m", "messages": [{"role": "user", "content": f"good {n}"}]} for n in range(20)]
            batch = await bench.ended(await bench.batch_of(bodies))
            records = await bench.records(batch)
            tokens = sum(_estimate(records[f"line-{n}"], body) for n, body in enumerate(bodies))
            assert 10**9 - await bench.funds() == pytest.approx(1000 * tokens, rel=0.2)
            assert 10**9 - await bench.funds() == 1000 * (batch.input_tokens + batch.output_tokens)

        bench.play(scene())


@pytest.mark.rule("F2", "Where it is off, nothing is charged.")
def test_nothing_is_charged_where_nobody_is_metered(tmp_path: Path) -> None:
    """F2: the usage is recorded nevertheless."""
    with closing(Bench(tmp_path, **ONE | {"metering": False})) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(f"good {n}" for n in range(20)))
            assert (batch.completed, await bench.funds()) == (20, 0)
            entries = await bench.rows.usage(since=0, until=10**10)
            assert sum(entry.input_tokens for entry in entries) == batch.input_tokens > 0

        bench.play(scene())


@pytest.mark.rule("D4", "What a line may cost is held against the balance.")
def test_lines_in_flight_cannot_spend_more_than_is_left(tmp_path: Path) -> None:
    """D4: lines that set a limit never overdraw. They wait for others that hold the rest, and fail if none does."""
    with closing(Bench(tmp_path, max_concurrency=64, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(1_000_000)
            said = [[{"role": "user", "content": f"good {n}"}] for n in range(500)]
            bodies = ({"model": "m", "max_tokens": 100, "messages": messages} for messages in said)
            batch = await bench.ended(await bench.batch_of(bodies))
            assert batch.status is BatchStatus.COMPLETED
            records = await bench.records(batch)
            failed = [record["error"] for record in records.values() if record["error"]]
            assert {error["code"] for error in failed} == {"insufficient_quota"}
            left = await bench.funds()
            assert 0 <= left < 100 * 1000 + 40 * 1000
            assert 1_000_000 - left == 1000 * sum(map(tokens, records.values()))

        bench.play(scene())


@pytest.mark.rule("D2", "A line of an organization out of quota is insufficient_quota, http_420.")
@pytest.mark.rule("D4", "Quota is checked when a line runs; the rest fails and the batch completes.")
@pytest.mark.rule("D4", "An overdraft is at most what the estimates missed.")
@pytest.mark.parametrize("slots", [1, 8, 64])
def test_when_the_money_runs_out_the_rest_fails_and_the_batch_completes(tmp_path: Path, slots: int) -> None:
    """D4: and the overdraft is at most what an estimate missed, since the last lines run one after the other."""
    with closing(Bench(tmp_path, max_concurrency=slots, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(1_000_000)
            batch = await bench.ended(await bench.batch(f"good {n}" for n in range(500)))
            assert batch.status is BatchStatus.COMPLETED
            records = await bench.records(batch)
            failed = [record["error"] for record in records.values() if record["error"]]
            assert {error["code"] for error in failed} == {"insufficient_quota"}
            assert all(error["message"].startswith("[legacy:http_420] ") for error in failed)
            line = 1000 * max(map(tokens, records.values()))
            # A line fails if what is left does not pay for its input, which is estimated at 40 tokens at most.
            assert -line < await bench.funds() < 40 * 1000
            assert batch.completed == pytest.approx(1_000_000 / line, abs=6)
            assert bench.attempts("good") == batch.completed

        bench.play(scene())


@pytest.mark.rule("D4", "One organization's empty purse stops nobody else.")
def test_another_organizations_empty_purse_stops_nobody_else(tmp_path: Path) -> None:
    """Tenants are strictly separated."""
    with closing(Bench(tmp_path, max_concurrency=4, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(100_000, project="alpha")
            await bench.fund(10**9, project="beta")
            poor = await bench.batch((f"poor {n}" for n in range(50)), project="alpha")
            rich = await bench.batch((f"rich {n}" for n in range(50)), project="beta")
            assert (await bench.ended(rich)).completed == 50
            assert (await bench.ended(poor)).failed > 0

        bench.play(scene())


@pytest.mark.rule("D4", "Once, also across crashes.")
def test_a_killed_process_charges_for_no_answer_twice(tmp_path: Path) -> None:
    """D4: what was answered and not recorded is run again, and only then charged."""
    with closing(Bench(tmp_path, latency=0.5, max_concurrency=16, **ONE)) as bench:

        async def begin() -> Any:
            await bench.fund(10**9)
            batch = await bench.batch(f"good {n}" for n in range(400))
            return await bench.until(batch, lambda seen: seen.completed > 0)

        batch = bench.play(begin())
        for done in (60, 120, 180):
            bench.kill()
            bench.start()
            bench.play(bench.until(batch, partial(_is_further, done)))

        async def end() -> None:
            records = await bench.records(await bench.ended(batch))
            assert 10**9 - await bench.funds() == 1000 * sum(map(tokens, records.values()))

        bench.play(end())
        assert bench.attempts("good") > 400


def _is_further(done: int, batch: Batch) -> bool:
    return batch.completed > done


@pytest.mark.rule("D6", "A missing model is invalid_request_error.")
@pytest.mark.rule("D6", "A line's rules are checked without asking the upstream.")
def test_a_line_that_breaks_the_rules_fails_without_asking_the_upstream(tmp_path: Path) -> None:
    """D6: even while the upstream is unavailable."""
    user = {"role": "user", "content": "forbidden"}
    bodies = [
        {"messages": [user]},
        {"model": "m"},
        {"model": "m", "messages": []},
        {"model": "m", "messages": [user | {"role": "robot"}]},
        {"model": "unknown", "messages": [user]},
    ]
    with closing(Bench(tmp_path, **TWO)) as bench:
        bench.machine.down_until = 1000

        async def scene() -> None:
            batch = await bench.ended(await bench.batch_of(bodies))
            assert bench.time.now < 100
            records = [record["error"] for _, record in sorted((await bench.records(batch)).items())]
            assert [error["code"] for error in records] == ["invalid_request_error"] * 4 + ["not_found_error"]
            assert [error["message"].split()[0] for error in records] == ["[legacy:http_400]"] * 4 + [
                "[legacy:http_404]"
            ]
            assert [error["param"] for error in records] == ["model", *["messages"] * 3, "model"]

        bench.play(scene())
        assert bench.attempts("forbidden") == 0


@pytest.mark.rule("D6", "A model goes to its upstream under the name it has there.")
def test_a_model_goes_to_its_upstream_under_the_name_it_has_there(tmp_path: Path) -> None:
    """D6: and the lines of another model to its own upstream."""
    with closing(Bench(tmp_path, **TWO)) as bench:

        async def scene() -> None:
            bodies = [{"model": "mn"[n % 2], "messages": [{"role": "user", "content": f"good {n}"}]} for n in range(40)]
            assert (await bench.ended(await bench.batch_of(bodies))).completed == 40

        bench.play(scene())
        asked = {
            name: {json.loads(body)["model"] for body in machine.starts} for name, machine in bench.machines.items()
        }
        assert asked == {"default": {"m"}, "second": {"org/n-7b"}}
        assert [sum(machine.starts.values()) for machine in bench.machines.values()] == [20, 20]


@pytest.mark.rule("D6", "A model must be enabled for the project.")
def test_a_model_of_other_projects_does_not_exist(tmp_path: Path) -> None:
    """D6, A8."""
    settings: dict[str, Any] = {"models": {"m": {}, "n": {"projects": ["22222222-2222-4222-8222-222222222222"]}}}
    with closing(Bench(tmp_path, **settings)) as bench:

        async def scene() -> None:
            refused = await bench.ended(await bench.batch(["mine"], project="alpha", model="n"))
            missing = await bench.ended(await bench.batch(["mine"], project="alpha", model="x"))
            messages = [(await bench.failures(batch))["line-0"] for batch in (refused, missing)]
            assert messages[0].replace(" n ", " x ") == messages[1]
            assert (await bench.ended(await bench.batch(["ours"], project="beta", model="n"))).completed == 1

        bench.play(scene())
        assert bench.attempts("mine") == 0


def test_a_line_over_its_models_limit_is_refused(tmp_path: Path) -> None:
    """D6: with error_on_max_token, and without asking the upstream."""
    with closing(Bench(tmp_path, models={"m": {"max_tokens": 5}})) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["one two three", "one two three four five six"]))
            assert batch.completed == 1
            error = (await bench.records(batch))["line-1"]["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert error["message"].startswith("[legacy:http_400] ")

        bench.play(scene())
        assert bench.attempts("six") == 0


def test_a_line_over_its_models_limit_is_cut(tmp_path: Path) -> None:
    """D6: silently, if the model says so."""
    with closing(Bench(tmp_path, models={"m": {"max_tokens": 5, "error_on_max_token": False}})) as bench:

        async def scene() -> None:
            batch = await bench.ended(await bench.batch(["one two three four five six seven"]))
            assert (batch.completed, batch.input_tokens) == (1, 5)

        bench.play(scene())
        assert (bench.attempts("one two three four five"), bench.attempts("six")) == (1, 0)


def test_a_classification_models_line_needs_a_document(tmp_path: Path) -> None:
    """D7: an answer without one is a fault of the upstream, and the line is tried again."""
    with closing(Bench(tmp_path, models={"m": {"kind": "classification"}})) as bench:

        async def scene() -> None:
            failures = await bench.failures(await bench.ended(await bench.batch(["classify me"])))
            assert failures["line-0"].startswith("[legacy:retries_exhausted] Line failed after 4 attempts: ")

        bench.play(scene())
        assert bench.attempts("classify me") == 4


@pytest.mark.rule("G8", "The lines that have not started fail when the limit is reached, and the batch completes.")
def test_a_batch_costs_at_most_its_limit_and_what_was_in_flight(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            prompts = [f"word number {n}" for n in range(400)]
            whole = await bench.ended(await bench.batch(prompts))
            cost = 10**9 - await bench.funds()
            batch = await bench.ended(await bench.batch(prompts, max_cost=cost // 4))
            assert (whole.completed, batch.status) == (400, BatchStatus.COMPLETED)
            assert 90 <= batch.completed <= 110
            assert batch.completed + batch.failed == 400
            assert set((await bench.failures(batch)).values()) == {
                "[legacy:max_cost] What the batch was charged and what its lines in flight may cost has reached its "
                "max_cost"
            }
            records = (await bench.records(batch)).values()
            assert {record["error"]["code"] for record in records if record["error"]} == {"insufficient_quota"}
            spent = 10**9 - await bench.funds() - cost
            assert spent <= cost // 4 + cost // 400, "the last line may cost more than what was left"
            nothing = await bench.ended(await bench.batch(prompts, max_cost=0))
            assert (nothing.completed, nothing.failed) == (0, 400)

        bench.play(scene())


@pytest.mark.rule("G8", "The limit holds over processes: what a dead one recorded counts.")
def test_a_limit_of_the_cost_outlasts_its_process(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, latency=1.0, max_concurrency=4, **ONE)) as bench:
        prompts = [f"word number {n}" for n in range(40)]

        async def begin() -> tuple[Batch, int]:
            await bench.fund(10**9)
            await bench.ended(await bench.batch(prompts))
            cost = 10**9 - await bench.funds()
            batch = await bench.batch(prompts, max_cost=cost // 2)
            await bench.until(batch, lambda seen: seen.completed >= 8)
            return batch, cost

        batch, cost = bench.play(begin())
        bench.kill()
        bench.start()

        async def end() -> None:
            ended = await bench.ended(batch)
            assert ended.completed + ended.failed == 40
            assert 16 <= ended.completed <= 20 + 4
            assert 10**9 - await bench.funds() - cost <= cost // 2 + 4 * cost // 40

        bench.play(end())


@pytest.mark.rule("G8", "A limit needs a price for each model of the file.")
@pytest.mark.parametrize("model", ["free", "unknown"])
def test_a_limit_of_the_cost_needs_prices(tmp_path: Path, model: str) -> None:
    settings = {**ONE, "models": ONE["models"] | {"free": {}}}
    with closing(Bench(tmp_path, **settings)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            with pytest.raises(InvalidRequest, match="price") as refused:
                await bench.batch(["one", "two"], model=model, max_cost=10**9)
            assert refused.value.param == "batchline.max_cost"
            owner = await bench.owner("alpha")
            assert await bench.rows.batches(owner.project_id, after=None, limit=10) == []

        bench.play(scene())


def test_a_project_spends_at_most_its_budget_of_a_day(tmp_path: Path) -> None:
    project = {"11111111-1111-4111-8111-111111111111": {"daily_budget": "0.001"}}
    with closing(Bench(tmp_path, projects=project, **ONE)) as bench:

        async def scene() -> None:
            await bench.fund(10**9)
            await bench.fund(10**9, project="beta")
            prompts = [f"word number {n}" for n in range(400)]
            batch = await bench.ended(await bench.batch(prompts))
            other = await bench.ended(await bench.batch(prompts, project="beta"))
            assert (other.completed, batch.completed + batch.failed) == (400, 400)
            assert 0 < batch.completed < 400
            assert {text[:16] for text in (await bench.failures(batch)).values()} == {"[legacy:http_420"}
            assert "budget for today" in next(iter((await bench.failures(batch)).values()))

        bench.play(scene())

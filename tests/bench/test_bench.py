"""The benchmark measures what it claims, and notices wrong results."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import IncompleteRead
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.figures import Table, figures
from bench.lines import MAX_BATCH_LINES, WrongResults, batches_of, check_results, write_input
from bench.meter import Peak, metering
from bench.parts.growth import in_turns
from bench.parts.trip import PLANS
from bench.prefill import prefill
from bench.promises import Promise, scoreboard
from bench.results import PartResult, Results
from bench.round_trip import Client
from bench.runs import Run, run_batchline, run_script
from bench.services import EMBEDDED, POSTGRES, running_backend, running_batchline
from bench.upstream import CompiledUpstream, Plan, ScriptedUpstream, Seen, Upstream, running_upstream
from tests.support.service import Program, call, running_mock

_NUMBERS = range(10, 13)
_BURNT_SECONDS = 0.25
_CHILD = f"""
import time
while time.process_time() < {_BURNT_SECONDS}: pass
print("burnt", time.process_time(), flush=True)
"""
_PARENT = f"""
import pathlib, subprocess, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
subprocess.run([sys.executable, "-c", {_CHILD!r}])
living = {_CHILD!r} + "time.sleep(600)"
subprocess.run([sys.executable, "-c", living])
"""
"""Has two children; the first has ended before the second is done."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    """One upstream for all tests. Its counts begin anew with each plan."""
    with running_upstream(tmp_path_factory.mktemp("upstream")) as running:
        yield running


def _answered(number: int, *, of: int | None = None) -> str:
    content = f"[line {number if of is None else of}] yes"
    body = {"choices": [{"message": {"content": content}}]}
    return json.dumps({"custom_id": f"line-{number}", "response": {"status_code": 200, "body": body}, "error": None})


def _failed(number: int) -> str:
    return json.dumps({"custom_id": f"line-{number}", "response": None, "error": {"code": "internal_error"}})


def _results(folder: Path, output: list[str], errors: list[str]) -> tuple[Path, Path]:
    paths = folder / "output.jsonl", folder / "errors.jsonl"
    for path, lines in zip(paths, (output, errors), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return paths


def test_every_line_once_in_one_of_the_files_is_right(tmp_path: Path) -> None:
    """C12: the benchmark checks it after every run."""
    outcome = check_results(*_results(tmp_path, [_answered(10), _answered(12)], [_failed(11)]), _NUMBERS)
    assert (outcome.answered, outcome.failed) == (2, 1)


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        pytest.param([_answered(10), _answered(11)], [], id="missing"),
        pytest.param([_answered(10), _answered(11), _answered(12), _answered(10)], [], id="twice in one"),
        pytest.param([_answered(10), _answered(11), _answered(12)], [_failed(12)], id="in both"),
        pytest.param([_answered(10), _answered(11), _answered(12), _answered(13)], [], id="never sent"),
        pytest.param([_answered(10), _answered(11, of=12), _answered(12, of=11)], [], id="swapped"),
        pytest.param([_answered(10), _answered(11), _failed(12)], [], id="failed among the answers"),
        pytest.param([_answered(10), _answered(11)], [_answered(12)], id="answer among the failed"),
    ],
)
def test_wrong_results_are_noticed(tmp_path: Path, output: list[str], errors: list[str]) -> None:
    """C12: a run that lost, repeated or mixed up lines gives no figures."""
    with pytest.raises(WrongResults):
        check_results(*_results(tmp_path, output, errors), _NUMBERS)


def test_many_lines_are_cut_into_whole_batches() -> None:
    """C14: none above the limit, every line in one."""
    batches = batches_of(2 * MAX_BATCH_LINES + 7)
    assert [len(numbers) for numbers in batches] == [MAX_BATCH_LINES, MAX_BATCH_LINES, 7]
    assert [n for numbers in batches for n in numbers] == list(range(2 * MAX_BATCH_LINES + 7))


def _ask(upstream: Upstream, lines: range) -> list[int]:
    """Send one line after the other and return the statuses; 0 if the answer broke off."""
    port = int(upstream.url.split(":")[2].split("/")[0])
    statuses = []
    for n in lines:
        try:
            statuses.append(call(port, "POST", "/v1/x", body=f'{{"x": "[line {n}]"}}'.encode(), headers={}).status)
        except IncompleteRead:
            statuses.append(0)
    return statuses


def test_the_upstream_counts_what_it_did(tmp_path: Path, upstream: Upstream) -> None:
    """Faults have their percentages, and a line counts as repeated only if it had been answered."""
    assert isinstance(upstream, CompiledUpstream), "there is no C compiler here"
    upstream.follow(PLANS["20 ms, faults"])
    upstream.follow(Plan(internal=20, throttled=20, cut=20))
    statuses = _ask(upstream, range(300))
    seen = upstream.seen()
    assert (seen.requests, seen.lines, seen.repeated) == (300, 300, 0)
    assert seen.answered == statuses.count(200)
    for status in (500, 429, 0):
        assert 30 < statuses.count(status) < 90
    refused = [n for n, status in enumerate(statuses) if status != 200]
    _ask(upstream, range(refused[0], refused[0] + 1))
    assert upstream.seen().repeated == 0
    upstream.follow(Plan())
    assert _ask(upstream, range(5)) + _ask(upstream, range(3)) == [200] * 8
    assert (upstream.seen().lines, upstream.seen().repeated) == (5, 3)


def test_the_upstream_delays_all_requests_at_once(upstream: Upstream) -> None:
    """Requests wait for the latency in parallel, not one after the other."""
    upstream.follow(Plan(latency_ms=200))
    askers = [Thread(target=_ask, args=(upstream, range(n, n + 1))) for n in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    seen = upstream.seen()
    assert seen.answered == 20
    assert seen.peak_in_flight > 1
    assert seen.busy_seconds >= 0.2


def test_the_cpu_of_children_is_counted_also_when_they_ended(tmp_path: Path) -> None:
    """The time of a process tree is its own and that of every child, ended or running, once."""
    start = tmp_path / "start"
    program = Program("-c", _PARENT, str(start))
    try:
        with metering(program.pid) as meter:
            start.touch()
            program.wait_for_log(r"burnt .*\n(burnt) .*\n")
    finally:
        program.end()
    burnt = sum(map(float, re.findall(r"burnt (.*)\n", program.log)))
    assert 0.9 * burnt <= meter.cpu_seconds < 1.9 * burnt
    assert meter.peak.rss >= meter.peak.uss > 0


def test_a_batchline_and_a_script_are_measured(tmp_path: Path, upstream: Upstream) -> None:
    """Both get every line back in spite of the faults, and the figures are those that the upstream counted."""
    plan = Plan(latency_ms=5, internal=10)
    with running_backend(EMBEDDED, tmp_path) as backend:
        batchline = run_batchline(tmp_path, backend, upstream, plan, lines=300, retry_base_seconds=0.01)
    script = run_script("AsyncOpenAI script", tmp_path, upstream, plan, lines=30)
    for run, lines in ((batchline, 300), (script, 30)):
        assert run.outcome is not None
        assert run.outcome.answered + run.outcome.failed == run.lines == lines
        assert run.seen.lines == lines
        assert run.seen.requests > run.seen.answered == run.outcome.answered
        assert run.cpu_seconds > 0
        assert run.peak.rss >= run.peak.pss >= run.peak.uss > 0
    steps = figures([batchline]).steps
    assert steps is not None
    assert steps.polls > 0
    assert steps.tail_ms is not None
    assert steps.tail_ms > 0


def test_without_a_compiler_the_mock_is_used(tmp_path: Path) -> None:
    """Its counts start with its plan, as those of the compiled upstream."""
    with running_mock() as mock, running_backend(EMBEDDED, tmp_path) as backend:
        upstream = ScriptedUpstream(mock)
        run = run_batchline(tmp_path, backend, upstream, Plan(latency_ms=5), lines=60)
    assert run.outcome is not None
    assert run.outcome.answered == run.seen.answered == run.seen.requests == 60


@pytest.mark.parametrize("name", [EMBEDDED, pytest.param(POSTGRES, marks=pytest.mark.proof)])
def test_a_prefilled_service_has_its_batches(name: str, tmp_path: Path, upstream: Upstream) -> None:
    """C8, B7: batches written through the store are as the service would have written them."""
    with ExitStack() as stack:
        backend = stack.enter_context(running_backend(name, tmp_path))
        storage = backend.storage(tmp_path / "data")
        prefill(storage, 7)
        service = stack.enter_context(running_batchline(storage, backend, upstream.url))
        client = Client(service)
        batches = client.call("GET", "/v1/batches?limit=100")["data"]
        assert [batch["status"] for batch in batches] == ["completed"] * 7
        assert all(batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0} for batch in batches)
        with client.open("GET", f"/v1/files/{batches[0]['output_file_id']}/content") as response:
            assert json.loads(response.read())["custom_id"] == "line-0"
        client.close()


def test_input_lines_are_numbered(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", range(3, 5))
    lines = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-3", "line-4"]
    assert all(f"[line {n}]" in line["body"]["messages"][1]["content"] for n, line in enumerate(lines, 3))


def test_lines_are_padded_to_the_given_length(tmp_path: Path) -> None:
    """The memory is measured with lines of exactly this many bytes, including the line end; they keep their numbers."""
    write_input(tmp_path / "in.jsonl", range(8, 12), line_bytes=2048)
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    assert [len(line) for line in lines] == [2048] * 4
    assert all(f"[line {n}]" in json.loads(line)["body"]["messages"][1]["content"] for n, line in enumerate(lines, 8))


def test_work_after_the_last_byte_is_in_the_cost_but_not_in_the_time() -> None:
    """A service cannot make a line cheaper by postponing work until the results are downloaded."""
    program = Program("-c", _CHILD + "time.sleep(600)")
    try:
        with metering(program.pid) as meter:
            meter.stop_clock()
            seconds = meter.seconds
            program.wait_for_log(r"(burnt) ")
    finally:
        program.end()
    assert meter.seconds == seconds
    assert meter.cpu_seconds > _BURNT_SECONDS / 2


def test_sizes_take_turns() -> None:
    """A size is not measured at one end of the run and the size it is compared with at the other."""
    assert list(in_turns({1: 4, 10: 4, 100: 2, 1000: 1})) == [10, 1, 100, 10, 1, 10, 1, 1000, 100, 10, 1]


@pytest.mark.parametrize(
    ("reached", "bound", "kept"),
    [
        (39.9, {"at_least": 40}, False),
        (40, {"at_least": 40}, True),
        (60, {"at_most": 60}, True),
        (60.1, {"at_most": 60}, False),
        (200, {"under": 200}, False),
        (199.9, {"under": 200}, True),
        (7, {}, None),
    ],
)
def test_a_promise_is_kept_up_to_its_bound(reached: float, bound: dict[str, Any], kept: bool | None) -> None:
    assert Promise(what="it", backend=EMBEDDED, reached=reached, **bound).kept is kept


def test_the_scoreboard_shows_goals_beside_figures() -> None:
    """The table shows each goal, and a figure that was not measured is not shown as kept."""
    promises = [
        Promise(what="pace", backend="a", reached=50.0, unit="x", at_least=40),
        Promise(what="cost", backend="a", reached=70.0, unit=" us", at_most=60),
        Promise(what="polls", backend="a", reached=1234),
        Promise(what="pace", backend="b", reached=20.0, unit="x", at_least=40),
    ]
    table = scoreboard(promises, title="")
    assert table.heads == ("figure", "goal", "a", "kept", "b", "kept")
    assert table.rows == [
        ("pace", "at least 40x", "50.0x", "yes", "20.0x", "NO"),
        ("cost", "at most 60 us", "70.0 us", "NO", "-", ""),
        ("polls", "", "1,234", "", "-", ""),
    ]


def test_results_are_written_after_every_run(tmp_path: Path) -> None:
    """An interruption loses nothing."""
    path = tmp_path / "results.json"
    results = Results(path, quick=True)
    results.begin_part("one", place=1, of=2)
    seen = Seen(requests=1, answered=1, lines=1, repeated=0, peak_in_flight=1)
    run = Run(system="x", plan=Plan(), lines=1, seconds=1, cpu_seconds=1, machine_cores=1, peak=Peak(rss=5), seen=seen)
    results.add_run(run, "0 ms")
    first = json.loads(path.read_bytes())
    assert [(each["part"], each["what"], each["run"]["peak"]["rss"]) for each in first["runs"]] == [("one", "0 ms", 5)]
    promise = Promise(what="pace", backend=EMBEDDED, reached=50, unit="x", at_least=40)
    results.add_part(PartResult(figures={"pace": 50}, tables=[], promises=[promise]))
    second = json.loads(path.read_bytes())
    assert second["parts"] == {"one": {"pace": 50}}
    assert [(each["goal"], each["kept"]) for each in second["promises"]] == [("at least 40x", True)]
    assert not second["whole"]


def test_a_table_is_markdown() -> None:
    table = Table(title="Speed", heads=("who", "lines/s"), rows=[("batchline", "10"), ("a script", "1")])
    assert (
        table.text().splitlines()
        == [
            "Speed",
            "",
            "| who       | lines/s |",
            "|-----------|--------:|",
            "| batchline |      10 |",
            "| a script  |       1 |",
            "",
        ][:6]
    )

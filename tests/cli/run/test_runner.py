"""`batchline run` on a server (F4): its files, its messages and its exit codes."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchline.cli import main
from batchline.cli.loading import RUN_VARIABLES
from batchline.cli.run.files import open_files
from tests.cli.conftest import NamedPipe
from tests.support.http_proxy import Between, Broken, Exchange, Instead, between
from tests.support.run_process import Environment, Tenant, names, names_in, running
from tests.support.service import Mock, chat_line, chat_lines, running_service, wait_until


def _call(*arguments: object, environment: Environment) -> Result:
    """Run the command in this process, which is faster."""
    return CliRunner(env=dict.fromkeys(RUN_VARIABLES) | environment).invoke(main, ["run", *map(str, arguments)])


def _journal(source: Path) -> Path:
    return source.with_name("in.output.jsonl.batchline")


def test_the_whole_job_is_one_command(tenant: Tenant, source: Path) -> None:
    """F4: the answer of every line is beside the input, with no other file; exit code 0, nothing on stdout."""
    result = _call(source, environment=tenant.environment())
    assert result.exit_code == 0, result.output
    assert sorted(names_in(source.with_name("in.output.jsonl"))) == sorted(names(20))
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "in.output.jsonl"}
    assert result.stdout == ""
    assert re.search(
        r"^Completed: all 20 lines succeeded in [\d.]+ s; 40 tokens in, \d+ out$", result.stderr, re.MULTILINE
    )
    assert "20/20 lines, 100 %" in result.stderr
    assert len(tenant.batches()) == 1


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_end_in_v1_or_not(tenant: Tenant, source: Path, tail: str) -> None:
    url = tenant.service.base_url.removesuffix("/v1") + tail
    environment = tenant.environment() | {"BATCHLINE_BASE_URL": "http://127.0.0.1:1"}
    assert _call(source, "--base-url", url, environment=environment).exit_code == 0


@pytest.mark.rule("F4", "Exit code 3 says that the batch finished with failed lines.")
def test_failed_lines_are_3_and_told_by_code(tenant: Tenant, tmp_path: Path) -> None:
    """F4, D2: there are both files, a table of the errors, and a summary for programs."""
    source, output, errors = tmp_path / "in.jsonl", tmp_path / "o.jsonl", tmp_path / "e.jsonl"
    prompts = ["fine", "[[status=404]]", "[[status=400]] a", "[[status=400]] b"]
    source.write_bytes(chat_lines(prompts))
    result = _call(source, "-o", output, "-e", errors, "--json", environment=tenant.environment())
    assert result.exit_code == 3
    assert names_in(output) == ["line-0"]
    assert sorted(names_in(errors)) == ["line-1", "line-2", "line-3"]
    [batch] = tenant.batches()
    summary = json.loads(result.stdout)
    assert summary.pop("seconds") > 0
    assert summary == {
        "batch_id": batch["id"],
        "status": "completed",
        "total": 4,
        "completed": 1,
        "failed": 3,
        "output": str(output),
        "errors": str(errors),
        "usage": batch["usage"],
        "cost": 0.0,
        "reused": 0,
        "saved": 0.0,
    }
    assert "1 of 4 lines succeeded, 3 failed" in result.stderr
    assert re.search(r"invalid_request_error +2  scripted status 400", result.stderr)
    assert re.search(r"not_found_error +1  scripted status 404", result.stderr)


@pytest.mark.rule("F4", "Exit code 5 says that the batch is held; the same command resumes it after a release.")
def test_a_held_run_is_5_and_goes_on_after_a_release(tenant: Tenant, mock: Mock, tmp_path: Path) -> None:
    source, asked = tmp_path / "in.jsonl", mock.stats()["requests"]
    source.write_bytes(chat_lines(f"[[status=400]] {n}" for n in range(1_000)))
    named = tenant.service.base_url
    held = _call(source, "--hold", "--json", "--base-url", named, environment=tenant.environment())
    assert held.exit_code == 5
    [batch] = tenant.batches()
    assert f"{batch['id']} is held since " in held.stderr
    assert "because nearly all lines fail with invalid_request_error" in held.stderr
    assert f"batchline batches release {batch['id']} --base-url {named}, then" in held.stderr
    assert json.loads(held.stdout)["error"]["exit_code"] == 5
    assert mock.stats()["requests"] - asked < 200
    release = ["batches", "release", batch["id"]]
    assert CliRunner(env=tenant.environment()).invoke(main, release).exit_code == 0
    ended = _call(source, "--hold", environment=tenant.environment())
    assert ended.exit_code == 3
    assert "0 of 1,000 lines succeeded, 1,000 failed" in ended.stderr
    assert len(tenant.batches()) == 1


def test_a_run_without_hold_goes_on(tenant: Tenant, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_lines(f"[[status=400]] {n}" for n in range(300)))
    assert _call(source, "--no-hold", environment=tenant.environment()).exit_code == 3


def test_files_of_an_earlier_run_do_not_outlive_it(tenant: Tenant, source: Path) -> None:
    """F4: an errors file means that lines of this run failed, and an output file that some succeeded."""
    output, errors = source.with_name("in.output.jsonl"), source.with_name("in.errors.jsonl")
    errors.write_text("old")
    assert _call(source, "--again", environment=tenant.environment()).exit_code == 0
    assert not errors.exists()
    source.write_bytes(chat_lines(["[[status=400]]"]))
    assert _call(source, "--again", environment=tenant.environment()).exit_code == 3
    assert not output.exists()
    assert names_in(errors) == ["line-0"]


def test_faults_of_the_input_are_told_by_line_and_nothing_is_left_to_go_on_with(tenant: Tenant, source: Path) -> None:
    """C3, F4: all faults are reported at once; the corrected file is then a new job."""
    good = source.read_bytes()
    source.write_bytes(good + b"{nope\n" + chat_line("line-3", "again") + b"[]\n")
    result = _call(source, environment=tenant.environment())
    assert result.exit_code == 1
    assert "line 21: is not valid JSON\n" in result.stderr
    assert 'line 22: duplicates custom_id "line-3"\n' in result.stderr
    assert "line 23: must be a JSON object\n" in result.stderr
    assert result.stdout == ""
    source.write_bytes(good)
    assert _call(source, environment=tenant.environment()).exit_code == 0


def test_the_endpoint_is_the_first_lines_url(tenant: Tenant, source: Path) -> None:
    """F4: if it is wrong, the service reports it."""
    source.write_bytes(b"\xef\xbb\xbf \r\n\n" + source.read_bytes())
    assert _call(source, environment=tenant.environment()).exit_code == 0
    source.write_bytes(source.read_bytes().replace(b"/v1/chat/completions", b"/v1/other"))
    result = _call(source, environment=tenant.environment())
    assert result.exit_code == 1
    assert 'line 3: url "/v1/other" is not an allowed batch endpoint' in result.stderr


def test_an_empty_file_is_refused_in_words(tenant: Tenant, source: Path) -> None:
    """B2."""
    source.write_bytes(b"")
    result = _call(source, environment=tenant.environment())
    assert result.exit_code == 1
    assert "empty" in result.stderr
    assert "Uploading in.jsonl (0 bytes)\n" in result.stderr
    assert not _journal(source).exists()


@pytest.mark.rule("F4", "Exit code 4 says that the credentials do not fit.")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"BATCHLINE_API_KEY": ""}, "Neither BATCHLINE_API_KEY nor OPENAI_API_KEY is set"),
        ({"BATCHLINE_API_KEY": "bl-wrong"}, "Invalid credentials. Set BATCHLINE_API_KEY to a key that"),
        (
            {"BATCHLINE_API_KEY": "bl-wrong", "BATCHLINE_PROJECT_ID": ""},
            "The server refuses the key in BATCHLINE_API_KEY (wrong, expired or revoked). Set",
        ),
        ({"BATCHLINE_API_KEY": "a\nb"}, "BATCHLINE_API_KEY is not usable"),
    ],
)
def test_credentials_that_do_not_fit_are_4(tenant: Tenant, source: Path, change: Environment, word: str) -> None:
    """F4, A1, A2: the message says what to set, and never contains the key."""
    result = _call(source, environment=tenant.environment() | change)
    assert result.exit_code == 4
    assert word in result.stderr
    assert tenant.account["api_key"] not in result.stderr


def test_a_server_that_is_not_there_is_1_with_its_url(tenant: Tenant, source: Path) -> None:
    """F4: and no job was begun that a later run would have to resume."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = _call(source, environment=tenant.environment(url))
    assert result.exit_code == 1
    assert f"{url} cannot be reached: Connection refused" in result.stderr
    assert "BATCHLINE_BASE_URL" in result.stderr
    assert _call(source, environment=tenant.environment()).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such.jsonl"],
        ["in.jsonl", "-o", "in.jsonl"],
        ["in.jsonl", "-o", "same.jsonl", "-e", "same.jsonl"],
        ["in.jsonl", "-o", "no-such-folder/out.jsonl"],
        ["in.jsonl", "--base-url", "127.0.0.1:8000"],
        ["in.jsonl", "--base-url", "http://host:port"],
        ["in.jsonl", "-o", "-", "--json"],
        ["-", "--json"],
        ["in.jsonl", "--upstream-url", "http://127.0.0.1:1/v1"],
    ],
)
def test_what_cannot_be_meant_is_2(
    tenant: Tenant, source: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: the last one is a setting of a service that the run would start, although a server is named."""
    monkeypatch.chdir(source.parent)
    result = _call(*arguments, environment=tenant.environment())
    assert result.exit_code == 2, result.output
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl"}


def _fail_once(proxy: Between, step: str, fault: Exception) -> None:
    faults = [fault]

    def before(exchange: Exchange) -> None:
        if exchange.step == step and faults:
            raise faults.pop()

    proxy.before = before


_THROTTLED = b'{"error": {"message": "Slowly", "type": "t", "code": "rate_limit_exceeded", "param": null}}'


@pytest.mark.parametrize("step", ["upload", "create", "poll", "download"])
@pytest.mark.parametrize(
    "fault", [Broken(), Instead(503, b"busy", {"retry-after": "0"}), Instead(429, _THROTTLED, {"retry-after": "0"})]
)
def test_a_fault_that_passes_is_waited_out_at_every_step(
    tenant: Tenant, proxy: Between, source: Path, step: str, fault: Exception
) -> None:
    """F4, A4: there is still only one batch."""
    _fail_once(proxy, step, fault)
    result = _call(source, environment=tenant.environment(proxy.url))
    assert result.exit_code == 0, result.output
    assert "; trying again" in result.stderr
    assert sorted(names_in(source.with_name("in.output.jsonl"))) == sorted(names(20))
    assert len(tenant.batches()) == 1


def test_an_answer_that_was_lost_makes_no_second_batch(tenant: Tenant, proxy: Between, source: Path) -> None:
    """A11, F4: the server created the batch, but its answer was lost."""
    lost: list[bool] = []

    def after(exchange: Exchange) -> None:
        if exchange.step == "create" and not lost:
            lost.append(True)
            raise Broken

    proxy.after = after
    assert _call(source, environment=tenant.environment(proxy.url)).exit_code == 0
    assert proxy.steps().count("create") == 2
    assert len(tenant.batches()) == 1


def test_a_validation_that_was_interrupted_is_asked_for_again(tenant: Tenant, proxy: Between, source: Path) -> None:
    """C6, A11: the service ended during validation. The same key would only get the same answer again."""
    text = b"Validation was interrupted; create the batch again"
    body = b'{"error": {"message": "%s", "type": "t", "code": "invalid_request_error", "param": null}}' % text
    _fail_once(proxy, "create", Instead(400, body, {"x-batch-id": "batch_dead"}))
    assert _call(source, environment=tenant.environment(proxy.url)).exit_code == 0
    keys = [exchange.headers["idempotency-key"] for exchange in proxy.seen if exchange.step == "create"]
    assert len(keys) == len(set(keys)) == 2
    assert len(tenant.batches()) == 1


def test_a_download_that_breaks_goes_on_where_it_was(tenant: Tenant, proxy: Between, source: Path) -> None:
    """B7, F4."""
    proxy.cut_download_at = 1000
    assert _call(source, environment=tenant.environment(proxy.url)).exit_code == 0
    ranges = [exchange.headers.get("range") for exchange in proxy.seen if exchange.step == "download"]
    assert ranges == [None, "bytes=1000-"]
    assert sorted(names_in(source.with_name("in.output.jsonl"))) == sorted(names(20))


def test_an_outage_of_the_server_does_not_end_a_run(tmp_path: Path, mock: Mock, source: Path) -> None:
    """F4, C7: the batch is durable there, so the run waits, shows the reason, and saves the results."""
    source.write_bytes(chat_lines(f"[[delay=0.5]] {n}" for n in range(12)))
    with running_service(tmp_path / "own", mock.url, max_concurrency=4) as own, between(own) as proxy:
        tenant = Tenant(own, own.account)
        with running(tmp_path, str(source), environment=tenant.environment(proxy.url)) as run:
            wait_until(lambda: "poll" in proxy.steps(), what="the first poll")
            own.kill()
            polls = proxy.steps().count("poll")
            wait_until(lambda: run.is_over or proxy.steps().count("poll") > polls + 1, what="polls in vain")
            assert not run.is_over
            own.restart()
            ended = run.end()
    assert ended.code == 0, ended.stderr
    assert "the connection broke off" in ended.stderr
    assert sorted(names_in(source.with_name("in.output.jsonl"))) == sorted(names(12))


def _touch_earlier(path: Path) -> None:
    """Make a file older than what is written next."""
    os.utime(path, (1_700_000_000, 1_700_000_000))


def test_a_finished_job_is_not_run_again_unasked(tenant: Tenant, source: Path) -> None:
    """F4: it would cost money and overwrite results. A changed input is a new job."""
    _touch_earlier(source)
    assert _call(source, environment=tenant.environment()).exit_code == 0
    again = _call(source, environment=tenant.environment())
    assert again.exit_code == 1
    assert "This job was finished at 20" in again.stderr
    assert "in.output.jsonl is newer than its input. Add --again" in again.stderr
    assert len(tenant.batches()) == 1
    assert _call(source, "--again", environment=tenant.environment()).exit_code == 0
    _touch_earlier(source.with_name("in.output.jsonl"))
    source.write_bytes(chat_lines(["changed"]))
    assert _call(source, environment=tenant.environment()).exit_code == 0
    assert len(tenant.batches()) == 3


def test_a_dash_is_stdin_and_stdout(tenant: Tenant, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: answers are all that stdout gets; no file is named -."""
    monkeypatch.chdir(source.parent)
    runner = CliRunner(env=dict.fromkeys(RUN_VARIABLES) | tenant.environment())
    lines = chat_lines(["fine", "[[status=400]]"])
    piped = runner.invoke(main, ["run", "-", "-e", "bad.jsonl"], input=lines)
    assert piped.exit_code == 3, piped.output
    assert [json.loads(line)["custom_id"] for line in piped.stdout.splitlines()] == ["line-0"]
    assert names_in(source.with_name("bad.jsonl")) == ["line-1"]
    named = _call("in.jsonl", "-o", "-", environment=tenant.environment())
    assert named.exit_code == 0
    assert sorted(json.loads(line)["custom_id"] for line in named.stdout.splitlines()) == sorted(names(20))
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "bad.jsonl"}


def test_stdin_can_be_run_again_into_the_same_file(
    tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: stdin has no time at which it was written, so nobody is asked whether its job was finished."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env=dict.fromkeys(RUN_VARIABLES) | tenant.environment())
    for word in ("one", "two"):
        result = runner.invoke(main, ["run", "-", "-o", "out.jsonl"], input=chat_lines([word]))
        assert result.exit_code == 0, result.output
    assert len(tenant.batches()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is there on Linux only")
def test_a_full_disk_behind_stdout_is_told_with_the_way_to_the_answers(tenant: Tenant, source: Path) -> None:
    """F4: the work is done and paid for, so a traceback is not all that is left of it."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "batchline", "run", str(source), "-o", "-"],
            env=os.environ | tenant.environment(),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(full)
    [batch] = tenant.batches()
    assert f"No space left on device. The answers are not lost: batchline results {batch['id']}" in ended.stderr
    assert "Exception" not in ended.stderr
    assert ended.returncode == 1


def test_a_run_needs_no_stdin(tenant: Tenant, source: Path) -> None:
    """F4: some supervisors start a command with its standard input closed, and Python then has none."""
    command = [sys.executable, "-P", "-m", "batchline", "run", str(source)]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    ended = subprocess.run(shell, env=os.environ | tenant.environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("number", ["1e400", "1" * 5000, "1.10", "123456789012345678901234567890"])
def test_a_patch_changes_nothing_else_in_a_body(tmp_path: Path, number: str) -> None:
    """C5: bodies are passed on without loss, and no line goes out without the patch because of what else it has."""
    source = tmp_path / "in.jsonl"
    deep = b"[" * 5000
    source.write_bytes(b'\xef\xbb\xbf{"custom_id":"a","body":{"model":"old","x":%b}}\r\n\n%b' % (number.encode(), deep))
    with open_files(str(source), None, None, patch={"model": "new"}) as files:
        patched = files.source.read_bytes()
    assert patched == b'{"custom_id":"a","body":{"model":"new","x":%b}}\n\n%b' % (number.encode(), deep)


def test_failed_lines_are_saved_beside_the_output(tenant: Tenant, tmp_path: Path) -> None:
    """F4: with -o, the errors do not land in the folder of the input."""
    source, results = tmp_path / "in.jsonl", tmp_path / "results"
    results.mkdir()
    source.write_bytes(chat_lines(["fine", "[[status=400]]"]))
    assert _call(source, "-o", results / "answers.jsonl", environment=tenant.environment()).exit_code == 3
    assert {path.name for path in results.iterdir()} == {"answers.jsonl", "answers.errors.jsonl"}


def test_a_failure_is_json_too_if_json_was_asked_for(tenant: Tenant, source: Path) -> None:
    """F4: a program that reads stdout is not left without a word."""
    result = _call(source, "--json", environment=tenant.environment() | {"BATCHLINE_API_KEY": "bl-wrong"})
    assert result.exit_code == 4
    error = json.loads(result.stdout)["error"]
    assert error["exit_code"] == 4
    assert error["message"].startswith("Invalid credentials. ")
    assert "Error: Invalid credentials. " in result.stderr


def test_a_key_alone_is_enough_and_openais_variables_do(tenant: Tenant, source: Path) -> None:
    """A13, F4: OPENAI_BASE_URL and OPENAI_API_KEY are used where BATCHLINE_* are not set."""
    given = tenant.environment()
    names = {"BATCHLINE_BASE_URL": "OPENAI_BASE_URL", "BATCHLINE_API_KEY": "OPENAI_API_KEY"}
    result = _call(source, environment={names[name]: given[name] for name in names})
    assert result.exit_code == 0, result.output
    assert len(tenant.batches()) == 1


@pytest.mark.parametrize("added", [["--max-cost", "2"], ["--reuse"], ["--no-hold"], ["--name", "night"]])
def test_an_option_is_not_added_to_a_job_without_a_word(tenant: Tenant, source: Path, added: list[str]) -> None:
    """G6, G7, G8: the batch exists without it, so a run that names it must not go on as if it had it."""
    source.write_bytes(chat_lines(["[[delay=0.5]]"]))
    journal = _journal(source)
    with running(source.parent, str(source), environment=tenant.environment()) as run:
        wait_until(lambda: journal.exists() and '"batch_id":"' in journal.read_text(), what="the batch")
        run.kill()
    changed = _call(source, *added, environment=tenant.environment())
    assert changed.exit_code == 1
    assert "was begun with other options" in " ".join(changed.stderr.split())
    assert added[0] in changed.stderr
    assert _call(source, environment=tenant.environment()).exit_code == 0
    assert len(tenant.batches()) == 1


@pytest.mark.rule("G7", "A run with --reuse asks only for what was edited, and says what was reused.")
def test_a_run_reuses_the_answers_of_an_earlier_run(tenant: Tenant, source: Path) -> None:
    assert _call(source, environment=tenant.environment()).exit_code == 0
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join([*lines[1:], chat_lines(["edited"]).replace(b"line-0", b"edited")]))
    result = _call(source, "--again", "--reuse", environment=tenant.environment())
    assert result.exit_code == 0, result.output
    assert re.search(r"^Completed: all 20 lines succeeded in .*; 19 lines reused$", result.stderr, re.MULTILINE)
    answers = [json.loads(line) for line in source.with_name("in.output.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers if "reused" not in answer] == ["edited"]


@pytest.mark.rule("G8", "A run with --max-cost on a service without metering is refused with the reason.")
def test_a_run_with_a_limit_of_the_cost_needs_metering(tenant: Tenant, source: Path) -> None:
    result = _call(source, "--max-cost", "2.5", environment=tenant.environment())
    assert result.exit_code == 1
    assert "metering" in result.stderr


def test_a_link_as_output_is_followed_and_stays(tenant: Tenant, source: Path) -> None:
    """F4: the user linked the name to where the results are to be."""
    link, target = source.with_name("link.jsonl"), source.with_name("target.jsonl")
    link.symlink_to("target.jsonl")
    result = _call(source, "-o", link, "--order", "input", environment=tenant.environment())
    assert result.exit_code == 0, result.output
    assert f"  output  {link}\n" in result.stderr
    assert link.readlink() == Path("target.jsonl")
    assert names_in(target) == names(20)
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "link.jsonl", "target.jsonl"}


def test_devices_as_output_and_errors_are_left_alone(tenant: Tenant, source: Path) -> None:
    """F4: `-o /dev/null -e /dev/null` must not delete the machine's /dev/null."""
    output, errors = source.with_name("output"), source.with_name("errors")
    for link in (output, errors):
        link.symlink_to(os.devnull)
    for prompts, code in ((["fine"], 0), (["[[status=400]]"], 3)):
        source.write_bytes(chat_lines(prompts))
        result = _call(source, "-o", output, "-e", errors, environment=tenant.environment())
        assert result.exit_code == code, result.output
        assert [link.readlink() for link in (output, errors)] == [Path(os.devnull)] * 2
    assert Path(os.devnull).is_char_device()
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "output", "errors"}


def test_a_pipe_as_output_gets_the_answers(tenant: Tenant, source: Path, pipe: NamedPipe) -> None:
    """F4: a pipe keeps nothing, so the same command may be run again at once."""
    source.write_bytes(chat_lines(["fine", "[[status=400]]"]))
    _touch_earlier(source)
    errors = source.with_name("errors")
    errors.symlink_to(os.devnull)
    for _ in range(2):
        result = _call(source, "-o", pipe.path, "-e", errors, "--json", environment=tenant.environment())
        assert result.exit_code == 3, result.output
        assert [json.loads(line)["custom_id"] for line in pipe.read().splitlines()] == ["line-0"]
        assert json.loads(result.stdout)["output"] == str(pipe.path)
        assert re.search(r"invalid_request_error +1  scripted status 400", result.stderr)
    assert pipe.path.is_fifo()
    assert {path.name for path in source.parent.iterdir()} == {"in.jsonl", "pipe", "errors"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is there on Linux only")
def test_a_device_that_takes_no_more_ends_no_job(tenant: Tenant, source: Path, pipe: NamedPipe) -> None:
    """F4: the same command resumes it, and so does one with another device."""
    link = source.with_name("link")
    link.symlink_to("/dev/full")
    result = _call(source, "-o", link, environment=tenant.environment())
    assert result.exit_code == 1
    assert f"{link} cannot be written: No space left on device. Run the same command again" in result.stderr
    assert _call(source, "-o", pipe.path, environment=tenant.environment()).exit_code == 0
    assert len(pipe.read().splitlines()) == 20
    assert len(tenant.batches()) == 1


@pytest.mark.parametrize("option", ["-o", "-e"])
def test_a_socket_is_refused_before_anything_is_uploaded(
    tenant: Tenant, proxy: Between, source: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4."""
    monkeypatch.chdir(source.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        result = _call(source, option, "socket", environment=tenant.environment(proxy.url))
        assert source.with_name("socket").is_socket()
    assert result.exit_code == 2
    assert "socket is a socket, not a file" in result.stderr
    assert proxy.steps() == []

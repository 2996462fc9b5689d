"""The journal of `batchline run` (F4): a run that is killed at any step and run again makes one batch."""

import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchline.cli import main
from batchline.cli.loading import RUN_VARIABLES
from batchline.cli.run.journal import Journal, JournalEntry, JournalUnusable
from tests.support.http_proxy import Between, Broken, Exchange
from tests.support.run_process import Environment, Run, Tenant, names, names_in, ran, running
from tests.support.service import chat_lines, wait_until

_JOB = JournalEntry(input_digest="d", endpoint="/v1/e", target="http://host", begun_at=1.5, idempotency_key="run-1")


def _call(*arguments: object, environment: Environment) -> Result:
    return CliRunner(env=dict.fromkeys(RUN_VARIABLES) | environment).invoke(main, ["run", *map(str, arguments)])


def _journal(source: Path) -> Path:
    return source.with_name("in.output.jsonl.batchline")


class _Killing:
    """Kills a run with SIGKILL when a request of it reaches the proxy."""

    def __init__(self, run: Run, step: str, *, after: int = 0) -> None:
        self._run, self._step, self._left = run, step, after
        self.done = False

    def __call__(self, exchange: Exchange) -> None:
        if exchange.step != self._step or self.done:
            return
        self._left -= 1
        if self._left < 0:
            self.done = True
            self._run.kill()
            raise Broken


def _killed(proxy: Between, tenant: Tenant, source: Path, arm: Callable[[Run], _Killing]) -> None:
    with running(source.parent, str(source), environment=tenant.environment(proxy.url)) as run:
        killing = arm(run)
        wait_until(lambda: killing.done, what="the moment")
    proxy.before = proxy.after = lambda _: None


@pytest.mark.rule("F4", "Started again, a run picks up its own batch, whatever step it was killed at.")
@pytest.mark.parametrize(
    ("step", "answered", "later"),
    [
        ("upload", False, 0),
        ("upload", True, 0),
        ("create", False, 0),
        ("create", True, 0),
        ("poll", True, 0),
        ("download", False, 0),
        ("download", False, 1),
    ],
)
def test_a_run_killed_at_any_step_ends_in_one_batch(
    tenant: Tenant, proxy: Between, source: Path, step: str, answered: bool, later: int
) -> None:
    """F4, A11: before and after the server handled the request, and in the middle of a download."""
    proxy.cut_download_at = 1000

    def arm(run: Run) -> _Killing:
        killing = _Killing(run, step, after=later)
        if answered:
            proxy.after = killing
        else:
            proxy.before = killing
        return killing

    _killed(proxy, tenant, source, arm)
    output = source.with_name("in.output.jsonl")
    assert not output.exists()
    assert stat.S_IMODE(_journal(source).stat().st_mode) == 0o600
    result = _call(source, environment=tenant.environment(proxy.url))
    assert result.exit_code == 0, result.output
    assert sorted(names_in(output)) == sorted(names(20))
    assert {path.name for path in source.parent.iterdir()} == {
        "in.jsonl",
        "in.output.jsonl",
        "run.stdout",
        "run.stderr",
    }
    assert len(tenant.batches()) == 1


def _begun(proxy: Between, tenant: Tenant, source: Path) -> None:
    """Start a run and kill it while its batch is in progress."""

    def arm(run: Run) -> _Killing:
        proxy.before = killing = _Killing(run, "poll")
        return killing

    _killed(proxy, tenant, source, arm)


def test_another_input_is_refused_until_it_is_told_to_begin_anew(tenant: Tenant, proxy: Between, source: Path) -> None:
    """F4: the answers for one file must not be saved for another; the earlier batch is cancelled (C10)."""
    source.write_bytes(chat_lines(f"[[delay=1]] {n}" for n in range(40)))
    _begun(proxy, tenant, source)
    source.write_bytes(chat_lines(["another question"]))
    refused = _call(source, environment=tenant.environment(proxy.url))
    assert refused.exit_code == 1
    assert "has changed since this job (batch_" in refused.stderr
    assert "--restart" in refused.stderr
    assert len(tenant.batches()) == 1

    assert _call(source, "--restart", environment=tenant.environment(proxy.url)).exit_code == 0
    assert names_in(source.with_name("in.output.jsonl")) == ["line-0"]
    _, first = tenant.batches()
    assert first["status"] in {"cancelling", "cancelled"}


def test_another_server_is_refused(tenant: Tenant, proxy: Between, source: Path) -> None:
    """F4: that server does not have the batch, and would create a second one."""
    _begun(proxy, tenant, source)
    refused = _call(source, environment=tenant.environment())
    assert refused.exit_code == 1
    assert f"was begun at {proxy.url}, not at {tenant.service.base_url.removesuffix('/v1')}" in refused.stderr
    assert len(tenant.batches()) == 1


def test_a_batch_that_its_server_does_not_know_is_told(tenant: Tenant, source: Path, proxy: Between) -> None:
    _begun(proxy, tenant, source)
    job = json.loads(_journal(source).read_text().splitlines()[-1])
    _journal(source).write_text(json.dumps(job | {"batch_id": "batch_unknown"}) + "\n")
    refused = _call(source, environment=tenant.environment(proxy.url))
    assert refused.exit_code == 1
    assert "Batch not found: batch_unknown. Add --restart to begin again." in refused.stderr


def test_an_upload_that_is_gone_is_made_again(tenant: Tenant, source: Path, proxy: Between) -> None:
    """B4: the run is resumed after the file has expired."""

    def arm(run: Run) -> _Killing:
        proxy.before = killing = _Killing(run, "create")
        return killing

    _killed(proxy, tenant, source, arm)
    job = json.loads(_journal(source).read_text().splitlines()[-1])
    _journal(source).write_text(json.dumps(job | {"file_id": "file-gone"}) + "\n")
    assert _call(source, environment=tenant.environment(proxy.url)).exit_code == 0
    assert len(tenant.batches()) == 1


def test_two_runs_for_one_output_do_not_mix(tenant: Tenant, source: Path, proxy: Between) -> None:
    source.write_bytes(chat_lines(f"[[delay=1]] {n}" for n in range(8)))
    with running(source.parent, str(source), environment=tenant.environment(proxy.url)) as run:
        wait_until(lambda: "poll" in proxy.steps(), what="the first poll")
        refused = _call(source, environment=tenant.environment(proxy.url))
        assert refused.exit_code == 1
        assert "Another run is working on this output" in refused.stderr
        assert run.end().code == 0
    assert len(tenant.batches()) == 1


def test_a_batch_cancelled_elsewhere_still_brings_its_results(tenant: Tenant, source: Path, proxy: Between) -> None:
    """F4, C10, C12: every line is in one of the two files; lines that did not run have failed, so the code is 3."""
    source.write_bytes(chat_lines(f"[[delay=1]] {n}" for n in range(30)))
    with running(source.parent, str(source), "--json", environment=tenant.environment(proxy.url)) as run:
        wait_until(lambda: "poll" in proxy.steps(), what="the first poll")
        [batch] = tenant.batches()
        tenant.service.client(tenant.account).batches.cancel(batch["id"])
        ended = run.end()
    assert ended.code == 3
    assert ended.summary["status"] == "cancelled"
    assert re.search(r"batch_cancelled +\d+ ", ended.stderr)
    both = [name for kind in ("output", "errors") for name in _names_if_there(source.with_name(f"in.{kind}.jsonl"))]
    assert sorted(both) == sorted(names(30))


def _names_if_there(path: Path) -> list[str]:
    return names_in(path) if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(
    tenant: Tenant, source: Path, proxy: Between, number: signal.Signals
) -> None:
    """F4: the exit code is 128 + the signal; the batch continues on the server, and the next run resumes it."""
    source.write_bytes(chat_lines(f"[[delay=0.5]] {n}" for n in range(8)))
    with running(source.parent, str(source), environment=tenant.environment(proxy.url)) as run:
        wait_until(lambda: "poll" in proxy.steps(), what="the first poll")
        run.send(number)
        ended = run.end()
    assert ended.code == 128 + number
    assert "continues with what was submitted. Run the same command again to resume." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ran(source.parent, str(source), environment=tenant.environment(proxy.url)).code == 0
    assert len(tenant.batches()) == 1


def test_a_terminal_is_shown_one_line_that_is_redrawn(tenant: Tenant, source: Path) -> None:
    """F4: it has a bar and the counts; only the results stay on the screen."""
    source.write_bytes(chat_lines(f"[[delay=0.3]] {n}" for n in range(12)))
    ours, theirs = pty.openpty()
    environment = os.environ | tenant.environment() | {"COLUMNS": "100", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "batchline", "run", str(source)]
    with subprocess.Popen(command, stderr=theirs, env=environment) as child:
        os.close(theirs)
        shown = _read_all(ours)
    assert child.returncode == 0
    assert "\r\x1b[K█" in shown
    assert "12/12 lines  100 %" in shown
    assert re.search(r"\d lines/s", shown)
    left = re.sub(r"[^\n]*\r\x1b\[K", "", shown).replace("\r", "").splitlines()
    assert left[0] == f"Server {tenant.service.base_url.removesuffix('/v1')}"
    assert left[1].startswith("Batch batch_")
    assert left[2].startswith("Completed: all 12 lines succeeded in ")
    assert left[3] == f"  output  {source.with_name('in.output.jsonl')}"


def _read_all(terminal: int) -> str:
    data = b""
    with open(terminal, "rb", buffering=0) as stream:
        try:
            while chunk := stream.read(65536):
                data += chunk
        except OSError:
            pass  # how a terminal reports that no process writes to it any more
    return data.decode()


def test_a_journal_ends_with_the_last_step_that_was_written_whole(tmp_path: Path) -> None:
    """An entry that a crash cut off is ignored; the entries after it are complete again."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(_JOB)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    journal = Journal(path)
    assert journal.entry == _JOB
    later = JournalEntry(**{name: getattr(_JOB, name) for name in _JOB.__struct_fields__} | {"batch_id": "batch_1"})
    journal.write(later)
    journal.close()
    again = Journal(path)
    assert again.entry == later
    again.remove()
    again.close()
    assert not path.exists()


def test_a_first_step_that_was_cut_off_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"input_dig')
    journal = Journal(path)
    assert journal.entry is None
    journal.close()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"somebody's notes\n", b"somebody's notes", b'{"input_digest": 7}\n'])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalUnusable, match="was not written by this command"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_journal_is_held_by_one(tmp_path: Path) -> None:
    """Also after its holder deleted the file: a file that was created since then belongs to another run."""
    path = tmp_path / "journal"
    first = Journal(path)
    with pytest.raises(JournalUnusable, match="Another run is working"):
        Journal(path)
    first.write(_JOB)
    first.remove()
    second = Journal(path)
    second.write(_JOB)
    first.close()
    assert path.exists()
    second.close()

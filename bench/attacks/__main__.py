"""Runs known attacks and prints a table: ``python -m bench.attacks``, or ``python -m bench.attacks pipelining``."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bench.attacks import live
from bench.attacks.live import Shown


class Attack(NamedTuple):
    """An attack, what it did before there was a bound, and how it is shown now."""

    name: str
    before: str
    run: Callable[[], Shown] | str
    """A function that runs the attack and says what it did, or the tests that hold the bound."""


_BOUNDS = "tests/api/test_protocol_bounds.py"
_STREAMS = "tests/api/test_inference_streams.py"
_CALLS = "tests/api/test_inference.py"
_HEALTH = "tests/api/test_health.py"
ATTACKS = [
    Attack("pipelining", "61 to 2,580 MB, /healthz 7.5 s", live.pipelining),
    Attack(
        "streams for a fraction",
        "0.033 in place of 23 for a client that left early; 0 for no usage or what is no count",
        f"{_STREAMS} {_CALLS} tests/pipeline/test_charges.py "
        "-k leaves or was_left or is_estimated or by_the_estimate or size_limit",
    ),
    Attack("unread downloads", "20 of 20 still there after 90 s", live.unread_downloads),
    Attack(
        "unread streams and calls left behind", "a call ran on for up to 600 s", f"{_BOUNDS} -k given_up or left_behind"
    ),
    Attack("unread answers", "held for as long as the client liked", live.unread_answers),
    Attack("unread streams", "not measured", live.unread_streams),
    Attack("synchronous bodies", "8.5 MB for each call of 4 MiB, 256 allowed", live.synchronous_bodies),
    Attack("connections", "a running batch stalled for 20 s, a line failed", live.connections),
    Attack("overdraft", "a balance of a billionth became -2,760", live.overdraft),
    Attack(
        "vendor fields",
        "Model, models, background, hosted tools and links reached the upstream",
        f"tests/domain/test_request_rules.py {_CALLS} -k refused or hides or counts or allowed or another_path",
    ),
    Attack("storage", "no quota", "tests/api/test_storage_quota.py"),
    Attack("readyz", "uploads 2 to 71 ms; an outage of the bucket took every API node out", live.readyz),
    Attack("readyz without a bucket", "every API node out of service", f"{_HEALTH} -k storage or share_one_check"),
    Attack(
        "code from the current folder",
        "uvloop.py and pickle.py were imported",
        "tests/pipeline/test_validation_pool.py tests/cli/connection/test_local_service.py -k current_folder",
    ),
    Attack("validation", "a create 0.02 to 1.22 s behind 6 files of another project", live.validation),
    Attack("files of others", "0644 in a folder that existed", "tests/app/test_roles.py -k private"),
    Attack("metrics", "open under a rebound name or behind a proxy", f"{_HEALTH} -k metrics"),
    Attack(
        "text of an upstream's 5xx",
        "in error files",
        "tests/domain/test_outcomes.py -k another_attempt or credentials",
    ),
    Attack("stream: 1", "passed", f"{_CALLS} tests/pipeline/test_validate.py -k stream or wrong_kind"),
    Attack(
        "long heads",
        "64 KB block the loop for 19 to 53 ms",
        f"{_BOUNDS} -s -m proof or not proof -k head_blocks or heads_that",
    ),
    Attack("reads", "not throttled", "tests/api/test_read_rate.py"),
    Attack(
        "backups",
        "a traceback for a bad key, triggers kept",
        "tests/backup/test_refused_restore.py -k key or statements or type",
    ),
    Attack("two hosts, HTTP/0.9", "accepted", "tests/api/test_protocol.py -k no_http"),
    Attack("manifests", "no policy for the API, sslmode=require", "tests/deploy/test_manifests.py"),
    Attack("a revoked key", "its stream went on", f"{_STREAMS} -k ends_with_its_key"),
    Attack("every route of another tenant", "nothing found", "tests/test_tenants.py"),
]


def main() -> int:
    wanted = sys.argv[1:]
    if unknown := set(wanted) - {attack.name for attack in ATTACKS}:
        sys.exit(f"unknown attacks: {', '.join(sorted(unknown))}")
    print("| Attack | Before | Now | Bound | Verdict | Command |\n|---|---|---|---|---|---|")
    failed = 0
    for attack in ATTACKS:
        if not wanted or attack.name in wanted:
            shown, command = run(attack)
            failed += not shown.holds
            verdict = "holds" if shown.holds else "FAILED"
            print(
                f"| {attack.name} | {attack.before} | {shown.now} | {shown.bound} | {verdict} | `{command}` |",
                flush=True,
            )
    return 1 if failed else 0


def run(attack: Attack) -> tuple[Shown, str]:
    """Run an attack and return what it did, with the command that repeats it. After an error no bound holds."""
    if isinstance(attack.run, str):
        arguments = arguments_of(attack.run)
        shown = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
        return _test(arguments), f"pytest {shown}"
    command = f'python -m bench.attacks "{attack.name}"'
    try:
        return attack.run(), command
    except Exception as error:  # noqa: BLE001 (the other attacks must still run)
        text = f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")
        return Shown(text, bound="no error", holds=False), command


def arguments_of(tests: str) -> list[str]:
    """Return the arguments of pytest for the tests of a row."""
    chosen, _, words = tests.partition(" -k ")
    paths, _, marks = chosen.partition(" -m ")
    return [*paths.split(), *(["-m", marks] if marks else []), *(["-k", words] if words else [])]


def _test(arguments: list[str]) -> Shown:
    """Run tests. Their bound holds only if at least one passed and none failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skipped = sum(case.find("skipped") is not None for case in cases)
    broken = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    passed = len(cases) - skipped - broken
    return Shown(
        f"{passed} tests pass, {broken} fail, {skipped} are skipped",
        bound="at least one passes, none fails",
        holds=ended.returncode == 0 and passed > 0 and broken == 0,
    )


if __name__ == "__main__":
    sys.exit(main())

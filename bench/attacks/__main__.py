"""Runs known attacks and prints a table: ``python -m bench.attacks``, or ``python -m bench.attacks pipelining``."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from bench.attacks import live


class Attack(NamedTuple):
    """An attack, what it did before there was a bound, and how it is shown now."""

    name: str
    once: str
    run: Callable[[], str] | str
    """A function that runs the attack and says what happened, or the tests that hold the bound."""


_BOUNDS = "tests/api/test_protocol_bounds.py"
_STREAMS = "tests/api/test_inference_streams.py"
_CALLS = "tests/api/test_inference.py"
_HEALTH = "tests/api/test_health.py"
ATTACKS = [
    Attack("pipelining", "61 to 2,580 MB, /healthz 7.5 s", live.pipelining),
    Attack(
        "streams for a fraction",
        "0.033 in place of 23 for a client that left early; 0 for no usage or what is no count",
        f"{_STREAMS} {_CALLS} tests/pipeline/test_charges.py -k left or leaves or estimated or no_count",
    ),
    Attack("unread downloads", "20 of 20 still there after 90 s", live.unread_downloads),
    Attack(
        "unread streams and calls left behind", "a call ran on for up to 600 s", f"{_BOUNDS} -k given_up or left_behind"
    ),
    Attack("synchronous bodies", "8.5 MB for each call of 4 MiB, 256 allowed", live.synchronous_bodies),
    Attack("connections", "a running batch stalled for 20 s, a line failed", live.connections),
    Attack("overdraft", "a balance of a billionth became -2,760", live.overdraft),
    Attack(
        "vendor fields",
        "Model, models, background, hosted tools and links reached the upstream",
        f"tests/domain/test_request_rules.py {_CALLS} -k refused or hides or allowed or upstream",
    ),
    Attack("storage", "no quota", "tests/api/test_storage_quota.py"),
    Attack("readyz", "uploads 2 to 71 ms; an outage of the bucket took every API node out", live.readyz),
    Attack("readyz without a bucket", "every API node out of service", f"{_HEALTH} -k storage or share_one_check"),
    Attack(
        "code from the current folder",
        "uvloop.py and pickle.py were imported",
        "tests/pipeline/test_validation_pool.py tests/cli/run -k current_folder or imports",
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
    attacks = [attack for attack in ATTACKS if not wanted or attack.name in wanted]
    print("| Attack | Once | Now | Command |\n|---|---|---|---|")
    failed = False
    for attack in attacks:
        now, command = _run(attack)
        failed |= "FAILED" in now
        print(f"| {attack.name} | {attack.once} | {now} | `{command}` |", flush=True)
    return 1 if failed else 0


def _run(attack: Attack) -> tuple[str, str]:
    if not isinstance(attack.run, str):
        return attack.run(), f'python -m bench.attacks "{attack.name}"'
    chosen, _, words = attack.run.partition(" -k ")
    paths, _, marks = chosen.partition(" -m ")
    arguments = [*paths.split(), *(["-m", marks] if marks else []), *(["-k", words] if words else [])]
    shown = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
    return _test(arguments), f"pytest {shown}"


def _test(arguments: list[str]) -> str:
    """Run tests and return how they ended, with the longest time that one of them printed."""
    ended = subprocess.run([sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, check=False)
    passed = len(re.findall(r"\.", "".join(re.findall(r"^[.sxF]+(?=\s|$)", ended.stdout, re.MULTILINE))))
    times = [float(found) for found in re.findall(r"(\d+\.?\d*) ms of CPU", ended.stdout)]
    figures = f", {max(times):.1f} ms of CPU at most" if times else ""
    return f"{passed} tests pass{figures}" if ended.returncode == 0 else f"FAILED with {ended.returncode}"


if __name__ == "__main__":
    sys.exit(main())

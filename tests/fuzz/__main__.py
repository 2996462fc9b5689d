"""Runs fuzzers for long: ``python -m tests.fuzz --minutes 10 multipart sse``."""

import argparse
import sys
import traceback

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=[], help=f"some of: {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=10, help="how long to run each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = 0
    for name in options.targets or TARGETS:
        found += _fuzz(name, seconds=60 * options.minutes, seed=options.seed)
    return 1 if found else 0


def _fuzz(name: str, *, seconds: float, seed: int) -> int:
    fuzzer = Fuzzer(TARGETS[name](), seed=seed)
    fuzzer.run_corpus()
    fuzzer.run_seconds(seconds)
    report = fuzzer.close()
    print(
        f"{name}: {report.executions:,} executions in {report.seconds / 60:.1f} minutes, {report.inputs} inputs reach "
        f"new lines, {report.coverage:.1%} of the lines, {len(report.finds)} finds",
        flush=True,
    )
    if report.missing:
        print(f"  not reached: {' '.join(report.missing)}")
    for find in report.finds:
        print(f"  found: {find.keep(fuzzer.folder)}")
        traceback.print_exception(find.error, file=sys.stdout)
    return len(report.finds)


if __name__ == "__main__":
    sys.exit(main())

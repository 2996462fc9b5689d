"""``python -m tests.simulation --seeds N [--first S]`` runs many worlds on all cores and names the seeds that fail."""

import argparse
import gc
import os
import sys
import time
import traceback
from multiprocessing import Pool
from typing import NamedTuple

from tests.simulation.world import World


class _Run(NamedTuple):
    """How a world ran."""

    seed: int
    steps: int
    virtual_seconds: float
    cpu_seconds: float
    fault: str


def _attempt(seed: int) -> _Run:
    started, world, fault = time.process_time(), World(seed), ""
    try:
        world.run()
    except BaseException:  # noqa: BLE001 - reported with its seed
        fault = traceback.format_exc()
    return _Run(seed, world.steps, world.time.now, time.process_time() - started, fault)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    started, runs = time.perf_counter(), list[_Run]()
    # What was imported is not looked at again by the garbage collector, which runs after each world.
    with Pool(os.cpu_count(), gc.freeze) as pool:
        for run in pool.imap_unordered(_attempt, seeds):
            runs.append(run)
            if run.fault:
                print(f"\nseed {run.seed} failed:\n{run.fault}")
            elif sys.stderr.isatty():
                print(f"\r{len(runs)} of {len(seeds)}", end="", file=sys.stderr)
    failed = sorted(run.seed for run in runs if run.fault)
    print(
        f"{len(seeds)} seeds, {sum(run.steps for run in runs):,} steps, "
        f"{sum(run.virtual_seconds for run in runs) / 3600:,.1f} virtual hours, "
        f"{sum(run.cpu_seconds for run in runs) / len(seeds):.2f} s of CPU a world, in "
        f"{time.perf_counter() - started:.1f} s: {len(failed)} failed {failed or ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

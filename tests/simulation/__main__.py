"""``python -m tests.simulation --seeds N [--first S]`` runs many worlds on all cores and names the seeds that fail."""

import argparse
import os
import sys
import time
import traceback
from multiprocessing import Pool

from tests.simulation.world import World


def _attempt(seed: int) -> tuple[int, int, float, str]:
    world = World(seed)
    try:
        world.run()
    except BaseException:  # noqa: BLE001 - reported with its seed
        return seed, world.steps, world.time.now, traceback.format_exc()
    return seed, world.steps, world.time.now, ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    started, failed, steps, virtual = time.perf_counter(), [], 0, 0.0
    with Pool(os.cpu_count()) as pool:
        for done, (seed, its_steps, its_time, fault) in enumerate(pool.imap_unordered(_attempt, seeds), 1):
            steps, virtual = steps + its_steps, virtual + its_time
            if fault:
                failed.append(seed)
                print(f"\nseed {seed} failed:\n{fault}")
            elif sys.stderr.isatty():
                print(f"\r{done} of {len(seeds)}", end="", file=sys.stderr)
    print(
        f"{len(seeds)} seeds, {steps:,} steps, {virtual / 3600:,.1f} virtual hours in "
        f"{time.perf_counter() - started:.1f} s: {len(failed)} failed {failed or ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

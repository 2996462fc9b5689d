"""``python -m tests.support.zoo [--seeds N] [NAME ...]`` prints which share of the ideal speed the limiter reaches."""

import argparse
import logging
import sys

from tests.support.zoo.cases import CASES
from tests.support.zoo.table import print_table


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(CASES)}")
    given = parser.parse_args()
    logging.disable()
    return int(not print_table(given.names or list(CASES), seeds=range(1, given.seeds + 1)))


if __name__ == "__main__":
    sys.exit(main())

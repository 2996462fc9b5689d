"""A service with prices, what its result files say that it charged, and what it booked."""

import json
from pathlib import Path
from typing import Any

from tests.support.service import Service

_SETTINGS = """
metering = true

[models.m]
input_price = 1.1
output_price = 0.7
"""
"""A line of a batch costs half of that: 550 and 350 nano-units for a token."""


def priced_settings(folder: Path) -> Path:
    """Write a settings file that charges for the model of the tests."""
    path = folder / "batchline.toml"
    path.write_text(_SETTINGS)
    return path


def cost_of(record: dict[str, Any]) -> int:
    """Return the cost of one line of the files, from nothing but what the line itself says."""
    if record["response"] is None:
        return 0
    usage = record["response"]["body"]["usage"]
    return int((usage["prompt_tokens"] * 1_100_000_000 + usage["completion_tokens"] * 700_000_000) // 2_000_000)


def funds_of(service: Service) -> int:
    """Return the balance and the credits of the only organization."""
    (organization,) = json.loads(service.command("orgs", "list", "--json"))
    return int(organization["balance_nano"]) + int(organization["credits_nano"])


def booked_by(service: Service) -> tuple[int, int]:
    """Return requests and cost, summed over the ledger's usage."""
    rows = json.loads(service.command("usage", "--by", "batch", "--json"))
    return sum(row["requests"] for row in rows), sum(row["cost_nano"] for row in rows)

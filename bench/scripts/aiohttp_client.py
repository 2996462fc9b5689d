"""A script with aiohttp, the faster client: 64 requests at once, results appended to a file."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import aiohttp  # type: ignore[import-not-found, unused-ignore]  # optional: without it, this script is not measured

from bench.scripts.starting import timed

CONCURRENCY = 64


async def run(url: str, lines: TextIO, answered: TextIO, failed: TextIO) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as client:

        async def send(line: dict[str, Any]) -> None:
            async with slots:
                try:
                    async with client.post(f"{url}/chat/completions", json=line["body"]) as answer:
                        answer.raise_for_status()
                        response = {"status_code": answer.status, "body": await answer.json()}
                except aiohttp.ClientError as error:
                    print(json.dumps({"custom_id": line["custom_id"], "error": str(error)}), file=failed)
                else:
                    print(json.dumps({"custom_id": line["custom_id"], "response": response}), file=answered)

        with timed():
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(send(json.loads(line)))


def main(url: str, source: str, output: str, errors: str) -> None:
    with Path(source).open() as lines, Path(output).open("w") as answered, Path(errors).open("w") as failed:
        asyncio.run(run(url, lines, answered, failed))


main(*sys.argv[1:])

"""The same with a quicker client, by somebody who minds the time it takes."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import aiohttp  # type: ignore[import-not-found, unused-ignore]  # who has it not leaves this contestant out

from bench.scripts.starting import when_told

AT_ONCE = 64


async def run(url: str, lines: TextIO, answered: TextIO, failed: TextIO) -> None:
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as client:

        async def ask(line: dict[str, Any]) -> None:
            async with places:
                try:
                    async with client.post(f"{url}/chat/completions", json=line["body"]) as answer:
                        answer.raise_for_status()
                        response = {"status_code": answer.status, "body": await answer.json()}
                except aiohttp.ClientError as error:
                    print(json.dumps({"custom_id": line["custom_id"], "error": str(error)}), file=failed)
                else:
                    print(json.dumps({"custom_id": line["custom_id"], "response": response}), file=answered)

        with when_told():
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(ask(json.loads(line)))


def main(url: str, source: str, output: str, errors: str) -> None:
    with Path(source).open() as lines, Path(output).open("w") as answered, Path(errors).open("w") as failed:
        asyncio.run(run(url, lines, answered, failed))


main(*sys.argv[1:])

"""A script with the official client: 64 requests at once, results appended to a file."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from openai import AsyncOpenAI, OpenAIError

from bench.scripts.starting import timed

CONCURRENCY = 64


async def run(url: str, lines: TextIO, answered: TextIO, failed: TextIO) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=url, api_key="none") as client:

        async def send(line: dict[str, Any]) -> None:
            async with slots:
                try:
                    answer = await client.chat.completions.create(**line["body"])
                except OpenAIError as error:
                    print(json.dumps({"custom_id": line["custom_id"], "error": str(error)}), file=failed)
                else:
                    response = {"status_code": 200, "body": answer.model_dump()}
                    print(json.dumps({"custom_id": line["custom_id"], "response": response}), file=answered)

        with timed():
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(send(json.loads(line)))


def main(url: str, source: str, output: str, errors: str) -> None:
    with Path(source).open() as lines, Path(output).open("w") as answered, Path(errors).open("w") as failed:
        asyncio.run(run(url, lines, answered, failed))


main(*sys.argv[1:])

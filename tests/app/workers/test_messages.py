"""The messages between `serve` and its worker processes, and what worker processes must not do."""

import asyncio
from pathlib import Path

from batchline.app.backends import open_objects, open_shared_objects
from batchline.app.workers.messages import StartMessage, dump_settings, encode_message, read_to_worker
from batchline.settings import Settings

_FILE = """
upstream_url = "http://127.0.0.1:9/v1"
upstream_api_key = "of the default"
free_credits = "1.5"
batch_endpoints = "/v1/chat/completions,/v1/embeddings"
max_concurrency = 7

[upstreams.east]
url = "http://127.0.0.1:9/v1"
api_key = "of the east"
headers = { x-team = "quiet" }

[models."small-1.5"]
upstream = ["default", "east"]
input_price = "0.1"
projects = ["one", "two"]
"""


def test_settings_arrive_whole(tmp_path: Path) -> None:
    """F2: secrets, tables and all, from wherever they came; what changed in the file since then does not."""
    path = tmp_path / "batchline.toml"
    path.write_text(_FILE)
    settings = Settings(config=path, data_dir=tmp_path)
    path.write_text('upstream_url = "http://elsewhere/v1"\n[models.new]\n')

    async def arrive() -> Settings:
        reader = asyncio.StreamReader(limit=16)
        reader.feed_data(encode_message(StartMessage(owner="worker", settings=dump_settings(settings))))
        begin = await read_to_worker(reader)
        assert isinstance(begin, StartMessage)
        assert begin.owner == "worker"
        return Settings(**begin.settings)

    assert asyncio.run(arrive()) == settings.model_copy(update={"config": None})


def test_a_hand_leaves_alone_what_others_are_writing(tmp_path: Path) -> None:
    """B2: only who holds the folder's lock knows that nobody writes, when it starts."""
    settings = Settings(data_dir=tmp_path)
    half = tmp_path / "objects" / "tmp" / "half"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"on its way")

    async def begin() -> None:
        async with open_shared_objects(settings):
            assert half.exists()
        async with open_objects(settings):
            assert not half.exists()

    asyncio.run(begin())

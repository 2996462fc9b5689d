"""`batchline models list`."""

import json

from click.testing import CliRunner

from batchline.cli import main
from tests.support.scripted_server import answering, reply


def test_models_are_listed() -> None:
    body = json.dumps({"object": "list", "data": [{"id": "small", "object": "model", "created": 0, "owned_by": "me"}]})
    with answering(reply(200, body.encode()), reply(200, body.encode()), reply(200, b'{"data": []}')) as server:
        runner = CliRunner(env={"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"})
        assert runner.invoke(main, ["models", "list"]).stdout.split() == ["model", "owned", "by", "small", "me"]
        assert json.loads(runner.invoke(main, ["models", "list", "--json"]).stdout)[0]["id"] == "small"
        none = runner.invoke(main, ["models", "list"])
    assert none.stdout == ""
    assert "lists no models" in none.stderr
    assert server.asked[0].header("authorization") == "Bearer k"

"""`batchline errors`: the failed lines by code, with a sample and what to do."""

import json

from click.testing import CliRunner

from batchline.cli import main
from tests.support.run_process import Tenant
from tests.support.service import await_end, chat_lines, submit


def _call(tenant: Tenant, *arguments: str) -> str:
    result = CliRunner(env=tenant.environment()).invoke(main, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_errors_are_grouped_by_code_with_what_to_do(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    prompts = ["fine", "[[status=400]] a", "[[status=400]] b", "[[status=404]]"]
    batch = await_end(client, submit(client, chat_lines(prompts)).id)
    shown = _call(tenant, "errors", batch.id)
    assert shown.startswith("3 of 4 lines failed.\n\ninvalid_request_error: 2 lines\n  for example  line-")
    assert "scripted status 400\n  what to do   The upstream refuses these requests;" in shown
    assert "with `batchline rerun BATCH --set NAME=VALUE`." in " ".join(shown.split())
    assert "not_found_error: 1 line\n" in shown
    assert f"batchline rerun {batch.id}" in shown
    named = _call(tenant, "errors", batch.id, "--base-url", tenant.service.base_url)
    assert named.endswith(f": batchline rerun {batch.id} --base-url {tenant.service.base_url}\n")
    found = json.loads(_call(tenant, "errors", batch.id, "--json"))
    assert [(error["code"], error["count"]) for error in found["errors"]] == [
        ("invalid_request_error", 2),
        ("not_found_error", 1),
    ]


def test_a_batch_without_failures_says_so(tenant: Tenant) -> None:
    client = tenant.service.client(tenant.account)
    batch = await_end(client, submit(client, chat_lines(["fine"])).id)
    assert _call(tenant, "errors", batch.id) == f"No line of {batch.id} failed (completed, 1 line).\n"

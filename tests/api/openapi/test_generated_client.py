"""A client that openapi-python-client makes from /openapi.json works."""

import importlib
import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from batchline.api.openapi.document import describe
from tests.support.api_server import LINE, Api

_PACKAGE = "generated_batchline_client"
_OPTIONS = {"post_hooks": [], "content_type_overrides": {"application/jsonl": "application/octet-stream"}}
"""The generator does not know JSON lines, and takes them as bytes if it is told to."""


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the generated package. A warning of the generator is a failure."""
    (tmp_path / "openapi.json").write_text(json.dumps(describe(bearer=True)))
    (tmp_path / "options.json").write_text(json.dumps(_OPTIONS))
    arguments = ["--path", tmp_path / "openapi.json", "--config", tmp_path / "options.json", "--meta", "none"]
    arguments += ["--output-path", tmp_path / _PACKAGE, "--fail-on-warning"]
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: importlib.import_module(f"{_PACKAGE}.{name}")


def test_a_generated_client_uploads_creates_and_reads(generated: Any, api: Api) -> None:
    """A6: answers and errors have the types that the document names."""
    account = api.new_account("generated")
    client_class, models, types = (generated(name) for name in ("client", "models", "types"))
    client = client_class.AuthenticatedClient(base_url=f"http://127.0.0.1:{api.port}", token=account.key)
    with client:
        form = models.UploadForm(
            purpose=models.UploadFormPurpose.BATCH, file=types.File(payload=BytesIO(LINE), file_name="in.jsonl")
        )
        file = generated("api.files.create_file").sync(client=client, body=form)
        body = models.CreateBatch(input_file_id=file.id, endpoint="/v1/chat/completions")
        batch = generated("api.batches.create_batch").sync(client=client, body=body)
        found = generated("api.batches.retrieve_batch").sync(batch.id, client=client)
        listed = generated("api.files.list_files").sync(client=client)
        missing = generated("api.batches.retrieve_batch").sync("batch_none", client=client)
    assert (found.id, found.input_file_id) == (batch.id, file.id)
    assert [each.id for each in listed.data] == [file.id]
    assert missing.error.code == "batch_not_found"

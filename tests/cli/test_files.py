"""`batchline files`: on a server and on a data folder."""

import json
import os
from pathlib import Path

from click.testing import CliRunner, Result

from batchline.cli import main
from batchline.cli.loading import BASE_URL_VARIABLES
from tests.cli.conftest import NamedPipe
from tests.support.command_line import Shell
from tests.support.run_process import Tenant
from tests.support.service import chat_lines


def _call(tenant: Tenant, *arguments: str) -> Result:
    return CliRunner(env=tenant.environment()).invoke(main, ["files", *arguments])


def test_a_file_is_uploaded_listed_downloaded_and_deleted(tenant: Tenant, tmp_path: Path) -> None:
    path, content = tmp_path / "in.jsonl", chat_lines(["a", "b"])
    path.write_bytes(content)
    file_id = _call(tenant, "upload", str(path)).stdout.strip()
    assert file_id.startswith("file-")
    [listed] = json.loads(_call(tenant, "list", "--json").stdout)
    assert (listed["id"], listed["bytes"], listed["filename"]) == (file_id, len(content), "in.jsonl")
    heads, row = _call(tenant, "list").stdout.splitlines()
    assert heads.split() == ["file", "size", "age", "expires", "name"]
    assert row.split()[0] == file_id
    assert row.split()[-1] == "in.jsonl"
    assert _call(tenant, "download", file_id).stdout_bytes == content
    saved = tmp_path / "saved.jsonl"
    result = _call(tenant, "download", file_id, "-o", str(saved))
    assert (result.stdout, saved.read_bytes()) == ("", content)
    assert _call(tenant, "delete", file_id).exit_code == 0
    assert json.loads(_call(tenant, "list", "--json").stdout) == []
    gone = _call(tenant, "download", file_id)
    assert gone.exit_code == 1
    assert "says: " in gone.stderr


def test_a_name_of_a_stranger_cannot_control_the_terminal(tenant: Tenant, tmp_path: Path) -> None:
    path = tmp_path / "a\u202eb.jsonl"
    path.write_bytes(chat_lines(["a"]))
    _call(tenant, "upload", str(path))
    shown = _call(tenant, "list").stdout
    assert r"a\u202eb.jsonl" in shown


def test_a_list_may_have_many_pages(tenant: Tenant, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(["a"]))
    made = [_call(tenant, "upload", str(path)).stdout.strip() for _ in range(3)]
    listed = json.loads(_call(tenant, "list", "--json", "--limit", "2").stdout)
    assert {each["id"] for each in listed} <= set(made)
    assert len(listed) == 2


def test_a_data_folder_without_a_service_can_be_used_and_runs_no_line(tmp_path: Path) -> None:
    """A service without a worker is started for the command, and is gone after it."""
    folder, path = tmp_path / "data", tmp_path / "in.jsonl"
    path.write_bytes(chat_lines(["a"]))
    shell = Shell(folder)
    shell.text("keys", "create")
    arguments = ["--data-dir", str(folder)]
    runner = CliRunner(env=dict.fromkeys(BASE_URL_VARIABLES) | {"BATCHLINE_UPSTREAM_URL": "http://127.0.0.1:1/v1"})
    uploaded = runner.invoke(main, ["files", "upload", str(path), *arguments])
    assert uploaded.exit_code == 0, uploaded.output
    [listed] = json.loads(runner.invoke(main, ["files", "list", "--json", *arguments]).stdout)
    assert listed["id"] == uploaded.stdout.strip()
    assert "started for" not in uploaded.stderr
    missing = runner.invoke(main, ["files", "list", "--data-dir", str(tmp_path / "typo")])
    assert missing.exit_code == 1
    assert not (tmp_path / "typo").exists()


def test_a_download_replaces_no_link_device_or_pipe(tenant: Tenant, tmp_path: Path, pipe: NamedPipe) -> None:
    path, content = tmp_path / "in.jsonl", chat_lines(["a", "b"])
    path.write_bytes(content)
    file_id = _call(tenant, "upload", str(path)).stdout.strip()
    link, device = tmp_path / "link", tmp_path / "device"
    link.symlink_to("target")
    device.symlink_to(os.devnull)
    for target in (link, device, pipe.path):
        result = _call(tenant, "download", file_id, "-o", str(target))
        assert (result.exit_code, result.stderr) == (0, f"{target}: {len(content)} bytes\n")
    assert (tmp_path / "target").read_bytes() == pipe.read() == content
    assert [link.readlink(), device.readlink()] == [Path("target"), Path(os.devnull)]
    assert pipe.path.is_fifo()
    folder = _call(tenant, "download", file_id, "-o", str(tmp_path))
    assert (folder.exit_code, "is a folder, not a file" in folder.stderr) == (2, True)


def test_every_file_is_deleted_although_one_is_refused(tenant: Tenant, tmp_path: Path) -> None:
    path, unknown = tmp_path / "in.jsonl", "file-000000000000000000000000"
    path.write_bytes(chat_lines(["a"]))
    made = [_call(tenant, "upload", str(path)).stdout.strip() for _ in range(4)]
    result = _call(tenant, "delete", made[0], unknown, made[1])
    assert result.exit_code == 1
    first, refused, last = result.stderr.splitlines()
    assert (first, last) == (f"{made[0]} is deleted", f"{made[1]} is deleted")
    assert refused.startswith(f"Error: {unknown}: ")
    several = _call(tenant, "delete", made[2], unknown, made[3], "--json")
    assert several.exit_code == 1
    assert [each["id"] for each in json.loads(several.stdout)] == made[2:]
    assert json.loads(_call(tenant, "list", "--json").stdout) == []

"""Where a command writes the file that the user named: regular files, links, devices, pipes and descriptors."""

import os
import socket
from pathlib import Path

import click
import pytest

from batchline.cli.destination import find_destination
from tests.cli.conftest import NamedPipe

_FULL = Path("/dev/full")


def test_a_regular_file_is_its_own_destination(tmp_path: Path) -> None:
    found = find_destination(tmp_path / "out", staged=tmp_path / "staged")
    assert (found.name, found.path, found.special_file) == (str(tmp_path / "out"), tmp_path / "out", None)
    found.path.write_text("answers")
    found.deliver(advice="Again")
    assert found.path.read_text() == "answers"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path: Path, exists: bool) -> None:
    """The file that replaces the target must be made beside it: the link may lead to another disk."""
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to("folder/target")
    found = find_destination(link, staged=tmp_path / "staged")
    assert (found.name, found.path, found.special_file) == (str(link), target.resolve(), None)


def test_a_link_to_a_device_leaves_both_alone(tmp_path: Path) -> None:
    link, staged = tmp_path / "link", tmp_path / "staged"
    link.symlink_to(os.devnull)
    found = find_destination(link, staged=staged)
    assert (found.path, found.special_file) == (staged, link)
    staged.write_text("answers")
    found.deliver(advice="Again")
    assert link.readlink() == Path(os.devnull)
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("content", [b"answers\n", b"", None])
def test_a_pipe_is_written_in_place_and_ended(tmp_path: Path, pipe: NamedPipe, content: bytes | None) -> None:
    """Who reads it waits for its end, also if there is nothing to write."""
    staged = tmp_path / "staged"
    found = find_destination(pipe.path, staged=staged)
    if content is not None:
        staged.write_bytes(content)
    found.deliver(advice="Again")
    assert pipe.read() == (content or b"")
    assert pipe.has_ended
    assert pipe.path.is_fifo()


def test_a_file_behind_a_descriptor_is_continued(tmp_path: Path) -> None:
    """`-o /dev/fd/N` and `-o /dev/stdout >> FILE` must not remove what the file has."""
    target, staged = tmp_path / "log", tmp_path / "staged"
    target.write_text("earlier\n")
    staged.write_text("answers\n")
    with target.open("a") as file:
        find_destination(Path(f"/dev/fd/{file.fileno()}"), staged=staged).deliver(advice="Again")
    assert target.read_text() == "earlier\nanswers\n"


@pytest.mark.skipif(not _FULL.exists(), reason="the device that is always full is there on Linux only")
def test_a_device_that_takes_no_more_is_named_with_the_advice(tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.write_text("answers")
    with pytest.raises(click.ClickException, match=r"^/dev/full cannot be written: No space left on device. Again.$"):
        find_destination(_FULL, staged=staged).deliver(advice="Again")
    assert _FULL.is_char_device()


def test_what_cannot_be_written_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("no-such-folder/out")
    Path("file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, text in {
            "socket": "socket is a socket, not a file",
            ".": "is a folder, not a file",
            "loop": "loop cannot be written: Too many levels of symbolic links",
            "dangling": "there is no folder .*no-such-folder; create it first",
            "no-such-folder/out": "there is no folder no-such-folder; create it first",
            "file/out": "there is no folder file; create it first",
            "/dev/fd/99999": "/dev/fd/99999 cannot be written",
        }.items():
            with pytest.raises(click.UsageError, match=text):
                find_destination(Path(name), staged=tmp_path / "staged")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_or_a_pipe_without_permission_is_refused_in_words(tmp_path: Path, pipe: NamedPipe) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555)
    pipe.path.chmod(0o444)
    for path in (folder / "out", pipe.path):
        with pytest.raises(click.UsageError, match="cannot be written: there is no permission"):
            find_destination(path, staged=tmp_path / "staged")

"""``batchline files``: lists, uploads, downloads and deletes files."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from batchline.cli.destination import STANDARD, find_destination, stdout_destination
from batchline.cli.help import Group
from batchline.cli.output import client_options, copy_to_stdout, exit_codes, show_object, show_objects
from batchline.cli.paging import limit_option, read_pages
from batchline.cli.store import now
from batchline.cli.text import format_age, format_size, printable

if TYPE_CHECKING:
    from batchline.cli.connection.session import ClientSession
    from batchline.client.models import RemoteFile

_EPILOG = exit_codes("0", "1", "2", "4")


@click.group(cls=Group)
def files() -> None:
    """List, upload, download and delete files."""


@files.command("list", epilog=_EPILOG)
@limit_option
@client_options
def list_files(*, limit: int, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """List files, the newest first."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.client.models import file_decoder  # noqa: PLC0415

    with connect(base_url, flags) as session:
        found = read_pages(session.client.files, limit=limit, retrier=session.retrier)
    if as_json:
        show_objects(found)
        return
    if not found:
        click.echo("There is no file.", err=True)
        return
    from batchline.cli.views import show, table  # noqa: PLC0415 (rich: only to show)

    heads = ("file", "size", "age", "expires", "name")
    show(table(heads, [_row(file_decoder.decode(raw)) for raw in found], right=heads[1:4]))


@files.command(epilog=_EPILOG)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@client_options
def upload(*, file: Path, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Upload FILE as the input of batches, and print its id."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with connect(base_url, flags) as session:
        client, size = session.client, file.stat().st_size

        def show(sent: int) -> None:
            session.stage(f"Uploading {file.name}: {format_size(sent)} of {format_size(size)}")

        file_id = session.retrier.few_times(lambda: client.upload(file, on_progress=show))
        session.clear()
        raw = session.retrier.few_times(lambda: client.file_object(file_id)) if as_json else None
    if raw is None:
        click.echo(file_id)
    else:
        show_object(raw)


@files.command(epilog=_EPILOG)
@click.argument("file_id", metavar="FILE_ID")
@click.option("-o", "--output", metavar="FILE", default="-", help="Where to save it; - is stdout. [-]")
@client_options
def download(*, file_id: str, output: str, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Download a file. It appears only when it is complete; a broken connection is resumed.

    With --json, print the file's object after the download; this needs --output.
    """
    if as_json and output == STANDARD:
        raise click.UsageError("--json needs --output FILE: stdout cannot hold both the file and its object")
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with TemporaryDirectory(prefix="batchline-") as folder:
        staged = Path(folder) / "content"
        target = stdout_destination(staged) if output == STANDARD else find_destination(Path(output), staged=staged)
        with connect(base_url, flags) as session:
            _download(session, file_id, target.path)
            target.deliver(advice="Run the same command again")
            if output == STANDARD:
                copy_to_stdout(target.path, advice="Run the same command again, or save the file with --output")
            elif as_json:
                show_object(session.retrier.few_times(lambda: session.client.file_object(file_id)))
            else:
                click.echo(f"{printable(output)}: {format_size(target.path.stat().st_size)}", err=True)


@files.command(epilog=_EPILOG)
@click.argument("file_ids", metavar="FILE_ID...", nargs=-1, required=True)
@client_options
def delete(*, file_ids: tuple[str, ...], base_url: str | None, as_json: bool, **flags: Any) -> None:
    """Delete files. A batch that runs keeps a copy of its lines.

    If one cannot be deleted, the others are. With --json, several objects are printed as one array.
    """
    from batchline.cli.connection.changes import change_each  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.cli.connection.session import connect  # noqa: PLC0415

    with connect(base_url, flags) as session:
        change_each(session, file_ids, session.client.delete_file, as_json=as_json, describe=lambda _: "deleted")


def _download(session: "ClientSession", file_id: str, target: Path) -> None:
    from batchline.cli.connection.transfer import download as download_to  # noqa: PLC0415

    def show(done: int, total: int) -> None:
        session.stage(f"Downloading {file_id}: {format_size(done)} of {format_size(total)}")

    download_to(session.client, file_id, target, retrier=session.retrier, on_progress=show)
    session.clear()


def _row(file: "RemoteFile") -> tuple[str, ...]:
    at = now()
    return (
        file.id,
        format_size(file.bytes),
        format_age(at - file.created_at),
        "-" if file.expires_at is None else format_age(file.expires_at - at),
        file.filename,
    )

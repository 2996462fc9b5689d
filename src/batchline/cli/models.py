"""``batchline models``: lists the models that a key may use."""

from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.output import client_options, exit_codes, say, show_objects


@click.group(cls=Group)
def models() -> None:
    """List the models that can be used."""


@models.command("list", epilog=exit_codes("0", "1", "2", "4"))
@client_options
def list_models(*, base_url: str | None, as_json: bool, **flags: Any) -> None:
    """List the models that the key may use."""
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)
    from batchline.client.models import model_decoder  # noqa: PLC0415

    with connect(base_url, flags) as session:
        found = session.retrier.few_times(session.client.models)
    if as_json:
        show_objects(found)
        return
    from batchline.cli.views import show, table  # noqa: PLC0415 (rich: only to show)

    rows = [(model.id, model.owned_by) for model in map(model_decoder.decode, found)]
    if rows:
        show(table(("model", "owned by"), rows))
    else:
        say("The server lists no models. It may accept every model id.", err=True)

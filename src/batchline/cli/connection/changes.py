"""Makes the same change to several objects of the server, and shows each of them."""

from collections.abc import Callable, Sequence
from functools import partial

import click
from msgspec import Raw

from batchline.cli.connection.explain import explain_refusal
from batchline.cli.connection.session import ClientSession
from batchline.cli.output import show_object, show_objects
from batchline.cli.text import printable
from batchline.client.errors import Denied, OutOfFunds, RequestRefused, ServerTrouble, Throttled


def change_each(
    session: ClientSession,
    ids: Sequence[str],
    change: Callable[[str], Raw],
    *,
    as_json: bool,
    describe: Callable[[Raw], str],
) -> None:
    """Change each object and show its new state. A refusal of one is printed, and the others are changed.

    Exit with 1 at the end if one was refused. An error that concerns all of them, such as no connection or a wrong key,
    is raised at once.
    """
    changed: list[Raw] = []
    try:
        for each in ids:
            raw = _change(session, each, change)
            if raw is not None:
                changed.append(raw)
                if not as_json:
                    click.echo(f"{printable(each)} is {describe(raw)}", err=True)
    finally:
        if as_json:
            _show(changed, is_list=len(ids) > 1)
    if len(changed) < len(ids):
        raise SystemExit(1)


def _change(session: ClientSession, each: str, change: Callable[[str], Raw]) -> Raw | None:
    """Return the changed object, or None if the server refuses to change this one."""
    try:
        return session.retrier.few_times(partial(change, each))
    except (Denied, OutOfFunds, Throttled, ServerTrouble):
        raise
    except RequestRefused as error:
        click.echo(f"Error: {printable(each)}: {explain_refusal(session.target, error)}", err=True)
        return None


def _show(changed: Sequence[Raw], *, is_list: bool) -> None:
    """Print the objects as one JSON document: a list if several were asked for."""
    if is_list:
        show_objects(changed)
    elif changed:
        show_object(changed[0])

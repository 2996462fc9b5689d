"""Explains to the user why a request failed, and what to do: each error of the client becomes a message."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from batchline.cli.connection.local_service import ServiceEnded
from batchline.cli.connection.target import Target, WrongCredentials
from batchline.cli.text import shortened
from batchline.client.errors import ClientError, Denied, OutOfFunds, RequestRefused, ServerTrouble, Unreachable
from batchline.domain.errors import MissingCredentials

AGAIN = "Run the same command again"
RESUME = f"{AGAIN} to resume"


@contextmanager
def explain_errors(target: Target, *, advice: str = AGAIN, if_gone: str = "") -> Iterator[None]:
    """Raise ClickException with an explanation and the exit code.

    ``advice`` says what helps after a transient error, ``if_gone`` what helps if something does not exist any more.
    """
    try:
        yield
    except Denied as error:
        # A server that takes a key alone says of an unknown one that there is none.
        reason = target.if_key_unknown if str(error) == str(MissingCredentials()) else _text(error)
        raise WrongCredentials(f"{reason}. {target.if_denied}.") from None
    except OutOfFunds as error:
        funds = "Add some with `batchline orgs add-balance` on the machine of the service"
        raise click.ClickException(f"{_text(error)}. {funds}. {advice}.") from None
    except Unreachable as error:
        raise click.ClickException(
            f"{target.name} cannot be reached: {_text(error)}. {target.if_unreachable}."
        ) from None
    except RequestRefused as error:
        more = f" {advice}." if isinstance(error, ServerTrouble) else f" {if_gone}" if error.status == 404 else ""
        raise click.ClickException(f"{explain_refusal(target, error)}{more.rstrip()}") from None
    except ClientError as error:
        raise click.ClickException(f"{target.name}: {_text(error)}. {advice}.") from None
    except ServiceEnded as error:
        raise click.ClickException(str(error)) from None
    except BrokenPipeError:
        raise  # the reader of stdout has gone, which click knows how to end with
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'a file'}: {error.strerror}. {advice}.") from None


def explain_refusal(target: Target, error: RequestRefused) -> str:
    """Return who refused a request, and why."""
    return f"{target.speaker} says: {_text(error)}."


def _text(error: ClientError) -> str:
    return shortened(str(error)).rstrip(".")

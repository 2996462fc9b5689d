"""Says before a large job what it will take, and asks on a terminal whether to run it."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from batchline.cli.text import counted, format_count, format_duration, format_units, printable
from batchline.client.client import Client
from batchline.client.errors import RequestRefused
from batchline.client.models import CheckedModel, RemoteCheck, check_decoder
from batchline.client.retry import Retrier

_READ_BYTES = 1024 * 1024
_MAX_SHOWN_MODELS = 5


class Threshold(Struct, frozen=True, kw_only=True):
    """The size from which a job is large, and the function that asks the user about it."""

    lines: int
    """A job with more lines is large."""
    job_lines: int | None = None
    """The lines of the whole job if the batch is only its first part."""
    asks: Callable[[str], bool] | None = None
    """Asks the user whether to run the job; None without a terminal, and then it runs."""

    def is_exceeded_by(self, source: Path) -> bool:
        """Return whether the job of a file is large."""
        return (self.job_lines or _count_lines(source)) > self.lines


def estimate_batch(client: Client, retrier: Retrier, file_id: str, *, endpoint: str) -> RemoteCheck | None:
    """Return what a batch of an uploaded file will take; None if the server cannot say, or the file is not valid."""
    try:
        found = check_decoder.decode(retrier.few_times(lambda: client.check(file_id, endpoint=endpoint)))
    except RequestRefused:
        return None
    return found if found.valid else None


def describe(found: RemoteCheck, *, job_lines: int | None = None) -> list[str]:
    """Return what a batch will take, one line of text for all of it and one for each model.

    If the batch is the first part of a job, the job is assumed to go on like it.
    """
    factor = 1.0 if job_lines is None or not found.lines else job_lines / found.lines
    lines = job_lines or found.lines
    parts = [counted(lines, "line"), *_tokens(found.models, factor), *_cost(found.models, factor)]
    if found.seconds is not None:
        low, high = (format_duration(factor * seconds) for seconds in (found.seconds.low, found.seconds.high))
        parts.append(f"about {low}" if low == high else f"about {low} to {high}")
    disabled = [model for model in found.models if not model.enabled]
    return [
        "This job takes: " + "; ".join(parts),
        *(
            f"  {printable(model.model or 'no model')}: {counted(model.lines, 'line')} will fail, because the project "
            "may not use it"
            for model in disabled[:_MAX_SHOWN_MODELS]
        ),
    ]


def _tokens(models: list[CheckedModel], factor: float) -> list[str]:
    known = [model.input_tokens for model in models if model.input_tokens is not None]
    about = "about " if factor != 1 or any(model.estimated for model in models) else ""
    output = [model.output_tokens_at_most for model in models]
    limited = [tokens for tokens in output if tokens is not None]
    most = f"at most {_count(sum(limited), factor)}" if len(limited) == len(output) else "without a limit"
    return [f"{about}{_count(sum(known), factor)} tokens in, {most} out"]


def _cost(models: list[CheckedModel], factor: float) -> list[str]:
    costs = [float(model.cost_at_most) for model in models if model.cost_at_most is not None]
    if not costs:
        return []
    most = float(f"{factor * sum(costs):.6g}")  # An estimate with more digits would look exact.
    return [f"cost at most {format_units(most)}" + ("" if len(costs) == len(models) else " and more")]


def _count(number: int, factor: float) -> str:
    return format_count(round(factor * number))


def _count_lines(source: Path) -> int:
    with source.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_READ_BYTES), b""))

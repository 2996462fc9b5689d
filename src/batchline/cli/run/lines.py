"""A run of a JSONL file with one request per line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchline.cli.destination import STANDARD
from batchline.cli.output import copy_to_stdout
from batchline.cli.run.context import open_context
from batchline.cli.run.files import confirm_again, open_files
from batchline.cli.run.report import show_results, show_summary
from batchline.cli.run.runner import RunOptions


class LinesRequest(Struct, frozen=True, kw_only=True):
    """The files of a run as the user named them, and the patch of every body."""

    source: str
    output: str | None
    errors: Path | None
    patch: dict[str, Any]
    again: bool
    """Whether a finished job is run again without asking."""

    def run(self, options: RunOptions, base_url: str | None, flags: Mapping[str, Any], *, as_json: bool) -> int:
        """Run the file, show the results, and return the number of failed lines. Raise ClickException."""
        with open_files(self.source, self.output, self.errors, patch=self.patch) as files:
            is_asked = self.source != STANDARD and not files.to_stdout and not files.journal.exists()
            if is_asked and not self.again and not options.restart:
                confirm_again(Path(self.source), files.output, files.errors, ask=options.confirms)
            with open_context(base_url, flags) as context:
                results = context.run_batch(files, options)
                context.display.clear()
                show_results(results, place=options.place)
            if as_json:
                show_summary(results)
            elif results.to_stdout and results.output is not None:
                copy_to_stdout(
                    results.output.path,
                    advice=f"The answers are not lost: batchline results {results.batch.id} --succeeded{options.place}",
                )
        return results.batch.request_counts.failed

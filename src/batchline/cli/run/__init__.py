"""``batchline run``: sends the requests of one file through a batch and saves the answers."""

from batchline.cli.run.command import run

__all__ = ["run"]

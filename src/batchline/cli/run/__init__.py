"""``batchline run``: one file of requests in, one of answers out."""

from batchline.cli.run.command import run

__all__ = ["run"]

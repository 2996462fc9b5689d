"""``batchline batches``: lists, shows, watches, cancels, releases and ends batches."""

from batchline.cli.batches.command import batches

__all__ = ["batches"]

"""``batchline top``: shows the operator what runs now, over all projects, and what waits."""

from batchline.cli.top.command import top

__all__ = ["top"]

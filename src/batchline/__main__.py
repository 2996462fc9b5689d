"""``python -m batchline``, for where the command is not on the path."""

from batchline.cli import main

main(prog_name="batchline")

"""``python -m batchline``, for systems on which the command is not on the PATH."""

from batchline.cli import main

main(prog_name="batchline")

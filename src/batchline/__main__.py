"""``python -m batchline``, for systems on which the command is not on the PATH."""

import sys

if not sys.flags.safe_path:
    # Python with -m would import a file in the current folder in place of a module of the same name.
    del sys.path[0]

from batchline.cli import main

main(prog_name="batchline")

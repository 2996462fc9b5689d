"""The work of the processes that validate files. What it does is shown by the tests of the pool that starts them."""

import subprocess
import sys

_IMPORT = """
import sys

import batchline.pipeline.validation_child

print(sorted({"asyncio", "httpx", "pydantic", "sqlite3", "uvloop"} & sys.modules.keys()))
"""


def test_a_child_imports_nothing_that_it_does_not_need() -> None:
    """The first batch of a service waits until its child has started."""
    program = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert program.stdout == "[]\n"

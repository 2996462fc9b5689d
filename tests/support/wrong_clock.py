"""Runs batchline on a machine whose wall clock is wrong: ``python -m tests.support.wrong_clock FILE serve ...``.

FILE has the number of seconds by which the clock is ahead. A test may change it while the process runs.
"""

import sys
import time
from pathlib import Path

from batchline.cli import main
from batchline.system import SystemClock


class WrongClock:
    """The command prefix of a process, and the file that sets its clock."""

    def __init__(self, folder: Path, *, ahead: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "ahead"
        self.set(ahead)

    def command(self, role: str) -> tuple[str, ...]:
        return ("-m", __name__, str(self._file), role)

    def set(self, ahead: float) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(str(ahead))
        temporary.replace(self._file)


def _run() -> None:
    file = Path(sys.argv.pop(1))
    SystemClock.now = staticmethod(lambda: time.time() + float(file.read_text()))
    main()


if __name__ == "__main__":
    _run()

"""Records which lines of some modules run, to guide a fuzzer and to say how much of them it reached."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

Line = tuple[str, int]


class LineCoverage:
    """The lines of some modules that ran, and those that could have run."""

    def __init__(self, modules: tuple[ModuleType, ...]) -> None:
        self._files = {str(module.__file__) for module in modules}
        self.reached: set[Line] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the meantime, in this thread."""
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)

    @property
    def all_lines(self) -> set[Line]:
        """Every line inside a function of the modules. What runs at import is not counted."""
        return {(file, line) for file in self._files for line in _lines_of(file)}

    @property
    def missing(self) -> list[Line]:
        """The lines that never ran."""
        return sorted(self.all_lines - self.reached)

    @property
    def share(self) -> float:
        """The share of all lines that ran."""
        every = self.all_lines
        return len(self.reached & every) / len(every)

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename in self._files else None

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line


def _lines_of(file: str) -> Iterator[int]:
    waiting = [compile(Path(file).read_text(), file, "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        if code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS:
            yield from {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}

"""Tells connections that an upstream resets because too many are open from those that break by the fault of a line.

A crash breaks everything in flight, and the line that caused it breaks again. If only some of the lines in flight break
together, while others are answered, and if the broken ones pass when they are tried again, the number in flight was the
cause. From then on a connection that breaks quickly is a refusal::

    unknown ──(some break together; others beside them outlast that, and the broken ones are answered later)──> known
    known   ──(everything in flight breaks)──> unknown
"""

from collections.abc import Hashable, Iterable

from batchline.pipeline.job import Job

_LINES_TO_KNOW = 4
"""The number of lines that must be answered of those that broke, and of those beside them. A few answers may be read
after the breaks of a crash although they came before."""

_MAX_LINES = 1024
"""The most lines to remember. As many may be in flight."""


class Resets:
    """Learns from the broken connections of one upstream. It remembers the keys of lines, and not their bodies."""

    def __init__(self) -> None:
        self.known = False
        """Whether the upstream resets connections beyond a number in flight."""
        self._broken: set[Hashable] = set()
        """The lines that broke and were not answered yet."""
        self._passed = 0
        """The number of lines that broke and were answered later."""
        self._beside: set[Hashable] = set()
        """The lines that were in flight beside the last breaks and did not break."""
        self._answered_beside = 0
        """The number of these that were answered since the last break."""
        self._survived = False
        """Whether many other connections outlasted breaks."""

    def on_break(self, job: Job, *, beside: Iterable[Job], is_first: bool) -> None:
        """Note a broken connection. ``is_first`` says that it does not belong to the breaks before it."""
        if is_first:
            self._beside = {other.line_key for other in beside}
        self._beside.discard(job.line_key)
        self._answered_beside = 0
        if len(self._broken) < _MAX_LINES:
            self._broken.add(job.line_key)

    def on_breaks_over(self, *, survived: bool) -> None:
        """Note that no further break belongs to the last ones, and whether many other connections outlasted them."""
        if self._broken and not self._beside:
            self.known = False
            self._forget()
        elif survived:
            self._survived = True

    @property
    def awaits_answers(self) -> bool:
        """Whether answers may show what the cause of breaks was."""
        return bool(self._broken or self._passed)

    def on_answer(self, job: Job) -> bool:
        """Note an answer, and return whether it shows that the number in flight was the cause of the last breaks."""
        if job.line_key in self._broken:
            self._broken.remove(job.line_key)
            self._passed += 1
        self._answered_beside += job.line_key in self._beside
        if self._passed < _LINES_TO_KNOW or (self._answered_beside < _LINES_TO_KNOW and not self._survived):
            return False
        self.known = True
        self._forget()
        return True

    def _forget(self) -> None:
        self._broken, self._beside = set(), set()
        self._passed = self._answered_beside = 0
        self._survived = False

"""Decides how long a limit is held before more is probed, by what the last probes have cost.

Most upstreams refuse what a probe adds and nothing else, so a probe costs next to nothing. Others refuse everything for
some time after a single refusal: a gateway whose server cools down, or a ban. There a probe costs all of that time, so
rests become longer with each such probe, and the limit is not raised meanwhile::

    probe ──(all refused for 5 s)──> rest 10 s ──> probe ──(all refused for 5 s)──> rest 20 s ──> probe ...
"""

from batchline.pipeline.dispatch.limiter.slots import GOLDEN_RATIO

_SECONDS_BETWEEN_PROBES = 1.0
"""The end of a limit must be noticed within seconds."""
_LONGEST_REST, _COSTLY = 4, 0.25
"""The time between probes of evenly spaced starts doubles, up to so many times, while more than this part of them is
refused: if they are only a little too close to each other, an upstream may refuse every other one."""
_FIRST_BETWEEN_EVEN, _MOST_BETWEEN_EVEN = 2, 128
"""Evenly spaced starts are tried after so many other probes, twice as many each time, and at most so many."""
_FIRST_FACTOR, _GROWTH = 2.0, 2.0
"""The first rest after a block that a probe led to is so many times as long as the block. Then the factor grows."""
_LONGEST_SECONDS = 120.0
"""A limit that has grown is found in the end, even if each look for it costs seconds."""


class ProbeRests:
    """The rests between the probes of one model."""

    def __init__(self) -> None:
        self.next_at = 0.0
        """The time of the next probe."""
        self._begun = 0
        """The number of rests so far."""
        self._costly_probes = 0
        """The number of probes in a row of which many requests were refused."""
        self._failed, self._even_after = 0, _FIRST_BETWEEN_EVEN
        """The number of probes that failed since one with evenly spaced starts, and after how many the next one is."""
        self._factor = _FIRST_FACTOR
        """The next rest after a block, as a multiple of its duration."""
        self._long_until = 0.0
        """The end of the last long rest, which followed on a block."""
        self._answers = 0
        """The answers since the end of the last block, which is at ``_since``."""
        self._since = 0.0

    @property
    def were_blocked(self) -> bool:
        """Whether the last probe led to a block, so that the next one should add little."""
        return self._factor > _FIRST_FACTOR

    @property
    def is_even_probe_due(self) -> bool:
        """Whether enough probes failed since evenly spaced starts were tried."""
        return self._failed >= self._even_after

    def are_long(self, now: float) -> bool:
        """Return whether the limit should not be raised at all, because that has led to a block."""
        return now < self._long_until

    def begin(self, now: float, *, is_even: bool) -> None:
        """Rest, because a limit is held from now on."""
        # Probes are not evenly spaced: the same lines might be ready for each of them, and be refused each time.
        self._begun += 1
        seconds = _SECONDS_BETWEEN_PROBES * (0.75 + self._begun * GOLDEN_RATIO % 1 / 2)
        rests = min(_LONGEST_REST, 2**self._costly_probes) if is_even else 1
        self.next_at = max(self._long_until, now + rests * seconds)

    def on_failed(self, part: float, *, tried_even: bool) -> None:
        """Note that a probe raised nothing, because this part of it was refused.

        ``tried_even`` says that starts were spaced evenly only for this probe.
        """
        self._costly_probes = self._costly_probes + 1 if part > _COSTLY else 0
        self._failed += 1
        if tried_even:
            self._failed, self._even_after = 0, min(_MOST_BETWEEN_EVEN, 8 * self._even_after)

    def on_accepted(self) -> None:
        """Note that a probe was accepted."""
        self._costly_probes = 0

    def on_answers(self, count: int) -> None:
        self._answers += count

    def on_block_over(self, began_at: float, now: float, *, raised: bool, rate: float) -> None:
        """Rest for long if a block was due to a limit that had been ``raised``, and has cost throughput.

        It has cost none if more were answered since the last block than would be at the ``rate`` that is held from now
        on: some upstreams accept so many in each few seconds, however fast they come.
        """
        if raised and self._answers < rate * (now - self._since):
            self.next_at = self._long_until = now + min(_LONGEST_SECONDS, self._factor * (now - began_at))
            self._factor *= _GROWTH
        else:
            self._factor, self._long_until, self.next_at = _FIRST_FACTOR, 0.0, now
        self._answers, self._since = 0, now

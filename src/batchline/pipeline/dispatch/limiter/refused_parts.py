"""Estimates which part of the requests of a model is refused: of the last ones, and at any limit.

Some upstreams refuse a part of what they get by chance, whatever the limit is. That part is *usual*: it is tolerated,
and costs the lines less.
"""

from math import log2

FEW, MANY, ALL = 0.12, 0.25, 0.99
"""Parts of the requests. If few are refused, nothing is done. If many of the last ones are, there is a limit. If all
are, no lower limit can be derived from them."""
NONE = 0.02
"""While at most this part is refused, the upstream may not be full."""
_TOLERANCE = 1.3
"""A part that is refused at any limit may grow by this factor before the limit is taken as the cause."""
_RECENT_WEIGHT, _USUAL_WEIGHT, _USUAL_SAMPLE_WEIGHT = 1 / 16, 1 / 64, 0.2
"""The weights of one more request in the part that was refused lately, and of one more request or sample in the part
that is refused at any limit. The first must follow changes soon, and the others must not follow chance."""
_LEAST_COST = 0.5
"""A refusal costs its line at least this much, so that a line that is always refused fails in the end."""


class RefusedParts:
    """Follows the parts of one model."""

    def __init__(self) -> None:
        self.recent = 0.0
        """The part of the last requests that was refused."""
        self.usual = 0.0
        """The part that is refused at any limit."""
        self._most_usual = FEW
        """The largest part that a comparison has shown to be refused at any limit, or few if there was none."""

    @property
    def tolerated(self) -> float:
        """The largest part that may be refused without any consequence."""
        return max(FEW, _TOLERANCE * self.usual + FEW / 2)

    @property
    def cost(self) -> float:
        """The cost of a refusal: 1, but less if more than half of the requests are refused, or some at any limit.

        So no line fails by chance.
        """
        if self.usual > FEW:
            return _LEAST_COST
        return max(_LEAST_COST, min(1.0, -log2(max(NONE, self.recent))))

    def on_answers(self, count: int, *, limited: bool) -> None:
        """Count requests that were accepted, with a limit or without one."""
        self.recent *= (1 - _RECENT_WEIGHT) ** count
        if not limited:
            self.usual *= (1 - _USUAL_WEIGHT) ** count

    def on_refusal(self, *, limited: bool) -> None:
        """Count a request that was refused.

        Without a limit the cause may be that there is none. So it raises the usual part only up to few, or up to the
        part that a comparison has shown.
        """
        self.recent += _RECENT_WEIGHT * (1 - self.recent)
        if not limited:
            most = 1.0 if self._most_usual > FEW else FEW
            self.usual = min(self._most_usual, self.usual + _USUAL_WEIGHT * max(0.0, most - self.usual))

    def on_sample(self, part: float) -> None:
        """Learn from a sample of which a tolerated part was refused."""
        self.usual += _USUAL_SAMPLE_WEIGHT * (min(max(FEW, self.usual), part) - self.usual)

    def on_comparison(self, part: float) -> None:
        """Take a part as usual, because no lower limit is better."""
        self.usual, self._most_usual = part, max(FEW, part)

    def on_probe(self, part: float) -> None:
        """Learn from a probe that was accepted. If some are refused at any limit, a larger part may be."""
        if self.usual > FEW:
            self.usual = max(self.usual, part)

    def forget_recent(self) -> None:
        """Forget the last requests, because they were those of an outage."""
        self.recent = 0.0

"""Whether one level is worth more than another, when every measure is noisy."""

from math import sqrt

from batchline.pipeline.limiter.flow import Measure, gain, spread

WORTH = 0.25
"""A level is worth ``rate / load ** WORTH``: a tenth more in flight must bring a fortieth more answers."""

_SURE, _UNLIKELY = 3.0, 1.0
"""Standard errors for a move, and against one: a needless move costs more than another look."""
_MOST_PROBES = 12
_LEAST_NOISE, _FIRST_NOISE = 0.02, 0.5
_LEARNING, _LARGEST_SURPRISE = 0.15, 9.0


class Noise:
    """Variance of the logarithm of a rate, times the answers it was measured by."""

    def __init__(self) -> None:
        self.variance = _FIRST_NOISE
        self._samples = 1

    def learn(self, one: Measure, other: Measure) -> None:
        """Two measures of the same load."""
        sample = gain(one, other) ** 2 / (1 / one.answers + 1 / other.answers)
        # A jump is the upstream's, not noise, and must not hide the next one.
        sample = min(sample, _LARGEST_SURPRISE * max(self.variance, _LEAST_NOISE))
        self._samples += 1
        self.variance += max(_LEARNING, 1 / self._samples) * (sample - self.variance)

    def between(self, one: Measure, other: Measure) -> float:
        """Variance of the gain from one to the other."""
        return max(self.variance, _LEAST_NOISE) * (1 / one.answers + 1 / other.answers)


class Evidence:
    def __init__(self) -> None:
        self._sum = self._variance = 0.0
        self._probes = 0

    def add(self, usual: Measure, probed: Measure, noise: Noise) -> None:
        self._sum += gain(usual, probed) - WORTH * spread(usual, probed)
        self._variance += noise.between(usual, probed)
        self._probes += 1

    @property
    def sure(self) -> bool:
        """The probed level is worth more."""
        return self._sum > _SURE * sqrt(self._variance)

    @property
    def unlikely(self) -> bool:
        return self._sum < -_UNLIKELY * sqrt(self._variance) or self._probes >= _MOST_PROBES

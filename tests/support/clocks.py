"""A clock that stands still until a test moves it, and random numbers that a test chooses."""

from batchline.ports import ClockState


class SettableClock:
    """The clock of a machine and of a store at once."""

    state = ClockState()

    def __init__(self, *, now: float = 1_800_000_000.0, steady: float = 1000.0) -> None:
        self._now, self._steady = now, steady

    def now(self) -> float:
        return self._now

    def steady(self) -> float:
        return self._steady

    def uptime(self) -> float:
        return self._steady

    def due(self) -> float:
        return self._now

    async def check(self) -> ClockState:
        return self.state

    def jump(self, seconds: float) -> None:
        """Set the time of day and nothing else, as an operator or NTP does."""
        self._now += seconds

    def set(self, now: float) -> None:
        self._now = now

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._steady += seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class ChosenRandom:
    """Returns the number at ``share`` of the way between the bounds: 0 is the lower one, 1 the upper."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def bytes(self, count: int) -> bytes:
        return bytes(count)

    def uniform(self, low: float, high: float) -> float:
        return low + self._share * (high - low)

"""Which models share a limit, and that it holds for those alone (D9)."""

from collections.abc import Callable

import pytest

from tests.support.zoo.dispatcher import SimulatedDispatcher, Work
from tests.support.zoo.upstreams import ByModel, HardLimit, Overloading, Queueing, Upstream, about, always
from tests.support.zoo.world import World

ENDLESS = 40_000
ENGINE_RATE = 320.0


class Names:
    """Some names of an engine that gets slower with too many requests, beside a model at another server.

    With ``other=None`` that model is one more name of the engine.
    """

    def __init__(self, names: int, other: Callable[[World], Upstream] | None = Upstream, *, seed: int = 1) -> None:
        self.world = World(seed)
        engine = Overloading(self.world, 0.1, slots=32)
        servers: dict[str, Upstream] = {f"name{number}": engine for number in range(names)}
        servers["other"] = engine if other is None else other(self.world)
        self.dispatcher = SimulatedDispatcher(self.world, ByModel(self.world, servers))
        self.works = [self.dispatcher.add(ENDLESS // names, model=name) for name in servers if name != "other"]

    def add_to_other(self, lines: int) -> Work:
        return self.dispatcher.add(lines, model="other", project="two")

    def wait(self, seconds: float) -> None:
        until = self.world.time + seconds
        self.world.run_until(lambda: self.world.time >= until, limit_seconds=seconds + 1.0)

    def rate(self, seconds: float) -> float:
        """Return the answers a second of the engine in the next seconds."""
        before = sum(work.open for work in self.works)
        self.wait(seconds)
        return (before - sum(work.open for work in self.works)) / seconds

    def seconds_for(self, work: Work) -> float:
        began = self.world.time
        self.world.run_until(lambda: work.is_done, limit_seconds=1000.0)
        return self.world.time - began


@pytest.mark.parametrize("names", [2, pytest.param(10, marks=pytest.mark.proof)])
def test_names_of_one_engine_find_a_limit_together(names: int) -> None:
    """Each of them gains by a higher limit of its own what the others lose."""
    engine = Names(names)
    engine.wait(80.0 if names > 2 else 40.0)
    assert engine.rate(10.0) >= 0.85 * ENGINE_RATE


@pytest.mark.rule("D9", "Models that share an engine do not hold back a model at another server.")
def test_a_model_at_another_server_is_not_held_back() -> None:
    engine = Names(2, lambda world: Queueing(world, about(1.0), slots=always(200)))
    engine.wait(30.0)
    assert engine.rate(5.0) >= 0.85 * ENGINE_RATE
    assert engine.seconds_for(engine.add_to_other(4000)) < 1.3 * 22.0, "20 s are needed at least"


@pytest.mark.parametrize(
    ("server", "lines"),
    [
        pytest.param(lambda world: Upstream(world, about(3600.0)), 1, id="hangs"),
        pytest.param(
            lambda world: HardLimit(world, about(0.5), slots=always(4)),
            2000,
            marks=pytest.mark.proof,
            id="refuses above 4",
        ),
    ],
)
def test_a_model_that_never_reaches_its_limit_does_not_keep_others_from_sharing_one(
    server: Callable[[World], Upstream], lines: int
) -> None:
    engine = Names(2, server)
    engine.add_to_other(lines)
    engine.wait(50.0)
    assert engine.rate(10.0) >= 0.85 * ENGINE_RATE


@pytest.mark.proof
def test_a_model_with_few_lines_now_and_then_does_not_disturb_a_shared_limit() -> None:
    engine = Names(2)
    engine.wait(40.0)
    rates = list[float]()
    for _ in range(10):
        engine.add_to_other(3)
        rates.append(engine.rate(2.0))
    assert sum(rates) / len(rates) >= 0.85 * ENGINE_RATE


def test_names_of_one_engine_keep_their_limit_beside_a_model_outside_of_it() -> None:
    """The requests of that model count neither as theirs nor as room for them, however long they take."""
    engine = Names(2, lambda world: Queueing(world, about(1.0), slots=always(200)))
    engine.wait(30.0)
    engine.add_to_other(ENDLESS)
    assert engine.rate(10.0) >= 0.85 * ENGINE_RATE


@pytest.mark.proof
@pytest.mark.parametrize("seed", [1, 3])
def test_a_model_at_another_server_does_not_join_a_shared_limit(seed: int) -> None:
    """Names of one engine would otherwise take the slots that it brings."""
    engine = Names(2, lambda world: Queueing(world, about(1.0), slots=always(200)), seed=seed)
    engine.wait(30.0)
    engine.add_to_other(ENDLESS)
    engine.wait(30.0)
    assert engine.rate(10.0) >= 0.85 * ENGINE_RATE


@pytest.mark.proof
def test_a_name_of_the_same_engine_that_comes_later_joins_a_shared_limit() -> None:
    engine = Names(2, None)
    engine.wait(30.0)
    engine.works.append(engine.add_to_other(ENDLESS))
    engine.wait(30.0)
    assert engine.rate(10.0) >= 0.85 * ENGINE_RATE

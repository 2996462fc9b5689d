"""A lease is renewed while its holder works, and its loss ends the work."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.errors import LeaseLost, StoreDown
from batchline.pipeline.lease import renewing
from tests.support.virtual_loop import VirtualLoop


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as virtual:
        yield virtual


class Lease:
    """Counts renewals; each of them raises the next of ``errors``, while there are any."""

    def __init__(self, *errors: Exception) -> None:
        self.renewals, self._errors = 0, list(errors)

    async def renew(self) -> None:
        self.renewals += 1
        if self._errors:
            raise self._errors.pop(0)


async def work_under(lease: Lease, virtual: VirtualLoop, *, seconds: float) -> str:
    async with renewing(lease.renew, every=10, clock=virtual.clock):
        await asyncio.sleep(seconds)
        return "done"


def test_it_is_renewed_until_the_work_ends(virtual: VirtualLoop) -> None:
    lease = Lease()
    assert virtual.run(work_under(lease, virtual, seconds=35)) == "done"
    virtual.advance(100)
    assert lease.renewals == 3


def test_an_unavailable_store_does_not_end_the_work(virtual: VirtualLoop) -> None:
    """It may be available again before the lease expires."""
    lease = Lease(StoreDown("away"), StoreDown("away"))
    assert virtual.run(work_under(lease, virtual, seconds=35)) == "done"
    assert lease.renewals == 3


def test_a_lost_lease_ends_the_work_at_once(virtual: VirtualLoop) -> None:
    """LeaseLost takes the place of the cancellation with which the work is ended."""
    with pytest.raises(LeaseLost):
        virtual.run(work_under(Lease(LeaseLost("taken over")), virtual, seconds=1000))
    assert virtual.now == 10


def test_an_error_of_the_work_is_raised_as_it_is(virtual: VirtualLoop) -> None:
    async def fail() -> None:
        async with renewing(Lease().renew, every=10, clock=virtual.clock):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        virtual.run(fail())


def test_a_cancellation_ends_the_renewals_too(virtual: VirtualLoop) -> None:
    """A client that leaves cancels its upload."""
    lease = Lease()

    async def main() -> None:
        task = asyncio.create_task(work_under(lease, virtual, seconds=1000))
        await asyncio.sleep(25)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual.run(main())
    virtual.advance(100)
    assert lease.renewals == 2

"""A client of the service: it uploads a file, creates a batch, follows it to its end and checks what it gets."""

import asyncio
import json
from typing import TYPE_CHECKING

from batchline.domain.errors import (
    ApiError,
    FileDamaged,
    LeaseLost,
    NotFound,
    ObjectsDown,
    ResultsUnavailable,
    StoreDown,
)
from batchline.domain.records import Batch, Owner
from batchline.domain.result_lines import index_of
from batchline.domain.result_order import START
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.pipeline.create import CreateRequest
from tests.simulation.invariants import check_errors, check_files, check_standing, require
from tests.simulation.plan import ENDPOINT, BatchPlan

if TYPE_CHECKING:
    from tests.simulation.process import Process

ORGANIZATION = "org"
_RETRY_SECONDS = 0.5


class Client:
    """The connection of one client to one process. What the client knows is in its plan, and outlasts the process."""

    def __init__(self, process: "Process", plan: BatchPlan) -> None:
        self._process, self._plan, self._world = process, plan, process.world
        self._services = process.engine.api_role.services

    async def run(self) -> None:
        """Try until the batch is done, as a client with retries does."""
        while not self._plan.done and self._process.dies_at is None:
            try:
                await self._trip()
            except (ApiError, StoreDown, ObjectsDown, LeaseLost):
                await asyncio.sleep(_RETRY_SECONDS)

    async def _trip(self) -> None:
        plan = self._plan
        await asyncio.sleep(max(0.0, plan.starts_at - self._world.time.now))
        if plan.file_id is None:
            plan.file_id = await self._upload()
        if plan.batch_id is None:
            plan.batch_id = await self._create_batch()
        if plan.deletes_input:
            await self._delete(plan.file_id)
        batch = await self._follow(plan.batch_id)
        await self._check(batch)
        if plan.deletes_results:
            for file_id in (batch.output_file_id, batch.error_file_id):
                await self._delete(file_id)
        plan.done = True

    async def _upload(self) -> str:
        data, began = self._plan.input(), self._world.time.now
        middle = len(data) // 2
        async with self._services.upload.begin(self._plan.project_id) as incoming:
            await incoming.write(data[:middle])
            await asyncio.sleep(0.01)
            await incoming.write(data[middle:])
            file = await incoming.finish(filename=None, expires_after=None)
        self._world.files.note_created(file.id, at=began)
        self._plan.tried = False
        return file.id

    async def _create_batch(self) -> str:
        """Create the batch, once or twice: a client that got no reply sends the same request again."""
        plan = self._plan
        assert plan.file_id is not None
        self._world.observer.note_create(plan.file_id, at=self._world.time.now)
        try:
            batch_id = await self._create()
            if plan.creates_twice:
                generation = self._world.generation
                again = await self._create()
                remembered = not self._world.plan.doubts_clock and self._world.generation == generation
                require(again == batch_id or not remembered, f"{again} was created in place of {batch_id}")
        except NotFound:
            self._world.files.check_gone(plan.file_id)
            plan.file_id = None
            raise
        await self._services.creator.mark_answered(batch_id)
        return batch_id

    async def _create(self) -> str:
        plan = self._plan
        owner = Owner(key_id=plan.key_id, project_id=plan.project_id, organization_id=ORGANIZATION)
        retried, plan.tried = plan.tried, True
        answer = await self._services.creator.create(
            owner,
            CreateRequest(input_file_id=plan.file_id or "", endpoint=ENDPOINT, metadata=b"{}", reuse=plan.reuses),
            idempotency_key=plan.idempotency_key,
            retried=retried,
            admit=lambda: None,
        )
        if answer.status != 200:
            require(b"interrupted" in answer.body, f"create refused: {answer.body!r}")
            if self._process.dies_at is None:
                # A retry would get the same answer.
                plan.idempotency_key, plan.tried = None, False
            raise StoreDown("create again")
        body = json.loads(answer.body)
        require(body["status"] in ("in_progress", "cancelled"), f"created as {body['status']}")
        batch_id: str = body["id"]
        return batch_id

    async def _follow(self, batch_id: str) -> Batch:
        """Poll until the batch is terminal. Cancel it and revoke its key at the planned times."""
        plan, born = self._plan, self._world.time.now
        while True:
            generation = self._world.generation
            snapshot = await self._process.store.snapshot(plan.project_id, batch_id)
            if self._process.dies_at is not None:
                raise asyncio.CancelledError
            if snapshot is None or (snapshot.batch.status is BatchStatus.FAILED and self._world.files.went_back):
                # A batch that is being validated again is interrupted, because no process does it.
                self._forget(batch_id)
            elif generation == self._world.generation:
                self._world.observer.check(snapshot.batch)
                check_standing(snapshot)
                if snapshot.batch.status in TERMINAL:
                    return snapshot.batch
                await self._interfere(batch_id, age=self._world.time.now - born)
                await self._read_on(batch_id)
            await asyncio.sleep(self._world.source.choice([0.02, 0.3, 2.0]))

    def _forget(self, batch_id: str) -> None:
        """Create a batch again that the database has lost. Fail if it cannot have lost it."""
        require(self._world.files.went_back, f"{batch_id} was acknowledged and does not exist")
        self._plan.batch_id, self._plan.tried = None, False
        raise NotFound(f"{batch_id} was lost", code="lost", param=None)

    async def _interfere(self, batch_id: str, *, age: float) -> None:
        plan = self._plan
        if plan.cancel_after is not None and age >= plan.cancel_after:
            generation, plan.cancelled = self._world.generation, True
            cancelled = await self._services.cancellation.cancel(plan.project_id, batch_id)
            plan.cancel_after = None
            if generation == self._world.generation:
                self._world.observer.check(cancelled)
        if plan.revoke_after is not None and age >= plan.revoke_after:
            plan.revoked = True
            await self._process.store.revoke_key(plan.key_id, at=int(self._process.clock.now()))
            plan.revoke_after = None

    async def _read_on(self, batch_id: str) -> bool:
        """Read a few more results, require that none comes twice, and return whether there are more."""
        plan, generation = self._plan, self._world.generation
        if plan.read_generation != generation:
            # What the client has read may be lost: it starts again.
            plan.cursor, plan.read, plan.read_generation = START, [], generation
        stream = await self._services.results.open(plan.project_id, batch_id, after=plan.cursor, status=None)
        found = await stream.read()
        taken = found[: len(found) // 2 + 1]
        if generation != self._world.generation or self._process.dies_at is not None:
            return True
        for result in taken:
            index = index_of(result.line)
            require(index not in plan.read, f"line {index} of {batch_id} was read twice")
            plan.read.append(index)
            plan.cursor = result.cursor
        return not stream.ended

    async def _read_rest(self, batch: Batch) -> None:
        """Read all results that are left, and require that every line was read."""
        try:
            before = self._plan.cursor
            while await self._read_on(batch.id):
                if self._plan.cursor == before:
                    # The database went back, perhaps to a time at which the batch still ran.
                    await asyncio.sleep(_RETRY_SECONDS)
                before = self._plan.cursor
        except (ResultsUnavailable, FileDamaged):
            # Its files were removed, or damaged after they were written, which is checked where they are downloaded.
            return
        require(
            len(self._plan.read) == batch.total or self._plan.read_generation != self._world.generation,
            f"{len(self._plan.read)} of {batch.total} lines of {batch.id} were read",
        )

    async def _delete(self, file_id: str | None) -> None:
        """Delete a file as the API does: first the row, then the object."""
        if file_id is None:
            return
        self._world.files.note_deleted(file_id)
        file = await self._process.store.delete_file(self._plan.project_id, file_id, at=int(self._process.clock.due()))
        if file is not None:
            await self._process.objects.delete(file.object_key)

    async def _check(self, batch: Batch) -> None:
        generation = self._world.generation
        files = await self._process.results(batch)
        if files is None or (batch.status is BatchStatus.CANCELLED and batch.total == 0):
            return
        if generation != self._world.generation:
            raise StoreDown("look again")
        check_files(batch, self._plan, *files, world=self._world.plan)
        snapshot = await self._process.store.snapshot(batch.project_id, batch.id)
        if generation == self._world.generation:
            require(snapshot is not None, f"{batch.id} does not exist")
            assert snapshot is not None
            check_errors(snapshot, files[1])
        await self._read_rest(batch)

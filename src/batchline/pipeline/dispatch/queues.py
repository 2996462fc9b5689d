"""Queues the jobs that do not run: those ready for a slot, and those that wait for their next attempt."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter

from batchline.pipeline.job import Job

PROBES_IN_A_ROW = 4
"""The number of probes with one line before another line of its project and model is used. Some upstreams need several
attempts for each line, and some lines are never answered."""
YIELD_CHECK_SECONDS = 1.0
"""The time after which a job that yields looks again whether others could start."""

_model_of = attrgetter("model.id")


class ReadyQueue:
    """Jobs that may start now, by project and model.

    The project with the fewest jobs in flight goes first. Within a project the earliest deadline goes first, and of
    models with the same one that with the fewest jobs in flight. Where they are even, they take turns. So do the jobs
    of a model that are tried first and those that are tried again.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _ProjectQueue] = {}
        self._order = count(1)
        self._served: dict[str, int] = {}
        self._size = 0
        self.by_model: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._size

    @property
    def projects(self) -> KeysView[str]:
        """The projects that have jobs here."""
        return self._queues.keys()

    def count_by_model(self, project_id: str) -> Mapping[str, int]:
        queue = self._queues.get(project_id)
        return {} if queue is None else queue.by_model

    def untried_by_model(self, project_id: str) -> Counter[str]:
        """Return the numbers of a project's jobs that were never tried, by model."""
        queue = self._queues.get(project_id)
        return Counter() if queue is None else queue.count_untried()

    def add(self, job: Job, *, first: bool = False) -> None:
        """Add a job after those of its project, model and deadline, or before them with ``first``."""
        self.add_all([job], first=first)

    def add_all(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Add jobs of one batch and model, which were all tried before or never."""
        project_id = jobs[0].batch.project_id
        queue = self._queues.get(project_id)
        if queue is None:
            queue = self._queues[project_id] = _ProjectQueue(project_id)
        queue.add(jobs, first=first)
        self._size += len(jobs)
        self.by_model[jobs[0].model.id] += len(jobs)

    def take(
        self,
        limit: int,
        *,
        in_flight: Counter[str],
        in_flight_of_lane: Mapping[tuple[str, str], int],
        limit_of: Callable[[str], int],
        allowance_of: Callable[[str], int],
    ) -> list[Job]:
        """Take the next jobs, each from the project with the fewest in flight.

        ``in_flight`` has the number of each project, and ``in_flight_of_lane`` that of each project and model.
        ``limit_of`` returns the number of jobs, of all projects together, after which no further one of a project may
        be taken. ``allowance_of`` returns the number of a model that may be taken.
        """
        allowances, lanes = _Allowances(allowance_of), _Counts(in_flight_of_lane)
        if len(self._queues) == 1:
            project_id = next(iter(self._queues))
            return self._take_of(project_id, min(limit, limit_of(project_id)), allowances, lanes)
        counts, taken = in_flight.copy(), list[Job]()
        limits = {project_id: min(limit, limit_of(project_id)) for project_id in self._queues}
        while able := [project_id for project_id in self._queues if len(taken) < limits[project_id]]:
            project_id = min(able, key=lambda name: (counts[name], self._served.get(name, 0)))
            jobs = self._take_of(project_id, 1, allowances, lanes)
            if not jobs:
                limits[project_id] = 0
            counts[project_id] += len(jobs)
            taken += jobs
        return taken

    def lanes(self) -> list[tuple[str, str]]:
        """Return the projects and models that have jobs here."""
        return [(project_id, model) for project_id, queue in self._queues.items() for model in queue.by_model]

    def take_lane(self, project_id: str, model: str) -> list[Job]:
        """Take one job of a project and a model."""
        return self._take_of(project_id, 1, _Allowances(lambda name: int(name == model)), _Counts({}))

    def take_probe(self, project_id: str, model: str) -> list[Job]:
        """Take the job of a project and a model to probe a paused upstream with."""
        job = self._queues[project_id].next_probe(model)
        return self.withdraw(lambda other: other is job, limit=1)

    def withdraw(self, condition: Callable[[Job], bool], *, limit: int | None = None) -> list[Job]:
        withdrawn: list[Job] = []
        for project_id, queue in list(self._queues.items()):
            withdrawn += queue.withdraw(condition, limit=None if limit is None else limit - len(withdrawn))
            if not queue.size:
                self._forget(project_id)
        self._count_out(withdrawn)
        return withdrawn

    def _take_of(self, project_id: str, limit: int, allowances: "_Allowances", lanes: "_Counts") -> list[Job]:
        queue = self._queues[project_id]
        taken = queue.take(limit, allowances, lanes)
        if taken:
            self._count_out(taken)
            self._served[project_id] = next(self._order)
            if not queue.size:
                self._forget(project_id)
        return taken

    def _count_out(self, jobs: list[Job]) -> None:
        self._size -= len(jobs)
        _subtract(self.by_model, jobs)

    def _forget(self, project_id: str) -> None:
        del self._queues[project_id]
        if not self._queues:
            self._served.clear()


class _Allowances(dict[str, int]):
    """The number of jobs of each model that may still start. ``allowance_of`` is called once for each model."""

    def __init__(self, allowance_of: Callable[[str], int]) -> None:
        self._allowance_of = allowance_of

    def __missing__(self, model: str) -> int:
        allowance = self[model] = max(0, self._allowance_of(model))
        return allowance


class _Counts(dict[tuple[str, str], int]):
    """The number of jobs of each project and model in flight, with those that are being taken."""

    def __init__(self, in_flight: Mapping[tuple[str, str], int]) -> None:
        self._in_flight = in_flight

    def __missing__(self, lane: tuple[str, str]) -> int:
        number = self[lane] = self._in_flight.get(lane, 0)
        return number


class _ModelQueue:
    """The jobs of one model. Those that were never tried and those that are tried again are taken in turn.

    So an upstream that refuses some lines again and again gets others between them.
    """

    __slots__ = ("_again", "_again_is_next", "_untried")

    def __init__(self) -> None:
        self._untried: deque[Job] = deque()
        self._again: deque[Job] = deque()
        self._again_is_next = True

    def __len__(self) -> int:
        return len(self._untried) + len(self._again)

    @property
    def untried(self) -> int:
        """The number of jobs that were never tried."""
        return len(self._untried)

    def __iter__(self) -> Iterator[Job]:
        yield from self._again
        yield from self._untried

    def add(self, jobs: Sequence[Job], *, first: bool) -> None:
        queue = self._untried if jobs[0].last_fault is None else self._again
        if first:
            queue.extendleft(reversed(jobs))
        else:
            queue.extend(jobs)

    def take(self, number: int) -> list[Job]:
        if not self._again:
            take = self._untried.popleft
            return [take() for _ in range(number)]
        return [self._take_one() for _ in range(number)]

    def _take_one(self) -> Job:
        again = bool(self._again) and (self._again_is_next or not self._untried)
        self._again_is_next = not again
        return (self._again if again else self._untried).popleft()

    @property
    def next_probe(self) -> Job:
        """The job to probe with: the one of the last probe if its turn is not over, or else one that was never tried.

        Among those that are tried again, many may be refused for what they contain.
        """
        again_is_next = self._again and (self._again[0].probes % PROBES_IN_A_ROW or not self._untried)
        return (self._again if again_is_next else self._untried)[0]

    def remove(self, jobs: set[Job]) -> None:
        self._untried = deque(job for job in self._untried if job not in jobs)
        self._again = deque(job for job in self._again if job not in jobs)


class _ProjectQueue:
    """The jobs of one project, by the deadlines of their batches, and by model."""

    def __init__(self, project_id: str) -> None:
        self._project_id = project_id
        self.size = 0
        self.by_model: Counter[str] = Counter()
        self._jobs: dict[int, dict[str, _ModelQueue]] = {}
        self._deadlines: list[int] = []

    def count_untried(self) -> Counter[str]:
        untried: Counter[str] = Counter()
        for models in self._jobs.values():
            for model, jobs in models.items():
                untried[model] += jobs.untried
        return untried

    def add(self, jobs: Sequence[Job], *, first: bool) -> None:
        deadline, model = jobs[0].batch.expires_at, jobs[0].model.id
        models = self._jobs.get(deadline)
        if models is None:
            models = self._jobs[deadline] = {}
            heappush(self._deadlines, deadline)
        queue = models.get(model)
        if queue is None:
            queue = models[model] = _ModelQueue()
        queue.add(jobs, first=first)
        self.size += len(jobs)
        self.by_model[model] += len(jobs)

    def take(self, limit: int, allowances: _Allowances, lanes: _Counts) -> list[Job]:
        taken: list[Job] = []
        for deadline in self._deadlines if len(self._deadlines) < 2 else sorted(self._deadlines):
            if len(taken) >= limit:
                break
            taken += self._take_of(self._jobs[deadline], limit - len(taken), allowances, lanes)
        if taken:
            self._count_out(taken)
            self._forget_empty()
        return taken

    def next_probe(self, model: str) -> Job:
        deadline = min(deadline for deadline, models in self._jobs.items() if model in models)
        return self._jobs[deadline][model].next_probe

    def withdraw(self, condition: Callable[[Job], bool], *, limit: int | None) -> list[Job]:
        queues = [jobs for models in self._jobs.values() for jobs in models.values()]
        found = [job for jobs in queues for job in jobs if condition(job)][:limit]
        removed = set(found)
        for jobs in queues:
            jobs.remove(removed)
        self._count_out(found)
        self._jobs = {
            deadline: {model: jobs for model, jobs in models.items() if jobs} for deadline, models in self._jobs.items()
        }
        self._forget_empty()
        return found

    def _take_of(
        self, models: dict[str, _ModelQueue], limit: int, allowances: _Allowances, lanes: _Counts
    ) -> list[Job]:
        """Take jobs with one deadline, each of the model with the fewest in flight."""
        taken: list[Job] = []
        project_id, turns = self._project_id, len(models)
        able = [(lanes[project_id, model], turn, model) for turn, model in enumerate(models) if allowances[model] > 0]
        heapify(able)
        while able and len(taken) < limit:
            _, _, model = heappop(able)
            jobs = models.pop(model)
            number = 1 if able else min(limit - len(taken), allowances[model], len(jobs))
            taken += jobs.take(number)
            allowances[model] -= number
            lanes[project_id, model] += number
            if jobs:
                # The model goes behind the others, so that those with as many in flight have their turn.
                models[model] = jobs
                if allowances[model] > 0:
                    heappush(able, (lanes[project_id, model], turns + len(taken), model))
        return taken

    def _count_out(self, jobs: list[Job]) -> None:
        self.size -= len(jobs)
        _subtract(self.by_model, jobs)

    def _forget_empty(self) -> None:
        if not all(self._jobs.values()):
            self._jobs = {deadline: models for deadline, models in self._jobs.items() if models}
            self._deadlines = list(self._jobs)
            heapify(self._deadlines)


def _subtract(counts: Counter[str], jobs: list[Job]) -> None:
    for model, number in Counter(map(_model_of, jobs)).items():
        if counts[model] == number:
            del counts[model]
        else:
            counts[model] -= number


class RetryQueue:
    """Jobs that wait for their next attempt. They take no slot.

    After its wait, a job that yields goes on waiting for a while as long as other jobs of its model could start.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()
        self.by_project: Counter[str] = Counter()
        self.by_batch: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_due(self) -> float | None:
        """The time at which the next wait is over."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job, *, until: float) -> None:
        heappush(self._heap, (until, next(self._order), job))
        self.by_project[job.batch.project_id] += 1
        self.by_batch[job.batch.id] += 1
        self.by_model[job.model.id] += 1

    def take_due(self, now: float, *, has_ready: Callable[[str], bool]) -> list[Job]:
        """Take the jobs whose wait is over. ``has_ready`` returns whether jobs of a model could start."""
        jobs, yielding = list[Job](), list[Job]()
        while self._heap and self._heap[0][0] <= now:
            job = heappop(self._heap)[2]
            (yielding if job.yields_until > now and has_ready(job.model.id) else jobs).append(job)
        for job in yielding:
            heappush(self._heap, (now + YIELD_CHECK_SECONDS, next(self._order), job))
        self._count_out(jobs)
        return jobs

    def withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        withdrawn = [job for _, _, job in self._heap if condition(job)]
        if withdrawn:
            self._heap = [entry for entry in self._heap if not condition(entry[2])]
            heapify(self._heap)
            self._count_out(withdrawn)
        return withdrawn

    def _count_out(self, jobs: list[Job]) -> None:
        self.by_project -= Counter(job.batch.project_id for job in jobs)
        self.by_batch -= Counter(job.batch.id for job in jobs)
        self.by_model -= Counter(job.model.id for job in jobs)

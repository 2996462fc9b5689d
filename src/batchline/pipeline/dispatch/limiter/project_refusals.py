"""Tells refusals that are about one project from those that are about a limit of the model.

An upstream may refuse all lines of one project, and none of the others': the lines of a project may all be too long for
the tier that the upstream has, or the project has a quota of its own there. A limit of the model refuses lines of all
projects alike. So the refusals are about a project if none of its lines passed lately, while so many of the others'
did that this is hardly chance.
"""

_CHANCE = 1e-6
"""Refusals are about a project if a limit that refuses all projects alike would refuse only its lines so seldom. A
model may be refused a million times."""
_MOST_ENDS = 16
"""The most ends of other projects' requests that count for one refusal, so that those of a long time without a request
of the project do not decide."""
_MAX_PROJECTS = 1000
"""The number of refused projects at which they are forgotten, most of which are gone by then."""


class _Run:
    """The refusals of a project since its last answer."""

    __slots__ = (
        "answers",
        "answers_before",
        "first",
        "is_about_project",
        "last",
        "refusals",
        "refusals_before",
        "size",
    )

    def __init__(self, order: int) -> None:
        self.first = self.last = order
        """The orders of the first start that was refused, and of the last one that counts."""
        self.size = 0
        """The number of refusals with an answer of another project between each two of them."""
        self.answers = self.refusals = 0.0
        """The ends of other projects' requests between these."""
        self.answers_before = self.refusals_before = 0
        """The answers of all projects up to the last of these, and the refusals of the others."""
        self.is_about_project = False


class ProjectRefusals:
    """The answers and refusals of one model, by project."""

    def __init__(self) -> None:
        self._answers = self._refusals = 0
        self._newest_answered = 0
        """The order of the newest start that was answered."""
        self._runs: dict[str, _Run] = {}

    def is_refused(self, project_id: str) -> bool:
        """Return whether a project was refused since its last answer."""
        return project_id in self._runs

    def on_answers(self, project_id: str, count: int, *, newest: int) -> None:
        """Count answers to lines of a project. ``newest`` is the order of the newest of their starts."""
        self._answers += count
        self._newest_answered = max(self._newest_answered, newest)
        run = self._runs.get(project_id)
        if run is not None and newest > run.first:
            del self._runs[project_id]

    def is_about(self, project_id: str) -> bool:
        """Return whether the last refusal of a project was only about the project."""
        run = self._runs.get(project_id)
        return run is not None and run.is_about_project

    def on_refusal(self, project_id: str, *, order: int) -> bool:
        """Count a refusal, and return whether it is only about its project.

        If an upstream refuses everything for some time, it refuses many lines of a project one after another. Together
        they count as one refusal.
        """
        run = self._runs.get(project_id)
        if run is None:
            run = self._begin_run(project_id, order)
        elif self._newest_answered > run.last and self._answers > run.answers_before:
            self._count(run, order)
        self._refusals += 1
        run.refusals_before += 1
        return run.is_about_project

    def _begin_run(self, project_id: str, order: int) -> _Run:
        if len(self._runs) >= _MAX_PROJECTS:
            self._runs.clear()
        run = self._runs[project_id] = _Run(order)
        run.answers_before, run.refusals_before = self._answers, self._refusals
        return run

    def _count(self, run: _Run, order: int) -> None:
        answers, refusals = self._answers - run.answers_before, self._refusals - run.refusals_before
        weight = min(1.0, _MOST_ENDS / (answers + refusals))
        run.answers += weight * answers
        run.refusals += weight * refusals
        run.size += 1
        run.last = max(run.last, order)
        run.answers_before, run.refusals_before = self._answers, self._refusals
        refused_part = (run.refusals + 1) / (run.answers + run.refusals + 1)
        run.is_about_project = refused_part**run.size <= _CHANCE

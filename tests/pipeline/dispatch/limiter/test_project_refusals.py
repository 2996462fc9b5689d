"""Refusals that are about one project, and those that a limit of the model spreads over all projects."""

from random import Random

import pytest

from batchline.pipeline.dispatch.limiter.project_refusals import ProjectRefusals


class Drive:
    """Reports answers and refusals of one model, each of another start."""

    def __init__(self) -> None:
        self.refusals, self._order = ProjectRefusals(), 0

    def answer(self, project_id: str, times: int = 1, *, order: int | None = None) -> None:
        for _ in range(times):
            self._order += 1
            self.refusals.on_answers(project_id, 1, newest=self._order if order is None else order)

    def refuse(self, project_id: str, times: int = 1) -> bool:
        """Return whether the last refusal is about the project."""
        for _ in range(times):
            self._order += 1
            about_project = self.refusals.on_refusal(project_id, order=self._order)
        return about_project


@pytest.mark.rule("D9", "If all lines of a project are refused while those of others pass, that is about the project.")
def test_a_project_that_never_passes_beside_others_is_refused_for_itself() -> None:
    drive = Drive()
    found = []
    for _ in range(8):
        found.append(drive.refuse("a"))
        drive.answer("b", 4)
    assert found == sorted(found)
    assert (found[3], found[-1]) == (False, True)
    assert drive.refusals.is_about("a")
    assert not drive.refuse("b")


def test_a_project_that_is_alone_shows_nothing_about_itself() -> None:
    drive = Drive()
    assert not drive.refuse("a", 1000)


def test_refusals_one_after_another_count_as_one() -> None:
    """A window that is used up refuses everything until it ends. Others may have been quicker to use it."""
    drive = Drive()
    for _ in range(3):
        assert not drive.refuse("a", 50)
        drive.answer("b", 200)
    assert not drive.refuse("a", 50)


def test_answers_to_requests_from_before_the_refusals_show_nothing() -> None:
    """They were accepted while the project may have been accepted too."""
    drive = Drive()
    drive.answer("b", 100)
    for _ in range(50):
        assert not drive.refuse("a")
        drive.answer("b", 10, order=50)


def test_an_answer_of_the_project_shows_that_a_limit_refused_it() -> None:
    drive = Drive()
    for _ in range(10):
        drive.refuse("a")
        drive.answer("b", 4)
    drive.answer("a", order=1)
    assert drive.refusals.is_about("a"), "that line started before the first refusal"
    drive.answer("a")
    assert not drive.refusals.is_refused("a")
    assert not drive.refuse("a")
    assert drive.refusals.is_refused("a")


def test_what_others_did_while_the_project_had_no_lines_decides_nothing() -> None:
    """Both are refused half of the time. In between the others are alone, and nothing is refused."""
    drive = Drive()
    for _ in range(5):
        for _ in range(3):
            assert not drive.refuse("a")
            drive.refuse("b", 15)
            drive.answer("b")
        drive.answer("b", 100_000)


@pytest.mark.rule(
    "D9", "A limit that refuses all projects alike is never taken for one project's, however small it is."
)
@pytest.mark.parametrize("refused", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_limit_of_the_model_is_not_taken_for_one_of_a_project(refused: float, share: float) -> None:
    drive, random = Drive(), Random(1)
    about_project = 0
    for _ in range(50_000):
        project_id = "small" if random.random() < share else "large"
        if random.random() < refused:
            about_project += drive.refuse(project_id)
        else:
            drive.answer(project_id)
    assert about_project == 0


def test_projects_that_are_gone_are_forgotten() -> None:
    drive = Drive()
    for number in range(1500):
        drive.refuse(str(number))
    assert not drive.refusals.is_refused("7")
    assert drive.refusals.is_refused("1499")

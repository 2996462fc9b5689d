"""Distributes the tests over the processes of a run: each gets one module after the other."""

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

_TOGETHER = ("tests/fsck/", "tests/console/test_browser", "tests/console/")
"""Folders whose modules share data that takes long to make. One process runs all of them, and the browser another."""


class _Scheduler(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return next((group for group in _TOGETHER if scope.startswith(group)), scope)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _Scheduler:
    return _Scheduler(config, log)

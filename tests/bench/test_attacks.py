"""The table of attacks names tests that exist."""

from pathlib import Path

import pytest

from bench.attacks.__main__ import ATTACKS

_TESTED = [attack for attack in ATTACKS if isinstance(attack.run, str)]


@pytest.mark.parametrize("attack", _TESTED, ids=lambda attack: attack.name)
def test_each_attack_that_is_held_by_tests_names_files_that_exist(attack: tuple[str, str, str]) -> None:
    paths = [word for word in attack[2].split(" -")[0].split() if word.startswith("tests/")]
    assert paths
    assert all(Path(path).exists() for path in paths)

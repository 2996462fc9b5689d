"""The table of attacks notices a bound that does not hold, and names tests that exist."""

import re
from pathlib import Path

import pytest

from bench.attacks.__main__ import ATTACKS, Attack, arguments_of, run
from bench.attacks.live import Shown

_TESTED = [attack for attack in ATTACKS if isinstance(attack.run, str)]


@pytest.mark.parametrize("attack", _TESTED, ids=lambda attack: attack.name)
def test_each_word_that_chooses_tests_chooses_one(attack: Attack) -> None:
    assert isinstance(attack.run, str)
    arguments = arguments_of(attack.run)
    paths = [Path(word) for word in arguments if word.startswith("tests/")]
    assert paths
    names = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in paths))
    words = arguments[-1].split(" or ") if "-k" in arguments else ["test"]
    assert [word for word in words if not any(word in name for name in names)] == []


def test_an_attack_that_raises_is_a_bound_that_does_not_hold() -> None:
    def attack() -> Shown:
        raise RuntimeError("no | service")

    shown, command = run(Attack("broken", "", attack))
    assert not shown.holds
    assert "|" not in shown.now
    assert "broken" in command


@pytest.mark.parametrize("words", ["no_such_test_anywhere", "skipped_here"])
def test_a_row_whose_tests_do_not_run_does_not_hold(tmp_path: Path, words: str) -> None:
    tests = tmp_path / "test_skipped.py"
    tests.write_text("import pytest\n@pytest.mark.skip\ndef test_skipped_here(): pass\ndef test_other(): pass\n")
    assert not run(Attack("chosen", "", f"{tests} -k {words}"))[0].holds
    assert run(Attack("chosen", "", f"{tests} -k other"))[0].holds

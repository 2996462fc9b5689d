"""The lines of segments and result files are read back, whatever the answers contain."""

import pytest

from batchline.domain import ids
from batchline.domain.errors import Damaged
from batchline.domain.outcomes import LOST, Success, error_line, output_line
from batchline.domain.result_lines import read_result_line
from batchline.domain.usage import Usage

_BATCH = "batch_01J"


def _output(body: bytes) -> bytes:
    return output_line(ids.line_id(_BATCH, 7), b'"name"', Success(200, None, body))


def test_an_output_line_says_what_was_used() -> None:
    read = read_result_line(_output(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'))
    assert (read.batch, read.index, read.custom_id) == ("01J", 7, "name")
    assert read.usage == Usage(input_tokens=3, output_tokens=4)


def test_an_error_line_has_no_usage() -> None:
    read = read_result_line(error_line(ids.line_id(_BATCH, 0), b"null", LOST))
    assert (read.index, read.custom_id, read.usage) == (0, None, None)


def test_an_answer_with_a_lone_surrogate_is_no_damage() -> None:
    r"""D1: such an answer is recorded as it came, with the escape ``\ud83d``."""
    assert read_result_line(_output(rb'{"a":"cut \ud83d","usage":{"prompt_tokens":3}}')).index == 7


@pytest.mark.parametrize("line", [b"", b"{}", b'{"id":"batch_req_01J_x",', _output(b"{}")[:-9]])
def test_anything_else_is_damage(line: bytes) -> None:
    with pytest.raises(Damaged):
        read_result_line(line)

"""Lines of result files, also those that other servers write or that were damaged."""

import pytest

from batchline.cli.run.result_lines import FailureReason, error_of


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"response":null,"error":{"code":"a","message":"b","param":null}}', FailureReason("a", "b")),
        (rb'{"response":null,"error":{"code":"a","message":"cut \ud83d"}}', FailureReason("a", "cut \ufffd")),
        (b'{"response":{"status_code":400,"body":{"error":{"message":"b"}}},"error":null}', FailureReason(None, "b")),
        (b'{"response":{"status_code":500,"body":""},"error":null}', FailureReason()),
        (b'{"response":null,"error":null}', FailureReason()),
    ],
)
def test_a_failed_line_says_why_as_far_as_it_can_be_read(line: bytes, error: FailureReason) -> None:
    """The report comes after the work is done, so no line of the file may end it."""
    assert error_of(line) == error

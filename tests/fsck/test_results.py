"""The comparison of the results of a batch with its input file, line by line."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from batchline.domain.records import BATCH, InspectedFile
from batchline.domain.states import FileState
from batchline.fsck.findings import Checked
from batchline.fsck.reading import ObjectReader
from batchline.fsck.results import ResultFileReader
from tests.support.input_files import BOM

pytestmark = pytest.mark.anyio


class _Stored:
    """One input file, in small chunks."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def stream(self, _key: str, start: int, length: int) -> AsyncIterator[bytes]:
        for at in range(start, min(start + length, len(self._data)), 7):
            yield self._data[at : at + 7]


class _Tally:
    """Results whose second line has another custom_id."""

    @staticmethod
    def differs(index: int, custom_id: str) -> bool:
        return ["a", "x", "c"][index] != custom_id


@pytest.mark.parametrize("beginning", [b"", b"\n", BOM, BOM + b"\n", BOM + b" \r\n\n"])
async def test_blank_lines_and_a_byte_order_mark_do_not_count(beginning: bytes) -> None:
    """C4: a line has the same number here as in the results."""
    data = beginning + b'{"custom_id":"a"}\n\n{"custom_id":"b"}\r\n \n{"custom_id":"c"}'
    stored: Any = _Stored(data)
    tally: Any = _Tally()
    reader = ResultFileReader(ObjectReader(stored, Checked()))
    assert str(await reader.renamed(_file(data), tally)) == "2"


def _file(data: bytes) -> InspectedFile:
    return InspectedFile(
        id="file-1",
        project_id="p",
        filename="in",
        purpose=BATCH,
        bytes=len(data),
        created_at=0,
        expires_at=1,
        is_error=False,
        object_key="uploads/file-1",
        state=FileState.STORED,
    )

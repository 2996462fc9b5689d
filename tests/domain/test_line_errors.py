"""What people read about lines that failed."""

from msgspec.json import schema

from batchline.api.openapi.schemas import LineError
from batchline.domain.line_errors import remedy_for, without_legacy


def test_every_code_has_a_remedy_of_its_own() -> None:
    codes = schema(LineError)["$defs"]["LineError"]["properties"]["code"]["enum"]
    remedies = {remedy_for(code) for code in codes}
    assert len(remedies) == len(codes)
    assert remedy_for("a code of tomorrow") not in remedies


def test_the_legacy_code_is_left_out() -> None:
    assert without_legacy("[legacy:http_400] too [long] ") == "too [long] "
    assert without_legacy("plain") == "plain"

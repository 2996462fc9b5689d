"""What a request must be before anyone is asked: D6; and that it is handed on without loss: C5."""

import json

import pytest

from batchline.domain.chat import check_request, with_fields, with_upstream_name
from batchline.domain.endpoints import CHAT
from batchline.domain.models import Catalog, Model
from batchline.domain.outcomes import Failure

MODEL = Model(id="m", name="org/m-7b")
CATALOG = Catalog([MODEL])
USER = {"role": "user", "content": "hi"}


def check(body: object, *, endpoint: str = CHAT) -> Model | Failure:
    return check_request(json.dumps(body).encode(), endpoint=endpoint, project_id="alpha", catalog=CATALOG)


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool", "developer"])
def test_a_known_role_passes(role: str) -> None:
    assert check({"model": "m", "messages": [{"role": role}], "other": [1]}) == MODEL


@pytest.mark.rule("D6", "Empty messages are refused.")
@pytest.mark.rule("D6", "An unknown role is refused.")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER]}, "model"),
        ({"model": "", "messages": [USER]}, "model"),
        ({"model": None, "messages": [USER]}, "model"),
        ({"model": 7, "messages": [USER]}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": None}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": ["hi"]}, "messages"),
        ({"model": "m", "messages": [{"content": "hi"}]}, "messages"),
        ({"model": "m", "messages": [USER, {"role": "robot"}]}, "messages"),
        ({"model": "m", "messages": [{"role": 7}]}, "messages"),
    ],
)
def test_a_broken_rule_is_an_invalid_request(body: object, param: str) -> None:
    """The upstream is not asked."""
    refused = check(body)
    assert isinstance(refused, Failure)
    assert (refused.code, refused.legacy, refused.status) == ("invalid_request_error", "http_400", 400)
    assert refused.param == param


@pytest.mark.rule("D6", "A model that is not enabled is not_found_error.")
def test_a_model_that_is_not_enabled_is_not_found() -> None:
    refused = check({"model": "other", "messages": [USER]})
    assert isinstance(refused, Failure)
    assert (refused.code, refused.legacy, refused.param) == ("not_found_error", "http_404", "model")
    assert "other" in refused.message


def test_what_was_said_is_not_repeated_in_a_refusal() -> None:
    """Content of any wrong kind is named by its place."""
    refused = check({"model": "m", "messages": ["a secret"]})
    assert isinstance(refused, Failure)
    assert "secret" not in refused.message
    assert "$.messages[0]" in refused.message


def test_other_endpoints_need_a_model_and_no_messages() -> None:
    assert check({"model": "m", "input": "hi"}, endpoint="/v1/embeddings") == MODEL
    assert isinstance(check({"input": "hi"}, endpoint="/v1/embeddings"), Failure)


def test_a_body_that_nests_too_deeply_is_refused_and_breaks_nothing() -> None:
    deep = b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert isinstance(check_request(deep, endpoint=CHAT, project_id="a", catalog=CATALOG), Failure)


def test_only_the_models_name_changes_on_the_way() -> None:
    """C5: big integers, number formats, key order and Unicode stay as they are."""
    body = (
        '{"z":1.10,"model":"m","seed":123456789012345678901234567890,"messages":[{"role":"user","content":"\u2028é"}]}'
    )
    assert with_upstream_name(body.encode(), MODEL) == body.replace('"m"', '"org/m-7b"').encode()
    assert with_upstream_name(b'{"model": "m"}', Model(id="m", name="m")) == b'{"model": "m"}'


def test_a_field_is_set_or_added() -> None:
    assert with_fields(b'{"a": 1, "b": [2.50]}', a={"x": True}, c=None) == b'{"a":{"x":true},"b":[2.50],"c":null}'

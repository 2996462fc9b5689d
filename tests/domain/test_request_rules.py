"""Which fields of a request may reach an upstream: D6."""

import json
from typing import Any

import pytest
from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.request_rules import FORBIDDEN_FIELDS, FieldRules, RequestRules, strictest

_fields = Decoder(dict[str, Raw])
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def refused(rules: FieldRules, **fields: Any) -> str | None:
    """The field that is refused."""
    violation = rules.violation(_fields.decode(json.dumps(_CHAT | fields)))
    return None if violation is None else violation.field


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1}, {"custom_field": 1}, {"chat_template_kwargs": {"Model": 1}}]
)
def test_usual_and_unknown_fields_are_allowed(fields: dict[str, Any]) -> None:
    """D6: an upstream may know more fields than the service does."""
    assert refused(FieldRules(), **fields) is None


@pytest.mark.parametrize(
    "name",
    ["Model", "MODEL", "mOdel", "Messages", "STREAM", "\u017ftream", "Max_Tokens", "N", "Tools", "Stream_Options"],
)
def test_a_known_field_in_other_letters_is_refused(name: str) -> None:
    """D6: a server that ignores case would take it for the field itself."""
    assert refused(FieldRules(), **{name: 1}) == name
    assert refused(FieldRules(forbidden=frozenset(), tool_types=None), **{name: 1}) == name


@pytest.mark.parametrize("name", [*FORBIDDEN_FIELDS, "Background", "MODELS"])
def test_a_forbidden_field_is_refused_unless_it_is_unset(name: str) -> None:
    """D6: null and false set nothing."""
    values: list[Any] = [True, "x", ["x"], {}, 0]
    assert {refused(FieldRules(), **{name: value}) for value in values} == {name}
    assert {refused(FieldRules(), **{name: value}) for value in (None, False)} == {None}
    assert refused(FieldRules(forbidden=frozenset()), **{name: True}) is None


def test_a_usual_field_can_be_forbidden() -> None:
    assert refused(FieldRules(forbidden=frozenset({"temperature"})), temperature=1) == "temperature"


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"Type": "mcp"}, {"type": None}, {"type": "function", "TYPE": "x"}]
)
def test_a_hosted_tool_is_refused(tool: dict[str, Any]) -> None:
    """D6: the upstream would run it on the operator's account."""
    assert refused(FieldRules(), tools=[{"type": "function"}, tool]) == "tools"
    assert refused(FieldRules(tool_types=None), tools=[tool]) is None


@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}, {"type": "custom"}], [{"name": "f"}], "odd"])
def test_tools_of_the_client_are_allowed(tools: Any) -> None:
    assert refused(FieldRules(), tools=tools) is None


def _seen(link: str, *, key: str = "image_url") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", key: {"url": link}}]}]


@pytest.mark.parametrize(
    ("link", "allowed"),
    [
        ("https://images.example.org/a.png", True),
        ("http://IMAGES.example.org:8080/a.png", True),
        ("data:image/png;base64,AAAA", True),
        ("https://example.org/a.png", False),
        ("http://169.254.169.254/latest", False),
        ("file:///etc/passwd", False),
        ("images.example.org/a.png", False),
        ("https://images.example.org@evil.example/", False),
        ("https://evil.example\\@images.example.org/", False),
        ("https://images.example.org\\.evil.example/", False),
        (" https://evil.example/", False),
        ("https://[::1", False),
    ],
)
def test_links_lead_only_to_hosts_that_are_allowed(link: str, allowed: bool) -> None:
    """D6: where the operator sets a list."""
    rules = FieldRules(media_hosts=frozenset({"images.example.org"}))
    assert (refused(rules, messages=_seen(link)) is None) is allowed
    assert (refused(rules, messages=_seen(link, key="Image_URL")) is None) is allowed
    assert (refused(rules, input=[{"content": [{"type": "input_image", "image_url": link}]}]) is None) is allowed
    assert refused(FieldRules(), messages=_seen(link)) is None


def test_texts_are_no_links() -> None:
    rules = FieldRules(media_hosts=frozenset())
    assert refused(rules, messages=[{"role": "user", "content": "see https://evil.example/"}]) is None


def test_a_model_with_several_upstreams_keeps_the_rules_of_all() -> None:
    one = FieldRules(forbidden=frozenset({"a"}), tool_types=None, media_hosts=frozenset({"x", "y"}))
    other = FieldRules(forbidden=frozenset({"b"}), tool_types=frozenset({"function"}), media_hosts=frozenset({"y"}))
    assert strictest([one, other]) == FieldRules(
        forbidden=frozenset({"a", "b"}), tool_types=frozenset({"function"}), media_hosts=frozenset({"y"})
    )
    assert strictest([one]) == one


def test_a_model_without_rules_of_its_own_has_the_default() -> None:
    own = FieldRules(forbidden=frozenset())
    rules = RequestRules(by_model={"m": own})
    assert (rules.of("m"), rules.of("n")) == (own, FieldRules())


def _nested(levels: int) -> str:
    return "[" * levels + "]" * levels


_LINK = '{"type":"image_url","image_url":{"url":"http://elsewhere/x"}}'


@pytest.mark.parametrize("hidden_by", ['"\\ud800"', '"\udcff"', *map(_nested, range(960, 999))])
@pytest.mark.parametrize("rules", [FieldRules(media_hosts=frozenset({"here"})), FieldRules()], ids=["links", "tools"])
def test_what_cannot_be_read_hides_no_link_and_no_tool(rules: FieldRules, hidden_by: str) -> None:
    """D6: a value that the JSON parser skips but does not read, in the same field, is refused with it."""
    name, tool = ("tools", '{"type":"web_search"}') if rules.media_hosts is None else ("messages", _LINK)
    text = f'{{"{name}":[{tool},{hidden_by}]}}'.encode("utf-8", "surrogateescape")
    try:
        fields = _fields.decode(text)
    except (DecodeError, RecursionError):
        return
    violation = rules.violation(fields)
    assert violation is not None
    assert violation.field == name


@pytest.mark.rule("D8", "A request with very many fields or tools is refused before each of them is looked at.")
def test_more_fields_or_tools_than_any_request_has_are_refused() -> None:
    many = {f"field{n}": n for n in range(2000)}
    assert refused(FieldRules(), **many) == "field1022"
    assert refused(FieldRules(), **dict(list(many.items())[:1000])) is None
    tools = [{"type": "function"}] * 1025
    assert refused(FieldRules(), tools=tools) == "tools"
    assert refused(FieldRules(), tools=tools[:1024]) is None


def test_a_stored_prompt_of_the_operators_account_is_refused() -> None:
    """D6: it may have instructions and tools that no tenant sees."""
    assert refused(FieldRules(), prompt={"id": "pmpt_1"}) == "prompt"
    assert refused(FieldRules(), prompt="a text") is None
    assert refused(FieldRules(forbidden=frozenset()), prompt={"id": "pmpt_1"}) is None

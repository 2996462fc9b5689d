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


def _raw_fields(text: str) -> dict[str, Raw]:
    return _fields.decode(text.encode())


@pytest.mark.rule("D6", "A key that is repeated inside of a field hides no tool and no link.")
@pytest.mark.parametrize(
    "tool",
    [
        '{"type":"web_search","type":"function"}',
        '{"type":"function","type":"web_search"}',
        '{"ty\\u0070e":"web_search","type":"function"}',
        '{"Type":"web_search","Type":"function"}',
    ],
)
def test_every_type_of_a_tool_counts(tool: str) -> None:
    """D6: some servers read the first value of a repeated key, others the last."""
    violation = FieldRules().violation(_raw_fields(f'{{"tools":[{tool}]}}'))
    assert violation is not None
    assert violation.field == "tools"


@pytest.mark.parametrize(
    "part",
    [
        '{"image_url":{"url":"http://evil/","url":"https://here/"}}',
        '{"image_url":{"url":"https://here/","\\u0075rl":"http://evil/"}}',
        '{"image_url":"http://evil/","image_url":{"url":"https://here/"}}',
        '{"x":1,"x":1}',
    ],
)
def test_a_repeated_key_hides_no_link(part: str) -> None:
    """D6: some servers read the first value of a repeated key, others the last."""
    fields = _raw_fields(f'{{"messages":[{{"role":"user","content":[{part}]}}]}}')
    violation = FieldRules(media_hosts=frozenset({"here"})).violation(fields)
    assert violation is not None
    assert violation.field == "messages"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "http://evil/"},
        {"type": "video", "video": "http://evil/"},
        {"type": "video", "Video": ["http://evil/1", "http://evil/2"]},
        {"type": "image_url", "image_url": ["http://evil/"]},
    ],
)
def test_a_link_is_found_under_all_names_of_media(part: dict[str, Any]) -> None:
    """D6: where the operator sets a list of hosts."""
    rules = FieldRules(media_hosts=frozenset({"here"}))
    assert refused(rules, messages=[{"role": "user", "content": [part]}]) == "messages"
    assert refused(rules, input=[part]) == "input"
    allowed = json.loads(json.dumps(part).replace("http://evil/", "data:image/png;base64,"))
    assert refused(rules, messages=[{"role": "user", "content": [allowed]}]) is None
    assert refused(rules, image="aGVsbG8=", audio={"voice": "alloy"}) is None
    assert refused(rules, image="http://evil/") == "image"


@pytest.mark.rule("D6", "A file or an item of the operator's account cannot be named.")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "file", "file": {"File_ID": "file-1"}}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"type": None, "id": "msg_1"}]),
        ("input", [{"id": "msg_1"}]),
    ],
)
def test_an_object_of_the_operators_account_is_refused(field: str, value: Any) -> None:
    """D6: all tenants are one there."""
    assert refused(FieldRules(), **{field: value}) == field
    assert refused(FieldRules(forbidden=frozenset()), **{field: value}) is None
    escaped = json.dumps(value).replace("_id", "\\u005fid").replace("item_", "item\\u005f")
    violation = FieldRules().violation(_raw_fields(f'{{"{field}":{escaped}}}'))
    assert violation is not None
    assert violation.field == field


def test_an_object_of_the_account_is_found_behind_a_field_that_only_mentions_one() -> None:
    """D6: an upstream may read both fields, or only the second."""
    part = {"type": "input_file", "file_id": "file-1"}
    messages = [{"role": "user", "content": "file_id"}]
    assert refused(FieldRules(), messages=messages, input=[{"role": "user", "content": [part]}]) == "input"
    assert refused(FieldRules(), messages=messages, input=[{"Type": "item_reference", "ID": "x"}]) == "input"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": 'what is a "file_id"?'}]),
        (
            "messages",
            [{"role": "user", "content": [{"type": "file", "file": {"file_id": None, "file_data": "data:"}}]}],
        ),
        ("input", 'an item_reference has an "id"'),
        ("input", [{"type": "message", "id": "msg_1", "role": "assistant", "content": []}]),
        ("input", [{"id": "msg_1", "role": "user", "content": "x"}]),
        ("input", [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}]),
    ],
)
def test_items_that_are_sent_whole_are_allowed(field: str, value: Any) -> None:
    assert refused(FieldRules(), **{field: value}) is None


def test_a_template_of_a_tenant_is_refused_wherever_it_is() -> None:
    """D6: the inference engine would run it."""
    assert refused(FieldRules(), chat_template_kwargs={"chat_template": "{{ x }}"}) == "chat_template_kwargs"
    assert refused(FieldRules(), chat_template_kwargs={"Chat_Template": "{{ x }}"}) == "chat_template_kwargs"
    assert refused(FieldRules(), chat_template_kwargs={"enable_thinking": False, "chat_template": None}) is None
    assert refused(FieldRules(forbidden=frozenset()), chat_template_kwargs={"chat_template": "x"}) is None


def test_more_objects_than_any_message_has_are_refused() -> None:
    """D8: each of them takes time, for which everybody waits."""
    rules = FieldRules(media_hosts=frozenset())
    assert refused(rules, input=[{}] * 16_385) == "input"
    assert refused(rules, input=[{}] * 16_384) is None
    assert refused(FieldRules(), input=["file_id", *[[]] * 65_536]) == "input"
    assert refused(FieldRules(), input=["file_id", *[0] * 131_072]) == "input"
    assert refused(FieldRules(), input=["file_id", *[0] * 131_000]) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "guided_json": {}, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1},
        {"stop_token_ids": [1], "ignore_eos": True, "cache_salt": "x", "safety_identifier": "x", "verbosity": "low"},
    ],
)
def test_fields_that_ordinary_clients_send_are_allowed(fields: dict[str, Any]) -> None:
    """D6"""
    assert refused(FieldRules(), **fields) is None


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

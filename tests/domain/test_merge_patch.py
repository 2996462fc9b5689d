"""RFC 7396, and that a patch changes nothing that it does not name."""

import json

import pytest

from batchline.domain.merge_patch import MergePatch


@pytest.mark.rule("G3", "A patch is merged by RFC 7396.")
@pytest.mark.parametrize(
    ("document", "patch", "merged"),
    [
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
        ("[1,2]", '{"a":"b","c":null}', '{"a":"b"}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
        ('{"a":"text"}', '{"a":{"b":{"c":1}}}', '{"a":{"b":{"c":1}}}'),
    ],
)
def test_the_examples_of_the_standard(document: str, patch: str, merged: str) -> None:
    assert MergePatch.parse(patch.encode()).apply(document.encode()) == merged.encode()


def test_what_is_not_named_keeps_its_bytes() -> None:
    """G3, C5: big integers, number formats, key order and escapes are handed on."""
    document = rb'{"z":1e2,"n":123456789012345678901234567890,"t":"\u00e9\u2028","o":{"y":1.50,"x":-0.0}}'
    patched = MergePatch.parse(b'{"o":{"k":1E+2}}').apply(document)
    assert patched == document.replace(b'"x":-0.0', b'"x":-0.0,"k":1E+2')


def test_the_last_of_a_repeated_key_counts() -> None:
    assert MergePatch.parse(b'{"a":1,"a":2}').apply(b'{"b":1,"b":3}') == b'{"b":3,"a":2}'


@pytest.mark.parametrize("patch", ["[]", "1", "null", '"x"', "{", '{"a":NaN}', '{"a":' * 150 + "1" + "}" * 150])
def test_what_is_no_patch_is_refused(patch: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|deep"):
        MergePatch.parse(patch.encode())


def test_a_deep_document_is_only_read_as_deep_as_the_patch() -> None:
    deep = ('{"a":' * 900 + "1" + "}" * 900).encode()
    assert json.loads(MergePatch.parse(b'{"b":1}').apply(deep))["b"] == 1

"""Cutting a work file into shards: one model a shard, like prompts side by side, every line in exactly one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchline.domain.endpoints import CHAT
from batchline.domain.limits import InputLimits, ShardLimits
from batchline.domain.lines import Line, decode_lines, encode_line
from batchline.domain.models import MAX_MODEL_CHARACTERS
from batchline.domain.records import SHARED_LANE, NewShard
from batchline.pipeline.shard import (
    FIRST_LINE_LEAD,
    MAX_BUFFERED_BYTES,
    PREFIX_BYTES,
    Prefix,
    ShardWriter,
    grouping_key,
    prompt_prefix,
)
from batchline.pipeline.validate import validate_file


class Cut:
    """A work file that was cut."""

    def __init__(self, work: Path, shards: list[NewShard]) -> None:
        self.data = work.read_bytes()
        self.shards = shards

    def lines_of(self, shard: NewShard) -> list[Line]:
        return list(decode_lines(self.data[shard.offset : shard.offset + shard.length]))

    def indexes(self, model: str) -> list[int]:
        return [line.index for shard in self.shards if shard.model == model for line in self.lines_of(shard)]


def cut(work: Path, lines: list[tuple[str, int]], limits: ShardLimits, *, models: frozenset[str] = frozenset()) -> Cut:
    """Lines of a model and a body's size each; the custom_id says the model, to be checked."""
    with work.open("w+b") as out:
        shard_writer = ShardWriter(out, limits, models=models)
        for index, (model, size) in enumerate(lines):
            shard_writer.add(model, (), encode_line(index, model.encode(), b"x" * size))
        return Cut(work, shard_writer.finish())


def named(lines: list[Line]) -> set[str]:
    return {line.custom_id.decode() for line in lines}


SMALL = ShardLimits(max_lines=6, max_bytes=400, min_lines=2, pieces=4)
MANY_MODELS = st.integers(0, 2 * SMALL.max_other_models).map(str)
FEW_MODELS = st.sampled_from(["a", "b", ""])
LINES = st.one_of(
    st.lists(st.tuples(FEW_MODELS, st.integers(0, 500)), max_size=120),
    st.lists(st.tuples(MANY_MODELS, st.integers(0, 60)), max_size=300),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_every_line_is_in_one_shard_of_its_model(tmp_path: Path, lines: list[tuple[str, int]]) -> None:
    """C12: shards tile the file without gap or overlap, keep to their limits, and hold each line once, in order."""
    result = cut(tmp_path / "work", lines, SMALL)
    names = list(dict.fromkeys(model for model, _ in lines if model != SHARED_LANE))
    own = set(names[: SMALL.max_other_models])
    ends = [0, *(shard.offset + shard.length for shard in result.shards)]
    assert [shard.offset for shard in result.shards] == ends[:-1]
    assert ends[-1] == len(result.data)
    for shard in result.shards:
        held = result.lines_of(shard)
        assert {model if model in own else SHARED_LANE for model in named(held)} == {shard.model}
        assert len(held) == shard.lines <= SMALL.lines_for(len(lines))
        assert shard.length <= SMALL.max_bytes or shard.lines == 1
    for model in {shard.model for shard in result.shards}:
        expected = [index for index, (name, _) in enumerate(lines) if (name if name in own else SHARED_LANE) == model]
        assert result.indexes(model) == expected


@pytest.mark.parametrize(("total", "longest"), [(5, 5), (100, 8), (1000, 15), (20_000, 256)])
def test_small_batches_are_cut_finer(tmp_path: Path, total: int, longest: int) -> None:
    """At most 256 lines and max(8, total/64): small batches spread over workers too, in even pieces."""
    shards = cut(tmp_path / "work", [("m", 10)] * total, ShardLimits()).shards
    sizes = [shard.lines for shard in shards]
    assert sum(sizes) == total
    assert max(sizes) == longest
    assert min(sizes[:-1], default=longest) >= longest // 2


def test_a_shard_keeps_to_its_bytes(tmp_path: Path) -> None:
    """At most 4 MiB by default; a line over the limit stands alone."""
    limits = ShardLimits(max_bytes=1000)
    shards = cut(tmp_path / "work", [("m", 300)] * 7 + [("m", 5000)] + [("m", 300)], limits).shards
    assert [shard.lines for shard in shards] == [3, 3, 1, 1, 1]
    assert ShardLimits().max_bytes == 4 * 1024 * 1024


@pytest.fixture
def shard_writer(tmp_path: Path) -> Iterator[tuple[ShardWriter, Path]]:
    """A cutter whose writes can be seen at once."""
    work = tmp_path / "work"
    with work.open("w+b", buffering=0) as out:
        yield ShardWriter(out, ShardLimits()), work


@pytest.mark.parametrize("models", [12_000, 50_000])
def test_a_file_of_many_models_has_few_shards(tmp_path: Path, models: int) -> None:
    """A stranger chooses the names: they must not decide how many rows a batch has."""
    limits = ShardLimits()
    one_each = cut(tmp_path / "each", [(str(n), 10) for n in range(models)], limits).shards
    one_model = cut(tmp_path / "one", [("m", 10)] * models, limits).shards
    assert len({shard.model for shard in one_each}) == limits.max_other_models + 1
    assert len(one_each) <= len(one_model) + limits.max_other_models + 1


def test_models_in_turn_have_few_shards(tmp_path: Path) -> None:
    """However the lines of as many models as may have their own shards are mixed, few blocks are made of them."""
    limits = ShardLimits()
    groups = limits.max_other_models + 1
    shards = cut(tmp_path / "work", [(str(n % groups), 10) for n in range(100 * groups)], limits).shards
    assert len(shards) == groups


def test_a_configured_model_always_has_its_own_shards(tmp_path: Path) -> None:
    """D6: its lines may go to other upstreams than the rest, however many other names come before it."""
    lines = [(str(n), 10) for n in range(200)] + [("configured", 10)]
    result = cut(tmp_path / "work", lines, ShardLimits(), models=frozenset({"configured"}))
    assert result.indexes("configured") == [200]
    assert named(result.lines_of(result.shards[-1])) == {"configured"}


def test_only_so_many_bytes_are_held(shard_writer: tuple[ShardWriter, Path]) -> None:
    """C6: what is not yet written stays under 16 MiB, however many models share the file."""
    writer, work = shard_writer
    record = encode_line(0, b"", b"x" * 500_000)
    for added in range(1, 61):
        writer.add(str(added % 20), (), record)
        assert added * len(record) - work.stat().st_size <= MAX_BUFFERED_BYTES
    assert work.stat().st_size < 60 * len(record)


def test_the_file_is_synced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: when the shards are known, the file they point into is on the disk."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    result = cut(tmp_path / "work", [("a", 10), ("b", 10)], ShardLimits())
    assert synced == [len(result.data)]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model":"m"}', "m"),
        (b'{"model":"\\u006d/\xc3\xa9"}', "m/é"),
        (b'{"a":1}', ""),
        (b'{"model":1}', ""),
        (b'{"model":null}', ""),
        (b'{"model":1e400}', ""),
        (b'{"model":' + b"9" * 10_000 + b"}", ""),
        (b'{"model":' + b"[" * 100 + b"]" * 100 + b"}", ""),
        (b'{"model":{"model":"m"}}', ""),
        (b'{"model":"' + b"m" * MAX_MODEL_CHARACTERS + b'"}', "m" * MAX_MODEL_CHARACTERS),
        (b'{"model":"' + b"m" * (MAX_MODEL_CHARACTERS + 1) + b'"}', ""),
    ],
)
def test_lines_are_grouped_by_model(body: bytes, key: str) -> None:
    """The model when it is a string; a name longer than any model's is not kept a second time (C6)."""
    assert grouping_key(msgspec.json.decode(body, type=dict[str, msgspec.Raw])) == key


def indexes_by_prefix(work: Path, prefixes: list[Prefix], limits: ShardLimits, *, size: int = 10) -> list[list[int]]:
    """The lines of each shard, of one model."""
    with work.open("w+b") as out:
        shard_writer = ShardWriter(out, limits)
        for index, prefix in enumerate(prefixes):
            shard_writer.add("m", prefix, encode_line(index, b"", b"x" * size))
        result = Cut(work, shard_writer.finish())
    return [[line.index for line in result.lines_of(shard)] for shard in result.shards]


def test_like_prompts_stand_side_by_side(tmp_path: Path) -> None:
    """Prefixes in the order of their first lines; within one, longer ones that are shared; else as the file has it."""
    prefixes = [(9, 5), (1, 2), (9, 6), (1, 3), (9, 7), (1, 4), (4,), (1, 8)]
    (order,) = indexes_by_prefix(tmp_path / "work", prefixes, ShardLimits())
    assert order == [0, 2, 4, 1, 3, 5, 7, 6]


def test_the_first_line_of_a_long_prefix_stands_ahead_of_the_others(tmp_path: Path) -> None:
    """An engine that reuses only what is computed already would compute the prefix of each line of a group at once."""
    groups, size = 6, FIRST_LINE_LEAD // 2
    prefixes: list[Prefix] = [(0, group) for _ in range(size) for group in range(groups)]
    shards = indexes_by_prefix(tmp_path / "work", prefixes, ShardLimits())
    order = [index for shard in shards for index in shard]
    assert sorted(order) == list(range(groups * size))
    places = [[place for place, index in enumerate(order) if index % groups == group] for group in range(groups)]
    assert [order[group_places[0]] for group_places in places] == list(range(groups)), "the first one of the file leads"
    for first, second, *rest in places[2:]:
        assert FIRST_LINE_LEAD - groups <= second - first <= FIRST_LINE_LEAD + groups
        assert rest[-1] - second <= size + groups, "the others stand together"


def test_the_first_line_of_a_short_prefix_stays_with_the_others(tmp_path: Path) -> None:
    """128 bytes that prompts have in common are not worth a second place in a small cache."""
    shards = indexes_by_prefix(tmp_path / "work", [(n % 3,) for n in range(9)], ShardLimits())
    assert [index for shard in shards for index in shard] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.mark.parametrize("prefixes", [1, 8, 1000])
def test_prefixes_make_no_more_shards(tmp_path: Path, prefixes: int) -> None:
    """They only change the order: lines that share no prefix are divided, and stand, as without prefixes."""
    shards = indexes_by_prefix(tmp_path / "work", [(n % prefixes,) for n in range(1000)], ShardLimits())
    assert [len(shard) for shard in shards] == [
        len(shard) for shard in indexes_by_prefix(tmp_path / "plain", [()] * 1000, ShardLimits())
    ]
    order = [index for shard in shards for index in shard]
    assert order == sorted(range(1000), key=lambda n: (n % prefixes, n))


def test_prompts_are_compared_beyond_a_shard(tmp_path: Path) -> None:
    """A shard's worth of lines that all begin otherwise is followed by more of each."""
    limits = ShardLimits(max_lines=8)
    shards = indexes_by_prefix(tmp_path / "work", [(n % 8,) for n in range(64)], limits)
    assert [{index % 8 for index in shard} for shard in shards] == [{n} for n in range(8)]


def prefix_of(messages: bytes) -> Prefix:
    return prompt_prefix(msgspec.json.decode(b'{"messages":' + messages + b"}", type=dict[str, msgspec.Raw]))


@pytest.mark.parametrize("shared", PREFIX_BYTES)
def test_a_prefix_is_what_prompts_have_in_common(shared: int) -> None:
    """Prompts that agree for so many bytes share that step, and the next one only if they agree on."""
    one, other = (b'["' + b"x" * (shared - 2) + end * 10_000 + b'"]' for end in (b"a", b"b"))
    step = PREFIX_BYTES.index(shared) + 1
    assert len(prefix_of(one)) == len(PREFIX_BYTES)
    assert prefix_of(one)[:step] == prefix_of(other)[:step]
    assert not set(prefix_of(one)[step:]) & set(prefix_of(other)[step:])
    assert prefix_of(one)[:step] != prefix_of(one.replace(b"xa", b"aa"))[:step]


@pytest.mark.parametrize(("step", "size"), list(enumerate(PREFIX_BYTES, start=1)))
def test_a_step_is_reached_by_its_last_byte(step: int, size: int) -> None:
    """A prompt of just that many bytes has the step, one that is a byte shorter has not."""
    text = b'["' + b"x" * (size - 4) + b'"]'
    assert len(prefix_of(text)) == step
    assert len(prefix_of(text.replace(b"xx", b"x", 1))) == max(step - 1, 1)


def test_short_prompts_are_alike_only_when_they_are_the_same() -> None:
    """A prompt that ends before the first step is its own prefix. A body may have no prompt at all."""
    assert prefix_of(b'["a"]') == prefix_of(b'["a"]') != prefix_of(b'["b"]')
    assert len(prefix_of(b'["a"]')) == 1
    assert len(prompt_prefix({})) == 1
    assert prompt_prefix({}) != prefix_of(b'["a"]')


def _ordered(bodies: list[dict[str, Any]], tmp_path: Path) -> list[int]:
    """Return the order of lines in the work file."""
    source, work = tmp_path / "in.jsonl", tmp_path / "work"
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = validate_file(source=source, work=work, endpoint=CHAT, limits=InputLimits())
    assert not verdict.faults
    return [line.index for line in decode_lines(work.read_bytes())]


def test_lines_with_the_longest_output_come_first_among_equal_prefixes(tmp_path: Path) -> None:
    def body(prompt: str, **limits: Any) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": prompt}], **limits}

    a, b = "a" * 200, "b" * 200
    bodies = [
        body(a + "0", max_tokens=10),
        body(b + "1", max_tokens=10),
        body(a + "2"),
        body(b + "3", max_completion_tokens=500),
        body(a + "4", max_tokens=70),
        body(b + "5", max_tokens="many"),
        body(b + "6", max_tokens=10**30),
    ]
    assert _ordered(bodies, tmp_path) == [6, 3, 1, 5, 4, 0, 2]
    assert _ordered([body(f"{n}", max_tokens=5) for n in range(20)], tmp_path) == list(range(20))

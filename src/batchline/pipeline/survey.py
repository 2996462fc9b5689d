"""Surveys a validated input: counts its lines by model and its equal lines, and estimates its tokens."""

from hashlib import blake2b
from pathlib import Path

from batchline.domain.chat import named_model
from batchline.domain.checksum import checksum_of
from batchline.domain.errors import Damaged
from batchline.domain.estimates import output_limit, request_tokens
from batchline.domain.lines import decode_lines
from batchline.domain.records import NewShard
from batchline.domain.reuse import LineDigests
from batchline.ports import ModelSurvey, Survey

_SAMPLE_LINES = 32
"""The most lines of a model whose tokens may be counted. With this number, the mean of prompts that differ by half is
known within a tenth."""
_MAX_SAMPLE_BYTES = 1024 * 1024
_SAMPLED_MODELS = 8
"""The number of models that have a sample. It bounds the memory for a file that names a million models."""


def survey_file(work: Path, shards: list[NewShard]) -> Survey:
    """Read a work file shard by shard. Memory is bounded by one shard, the samples and 16 bytes for each line."""
    models: dict[str, _Sums] = {}
    seen: set[bytes] = set()
    lines = 0
    with work.open("rb") as file:
        for shard in shards:
            file.seek(shard.offset)
            for line in decode_lines(file.read(shard.length)):
                lines += 1
                seen.add(blake2b(line.body, digest_size=16).digest())
                name = named_model(line.body) or ""
                if name not in models:
                    models[name] = _Sums(BodySample() if len(models) < _SAMPLED_MODELS else None)
                models[name].add(line.body)
    return Survey(models=[models[name].survey(name) for name in sorted(models)], duplicates=lines - len(seen))


def digests_in_file(
    work: Path, shards: list[NewShard], *, project_id: str, endpoint: str, sent_as: bytes | None
) -> bytes:
    """Return the digests of all lines of a work file, in the order of the input. Raise Damaged."""
    digests, found = LineDigests(project_id, endpoint, sent_as), dict[int, bytes]()
    with work.open("rb") as file:
        for shard in shards:
            file.seek(shard.offset)
            data = file.read(shard.length)
            if shard.checksum not in (None, checksum_of(data)):
                raise Damaged(f"{work} at {shard.offset}")
            for line in decode_lines(data):
                found[line.index] = digests.of(shard.model, line.body)
    return b"".join([found[index] for index in sorted(found)])


class _Sums:
    """The sums so far for one model."""

    def __init__(self, sample: "BodySample | None") -> None:
        self._lines = self._input_tokens = self._output_tokens = 0
        self._is_limited, self._sample = True, sample

    def add(self, body: bytes) -> None:
        self._lines += 1
        if self._sample is not None:
            self._sample.offer(body)
        self._input_tokens += request_tokens(body)
        limit = output_limit(body)
        if limit is None:
            self._is_limited = False
        else:
            self._output_tokens += limit

    def survey(self, model: str) -> ModelSurvey:
        return ModelSurvey(
            model=model,
            lines=self._lines,
            input_tokens=self._input_tokens,
            output_tokens_at_most=self._output_tokens if self._is_limited else None,
            sample=[] if self._sample is None else self._sample.bodies,
        )


class BodySample:
    """Keeps every n-th body that is offered. When it has too many, n doubles, and half of them are removed."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._offered = self._bytes = 0
        self._step = 1

    def offer(self, body: bytes) -> None:
        """Keep a body if its turn has come."""
        if self._offered % self._step == 0 and len(body) <= _MAX_SAMPLE_BYTES // 4:
            self.bodies.append(body)
            self._bytes += len(body)
            if len(self.bodies) > _SAMPLE_LINES or self._bytes > _MAX_SAMPLE_BYTES:
                self.bodies = self.bodies[::2]
                self._bytes = sum(map(len, self.bodies))
                self._step *= 2
        self._offered += 1

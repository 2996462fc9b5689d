"""Surveys a validated input: its lines by model, their tokens as far as they can be foretold, and equal lines."""

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


def survey_file(work: Path, shards: list[NewShard]) -> Survey:
    """Read a work file shard by shard. Memory is bounded by one shard and 16 bytes for each line."""
    models: dict[str, _Sums] = {}
    seen: set[bytes] = set()
    lines = 0
    with work.open("rb") as file:
        for shard in shards:
            file.seek(shard.offset)
            for line in decode_lines(file.read(shard.length)):
                lines += 1
                seen.add(blake2b(line.body, digest_size=16).digest())
                models.setdefault(named_model(line.body) or "", _Sums()).add(line.body)
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
    """What was found so far of one model."""

    def __init__(self) -> None:
        self._lines = self._input_tokens = self._output_tokens = 0
        self._is_limited = True

    def add(self, body: bytes) -> None:
        self._lines += 1
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
        )

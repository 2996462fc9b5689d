"""Measures how far the estimates of a check (G5) are off: by size, and from a sample that a tokenizer counts.

    python -m bench.estimates --ranks cl100k=FILE --ranks qwen=FILE --tekken mistral=FILE --texts chinese=FILE

It needs tiktoken. ``--ranks`` names a file of byte-pair ranks as tiktoken has them, ``--tekken`` one of Mistral, and
``--texts`` a text whose paragraphs become prompts. English and Python come from this repository.
"""

import argparse
import base64
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random

from batchline.domain.estimates import request_tokens
from batchline.pipeline.survey import BodySample

_ROOT = Path(__file__).parents[1]
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""How most byte-pair tokenizers cut a text first."""
_TOKENS_PER_MESSAGE = 4
_PROMPTS = 2_000
_SHORT, _LONG = 200, 4_000
"""Characters of a prompt."""

Count = Callable[[str], int]


def _ranks(path: Path) -> Count:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return _counter({base64.b64decode(token): int(rank) for token, rank in lines})


def _tekken(path: Path) -> Count:
    document = json.loads(path.read_text())
    size = document["config"]["default_vocab_size"] - document["config"]["default_num_special_tokens"]
    vocabulary = document["vocab"][:size]
    return _counter({base64.b64decode(token["token_bytes"]): token["rank"] for token in vocabulary})


def _counter(ranks: dict[bytes, int]) -> Count:
    # It is no dependency of this project: only this measurement needs it.
    encoding = import_module("tiktoken").Encoding(
        "measured", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    return lambda text: len(encoding.encode_ordinary(text)) + _TOKENS_PER_MESSAGE


def _texts(more: dict[str, Path]) -> Iterator[tuple[str, str]]:
    yield "English", "\n".join(path.read_text() for path in sorted((_ROOT / "docs").rglob("*.md")))
    yield "Python", "\n".join(path.read_text() for path in sorted((_ROOT / "src").rglob("*.py")))
    yield "rows of JSON", "\n".join(json.dumps(_row(n)) for n in range(20_000))
    for name, path in more.items():
        yield name, path.read_text()


def _row(n: int) -> dict[str, object]:
    return {"id": n, "sku": f"A-{n * 7919:08}", "price": n / 7, "tags": ["new", "blue"], "in_stock": n % 3 == 0}


def _prompts(text: str) -> list[str]:
    random = Random(1)
    lengths = [random.randint(_SHORT, _LONG) for _ in range(_PROMPTS)]
    return [text[start : start + length] for length in lengths for start in [random.randrange(len(text) - length)]]


def _body(prompt: str) -> bytes:
    """Return a request as most clients write it, with characters that are not ASCII as they are."""
    chat = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":")).encode()


def _pairs(values: list[str]) -> dict[str, Path]:
    return {name: Path(path) for name, _, path in (value.partition("=") for value in values)}


def main() -> None:
    """Print how far each estimate is off, in percent of the true number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--ranks", "--tekken", "--texts"):
        parser.add_argument(option, action="append", default=[], metavar="NAME=FILE")
    given = parser.parse_args()
    tokenizers = {name: _ranks(path) for name, path in _pairs(given.ranks).items()}
    tokenizers |= {name: _tekken(path) for name, path in _pairs(given.tekken).items()}
    print("| Input | Tokenizer | Bytes per token | By size | From a sample |\n|---|---|--:|--:|--:|")
    for kind, text in _texts(_pairs(given.texts)):
        prompts = _prompts(text)
        bodies = {_body(prompt): prompt for prompt in prompts}
        sample = BodySample()
        for body in bodies:
            sample.offer(body)
        by_size = sum(map(request_tokens, bodies))
        for name, count in tokenizers.items():
            true = sum(map(count, bodies.values()))
            counted = sum(count(bodies[body]) for body in sample.bodies)
            corrected = by_size * counted / sum(map(request_tokens, sample.bodies))
            density = sum(map(len, bodies)) / true
            print(f"| {kind} | {name} | {density:.2f} | {by_size / true - 1:+.0%} | {corrected / true - 1:+.1%} |")


if __name__ == "__main__":
    main()

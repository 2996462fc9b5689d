"""Reads the error in an upstream's answer: its text, the status it names, and whether it is about quota or the context.

A 429 can mean that a rate limit was reached, or that no money is left. Servers tell the two apart by code and type, but
gateways rewrite those, so the text is searched too::

    only about money ("insufficient balance")                             quota
    about money or a rate ("exceeded your current quota"), no rate named  quota
    about money or a rate, and a rate is named ("retry in 20s")           rate limit
    anything else                                                         rate limit
"""

import re
from typing import Any

import msgspec

_CONTEXT_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|model's) context length|maximum model length", re.IGNORECASE
)
_MONEY_WORDS = (b"quota", b"balance", b"credit", b"fund", b"billing", b"account", b"spend", b"budget", b"plan")
"""Every match of the two patterns below contains one. The texts of most rate limits contain none."""
_MONEY = re.compile(
    rb"insufficient[ _](user[ _])?(quota|balance|credits?|funds)"
    rb"|(balance|credits|funds) (is|are) (insufficient|too low|exhausted|depleted)"
    rb"|\b(out of|no|used all available) (credits|funds)\b|credit limit exceeded|exceeded your monthly included credits"
    rb"|billing[ _](hard[ _]limit|not[ _]active)|account is (not active|suspended)"
    rb"|spend(ing)? limit (has been |was )?(reached|exceeded)"
    rb"|budget[ _](has been )?exceeded|exceeded\w{0,10}budget|over budget"
)
_MONEY_OR_RATE = re.compile(
    rb"exceeded your current (token )?quota|exceeded[ _]current[ _]quota|check your (plan|billing)"
    rb"|(?<!allocated )quota (has been )?exceeded(?! for)"
)
"""OpenAI says these about money, and Gemini, with the same sentence, about requests per minute."""
_RATE = re.compile(
    rb"\brate[ -]limit|too many (requests|tokens)|per[ _]?(\d+ )?(second|min|hour|day)|\bdaily\b|\b[rt]p[md]\b"
    rb"|quota[ _]?metric|for metric|(retry|try again) (in|later)|retry[ _-]?(after|delay)"
    rb"|resource[ _](has been )?exhausted"
)
_MAX_SEARCHED_BYTES = 8192
_MAX_TEXT_CHARACTERS = 500
_anything = msgspec.json.Decoder()


def read_error(body: bytes) -> dict[str, Any]:
    """Return the error object of an answer, in the shapes that OpenAI-style servers use; empty if it has none."""
    try:
        document = _anything.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(document, list) and len(document) == 1:
        # Gemini sends the error object in a list.
        [document] = document
    if not isinstance(document, dict):
        return {}
    error = document.get("error", document)
    return error if isinstance(error, dict) else {"message": error}


def text_of(body: bytes, error: dict[str, Any]) -> str:
    """Return the text of an error as one line, cut at 500 characters; the body itself if the error has no text."""
    message = error.get("message") or error.get("detail")
    if not isinstance(message, str):
        message = body[: 4 * _MAX_TEXT_CHARACTERS].decode("utf-8", "replace")
    return " ".join(message.split())[:_MAX_TEXT_CHARACTERS]


def status_in(error: dict[str, Any]) -> int | None:
    """Return the HTTP status, 400 to 599, that an error names as a number or as text; None if it names none."""
    for value in (error.get("code"), error.get("status"), error.get("status_code")):
        text = str(value) if isinstance(value, int | str) else ""
        if len(text) == 3 and text.isascii() and text.isdecimal() and 400 <= int(text) < 600:
            return int(text)
    return None


def says_context_overflow(text: str, error: dict[str, Any]) -> bool:
    return _CONTEXT_OVERFLOW.search(f"{error.get('code')} {error.get('type')} {text}") is not None


def says_quota(body: bytes, error: dict[str, Any]) -> bool:
    """Return whether a 429 is about money and not about a rate."""
    if "insufficient_quota" in (error.get("code"), error.get("type")):
        return True
    # Not only the message: a gateway may quote the server's whole error in one of its own fields.
    text = body[:_MAX_SEARCHED_BYTES].lower()
    if not any(word in text for word in _MONEY_WORDS):
        return False
    return bool(_MONEY.search(text) or (_MONEY_OR_RATE.search(text) and not _RATE.search(text)))

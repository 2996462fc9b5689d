"""The texts in requests and answers of every endpoint."""

from typing import Any

import pytest

from batchline.console.conversation import answer_text, answered, asked, last_asked


def _pairs(body: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in asked(body).messages]


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, [("user", "a")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "odd"}, {"x": 1}]}]},
            [("user", "a\n[odd]\n[part]")],
        ),
        ({"messages": [{"role": 7, "content": None}, "x"]}, [("message", ""), ("message", "x")]),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{1}"}}]}]},
            [("assistant", "[tool call] f({1})")],
        ),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "No."}]}, [("assistant", "[refusal] No.")]),
        ({"input": "a", "instructions": "be brief"}, [("instructions", "be brief"), ("input", "a")]),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "output": "7"},
                ]
            },
            [("user", "a"), ("input", "[tool call] f({})"), ("input", "7")],
        ),
        ({"input": ["one", "two"]}, [("input", "one"), ("input", "two")]),
        ({"input": [1, 2, 3]}, [("input", "[3 tokens]")]),
        ({"input": [[1], [2, 3]]}, [("input", "[1 token]"), ("input", "[2 tokens]")]),
        ({"prompt": "a"}, [("prompt", "a")]),
        ({"prompt": ["a", "b"]}, [("prompt", "a"), ("prompt", "b")]),
        ({"messages": 7}, []),
        ({"input": [], "prompt": {}}, []),
        ([1], []),
    ],
)
def test_what_is_asked_is_found(body: Any, messages: list[tuple[str, str]]) -> None:
    assert _pairs(body) == messages
    assert last_asked(body) == (messages[-1][1] if messages else "")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choices": [{"message": {"content": "a"}}]}, "a"),
        ({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}, "a\nb"),
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"message": {"content": None, "refusal": "No."}}]}, "[refusal] No."),
        (
            {"choices": [{"message": {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}}]},
            "[tool call] f()",
        ),
        (
            {
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "content": [{"type": "output_text", "text": "a"}]},
                    {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]},
                    {"type": "function_call", "name": "f", "arguments": "{}"},
                ]
            },
            "a\n[refusal] No.\n[tool call] f({})",
        ),
        ({"data": [{"embedding": [0.5, 1]}, {"embedding": [1, 2]}]}, "2 vectors of 2 numbers"),
        ({"data": [7], "choices": 7, "output": {}}, ""),
        (None, ""),
    ],
)
def test_what_is_answered_is_found(answer: Any, text: str) -> None:
    assert answer_text(answer) == text


def test_images_sounds_and_files_are_named_with_their_size() -> None:
    image = f"data:image/png;base64,{'A' * 700_000}"
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "input_image", "image_url": image},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "A" * 5000, "format": "wav"}},
        {"type": "file", "file": {"filename": "a.pdf"}},
        {"type": "image_url", "image_url": {"url": 7}},
    ]
    lines = _pairs({"messages": [{"role": "user", "content": parts}]})[0][1].split("\n")
    assert lines[:3] == [
        "[image_url: image/png, 700.0 KB]",
        "[input_image: image/png, 700.0 KB]",
        "[image_url: https://example.com/a.png]",
    ]
    assert lines[3].endswith("5.0 KB in all]")
    assert lines[4:] == ["[file: a.pdf]", "[image_url]"]


def test_many_messages_and_long_ones_are_cut_and_that_is_said() -> None:
    many = asked({"messages": [{"role": "user", "content": "a"}] * 100_000})
    assert (len(many.messages), many.notices) == (500, ["The first 500 of 100,000 messages."])
    long = answered({"choices": [{"message": {"content": "w" * 150_000}}] * 3})
    assert sum(len(message.text) for message in long.messages) == 200_000
    assert long.notices == ["The messages are cut after 200,000 characters."]
    parts = _pairs({"input": [{"role": "user", "content": ["a"] * 1002}]})
    assert parts[0][1].endswith("a\n[2 more parts]")

"""Reads the Dockerfile, the compose file and the manifests as their programs read them."""

import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from batchline import __version__
from batchline.cli import main
from batchline.cli.loading import load_settings
from batchline.cli.options import FLAGS, variable
from batchline.settings import Settings

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
IMAGE = f"batchline:{__version__}"
VERBS = main.list_commands(click.Context(main))
VARIABLES = {variable(name) for name in FLAGS} | {
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}
"""The environment variables that a process reads."""
_PREFIXES = ("BATCHLINE_", "AWS_")


def load(path: Path) -> Object:
    return parsed(path.read_text(), where=path.name)


def parsed(text: str, *, where: str) -> Object:
    """Return one object. Refuse a key that appears twice, of which YAML readers silently take the last."""
    _refuse_repeated_keys(yaml.compose(text), where)
    found: Object = yaml.safe_load(text)
    return found


def _refuse_repeated_keys(node: Any, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), (where, keys)
        for key, value in node.value:
            _refuse_repeated_keys(value, f"{where}.{key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(value, where)


def _dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def arguments(instruction: str) -> list[str]:
    return [argument for name, argument in _dockerfile() if name == instruction]


def last(instruction: str) -> str:
    """Return the argument of the last such instruction in the stage that is shipped."""
    steps = _dockerfile()
    shipped = max(at for at, (name, _) in enumerate(steps) if name == "FROM")
    return [argument for name, argument in steps[shipped:] if name == instruction][-1]


ENV = dict(pair.split("=", 1) for pair in last("ENV").split())
"""The environment of the image."""


def settings_of(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str]) -> Settings:
    """Return the settings that the process of a container would read; later environments win."""
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        monkeypatch.delenv(name)
    for environment in environments:
        for name, value in environment.items():
            if name.startswith(_PREFIXES):
                monkeypatch.setenv(name, value)
    return load_settings()

"""The dashboard and the alert rules name only series that the service has, and Prometheus accepts both."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from batchline.store.postgres import clock as postgres_clock
from batchline.store.sqlite import clock as sqlite_clock
from tests.support.service import running_mock, running_service

_DEPLOY = Path(__file__).parents[2] / "deploy"
_RULES = _DEPLOY / "prometheus" / "alerts.yaml"
_DASHBOARD = _DEPLOY / "grafana" / "batchline.json"
_DOCS = Path(__file__).parents[2] / "docs"
_NAME = re.compile(r"\b(batchline_\w+)")
_FOREIGN = {"instance", "job", "le"}
"""Labels that Prometheus adds, and the bound of a bucket."""


def _expressions(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (value for name, value in part.items() if name in {"expr", "query"} and isinstance(value, str))
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _expressions(each)


def _all_expressions() -> list[str]:
    return [*_expressions(yaml.safe_load(_RULES.read_text())), *_expressions(json.loads(_DASHBOARD.read_text()))]


def _used_labels(expression: str) -> set[str]:
    """Return the labels that an expression groups by or selects by."""
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)\s*=~?\"", expression)
    return {name.strip() for group in groups for name in group.split(",")} | set(selected)


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a service that has just started."""
    with running_mock() as mock, running_service(tmp_path_factory.mktemp("service"), mock.url) as service:
        with urlopen(f"http://127.0.0.1:{service.port}/metrics") as answer:
            text: str = answer.read().decode()
        return text


def test_every_series_is_one_of_a_service_that_has_just_started(exposition: str) -> None:
    """F5: names and labels."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in _all_expressions():
        names = _NAME.findall(expression)
        for name in names:
            assert name in labels, expression
            assert _used_labels(expression) - _FOREIGN <= labels[name], expression


def test_every_metric_of_the_service_is_documented(exposition: str) -> None:
    page = (_DOCS / "reference" / "metrics.md").read_text()
    for family in text_string_to_metric_families(exposition):
        assert f"`{family.name}" in page


def test_every_alert_fires_in_a_test_of_promtool() -> None:
    cases = yaml.safe_load((_RULES.parent / "alerts.test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    [group] = yaml.safe_load(_RULES.read_text())["groups"]
    assert fired == {rule["alert"] for rule in group["rules"]}


def test_every_alert_says_what_to_do() -> None:
    page = (_DOCS / "how-to" / "monitoring.md").read_text()
    [group] = yaml.safe_load(_RULES.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["annotations"].keys() == {"summary", "description"}
        assert f"`{rule['alert']}`" in page


def _expression_of(alert: str) -> str:
    [group] = yaml.safe_load(_RULES.read_text())["groups"]
    [expression] = [rule["expr"] for rule in group["rules"] if rule["alert"] == alert]
    return str(expression)


def test_the_alert_of_the_clock_has_the_tolerance_of_the_service() -> None:
    """C13: an offset that the service tolerates is no reason to wake anybody."""
    [bound] = re.findall(r"> (\d+)$", _expression_of("BatchlineClockOff"))
    assert float(bound) == postgres_clock.TOLERANCE_SECONDS == sqlite_clock.TOLERANCE_SECONDS


def test_the_alert_of_progress_counts_lines_that_a_worker_holds() -> None:
    """A hung worker leaves no line in the queue, and may report no metrics of its own."""
    expression = _expression_of("BatchlineNoProgress")
    assert set(_NAME.findall(expression)) == {"batchline_nearest_deadline_seconds", "batchline_lines_total"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(_DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_metrics_rules_and_configuration(exposition: str) -> None:
    """Debian's package prometheus has promtool."""
    folder = _RULES.parent
    for arguments, given in (
        (["check", "metrics"], exposition),
        (["check", "rules", _RULES], ""),
        (["test", "rules", folder / "alerts.test.yaml"], ""),
        (["check", "config", folder / "prometheus.yaml"], ""),
    ):
        ran = subprocess.run(
            ["promtool", *map(str, arguments)], input=given, capture_output=True, text=True, check=False, cwd=folder
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout

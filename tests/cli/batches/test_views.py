"""How batches are shown."""

from io import StringIO

import pytest
from msgspec import Raw
from rich.console import Console, RenderableType

from batchline.cli.batches.views import BatchState, batch_table, detail_view, name_of
from batchline.cli.store import now
from batchline.client.models import Counts, ErrorCount, ErrorSample, RemoteBatch, RemoteEta, RemoteProgress
from batchline.domain.wait_text import AnyWait

_ID = "batch_01K9ZQ3V8M4T2X6R0B7N5C1D9F"


def _drawn(view: RenderableType, width: int = 80) -> list[str]:
    written = StringIO()
    Console(file=written, width=width, markup=False, emoji=False, highlight=False).print(view)
    return written.getvalue().splitlines()


def _state(wait: AnyWait | None = None, **more: object) -> BatchState:
    batch = RemoteBatch(
        id=_ID,
        status="in_progress",
        request_counts=Counts(total=50_000, completed=25_000, failed=12),
        created_at=now() - 7200,
        metadata=Raw(b'{"name": "night\\u202ely"}'),
    )
    progress = RemoteProgress(
        rate=12.5,
        eta=RemoteEta(seconds=3999, low=3000, high=5000),
        in_flight=32,
        waiting_for=wait,
        errors=[ErrorCount("http", 12, ErrorSample("a\x1b[31m", "b\u202ec"))],
    )
    return BatchState(batch=batch, progress=progress)


def test_a_row_fits_80_columns_with_the_whole_id() -> None:
    heads, row = _drawn(batch_table([_state()], width=80))
    assert len(row) <= 80
    assert row.split() == [_ID, "2h", "in_progress", "████░░░░", "50", "%", "12", "1:06:39"]
    assert heads.split() == ["batch", "age", "status", "progress", "failed", "left"]


def test_a_wide_terminal_shows_more() -> None:
    heads, row = _drawn(batch_table([_state()], width=140), width=140)
    assert heads.split()[-3:] == ["lines", "rate", "name"]
    assert row.split()[-3:] == ["50,000", "12/s", r"night\u202ely"]


@pytest.mark.parametrize("reason", ["upstream_paused", "storage", "held"])
def test_no_rate_is_shown_and_no_end_is_estimated_while_paused(reason: str) -> None:
    paused = _state(AnyWait(reason=reason, upstream="default", detail="refused"))
    row = _drawn(batch_table([paused], width=80))[1]
    assert row.split()[2] == ("held" if reason == "held" else "paused")
    assert row.split()[-1] == "-"
    assert _drawn(batch_table([paused], width=140), width=140)[1].split()[-2] == "-"
    assert not any("left" in line or "/s" in line for line in _drawn(detail_view(paused)))


def test_everything_about_a_batch_fits_80_columns_and_is_inert() -> None:
    lines = _drawn(detail_view(_state(AnyWait(reason="slots", limit=32, in_flight=32))))
    text = "\n".join(line.rstrip() for line in lines)
    assert max(map(len, lines)) <= 80
    assert "waiting   for a slot: all 32 are taken" in text
    assert "about 1:06:39 left (50:00 to 1:23:20)" in " ".join(text.split())
    assert "http: 12 lines" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(("metadata", "name"), [(b"null", "m"), (b'{"name": 3}', "m"), (b'{"name": "x"}', "x")])
def test_a_batch_is_called_by_its_name_or_its_model(metadata: bytes, name: str) -> None:
    assert name_of(RemoteBatch(id="b", status="s", model="m", metadata=Raw(metadata))) == name

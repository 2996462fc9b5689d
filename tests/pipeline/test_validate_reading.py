"""How an input file is read: lines and their ends (C4), in bounded memory (C6)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchline.domain.limits import InputLimits
from tests.support.input_files import BOM, Bench, line, padded


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.rule("C4", "N counts physical lines from 1.")
def test_numbers_count_physical_lines(bench: Bench) -> None:
    """C4: blank lines move them on; the index of a line in its batch does not see blank lines."""
    assert bench.faults(b"", b"\r", line("0"), b" \t ", b"1") == [("Line 5 must be a JSON object", 5)]
    kept = bench.kept(b"", line("0"), b"\t\r", line("1"), b"", line("2"))
    assert [(one.index, json.loads(one.custom_id)) for one in kept] == [(0, "0"), (1, "1"), (2, "2")]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n"])
def test_lines_end_with_lf_or_cr_lf(bench: Bench, end: bytes) -> None:
    """C4: LF, CR LF, or none at the end."""
    separator = end[: len(end) // 2] if len(end) > 2 else (end or b"\n")
    verdict = bench.validate(separator.join([line("0"), line("1")]) + end)
    assert (verdict.faults, verdict.lines) == ([], 2)


def test_cr_alone_ends_no_line(bench: Bench) -> None:
    """C4."""
    assert bench.faults(line("0") + b"\r" + line("1")) == [("Line 1 is not valid JSON", 1)]


@pytest.mark.rule("C4", "A line is measured without its end.")
@pytest.mark.parametrize(
    ("data", "fits"),
    [
        (padded(200), True),
        (padded(200) + b"\n", True),
        (padded(200) + b"\r\n", True),
        (BOM + padded(200) + b"\r\n", True),
        (padded(201), False),
        (padded(201) + b"\n", False),
        (padded(201) + b"\r\n", False),
        (padded(202) + b"\r\n", False),
        (padded(203) + b"\r\n", False),
        (padded(200) + b" \n", False),
        (padded(199) + b"\r\r\n", True),
        (padded(200) + b"\r\r\n", False),
        (padded(200) + b"\r", False),
    ],
)
def test_a_line_is_measured_without_its_end(bench: Bench, data: bytes, fits: bool) -> None:
    """C4, C14: neither LF, CR LF nor a leading byte-order mark is part of it; a CR that no LF follows is."""
    expected = [] if fits else [("Line 1 exceeds maximum size of 200 bytes", 1)]
    assert bench.faults(data, limits=InputLimits(max_line_bytes=200)) == expected


def test_after_a_line_too_long_the_next_is_read(bench: Bench) -> None:
    """C3, C4: what follows keeps its number and its own verdict, and blank lines are fine however long."""
    limits = InputLimits(max_line_bytes=200)
    lines = [b"x" * 1_000_000, line("1"), b" " * 1_000_000, b"[]", b" " * 600_000 + b"x", b" " * 300, line("6")]
    assert bench.faults(*lines, limits=limits) == [
        ("Line 1 exceeds maximum size of 200 bytes", 1),
        ("Line 4 must be a JSON object", 4),
        ("Line 5 exceeds maximum size of 200 bytes", 5),
    ]


@pytest.mark.parametrize("size", [262_141, 262_142, 262_143, 262_144, 262_145, 262_146])
def test_a_line_may_span_several_reads(bench: Bench, size: int) -> None:
    """C4: a line is the same wherever the reads of the file fall."""
    lines = [padded(size, "0"), padded(size, "1"), padded(700_000, "2"), padded(200, "3")]
    kept = bench.kept(BOM + lines[0] + b"\r", lines[1] + b"\r", *lines[2:])
    assert [(json.loads(one.custom_id), json.loads(one.body)) for one in kept] == [
        (source["custom_id"], source["body"]) for source in map(json.loads, lines)
    ]


@pytest.mark.rule("C4", "A leading byte-order mark is skipped.")
def test_a_leading_byte_order_mark_is_skipped(bench: Bench) -> None:
    """C4."""
    assert len(bench.kept(BOM + line("0"), line("1"))) == 2
    kept = bench.kept(BOM, b" \r", line("0"), line("1"))
    assert [(one.index, one.custom_id) for one in kept] == [(0, b'"0"'), (1, b'"1"')]


MEASURE = """
import resource
import sys
from pathlib import Path
from batchline.domain.limits import InputLimits
from batchline.pipeline.validate import validate_file

def peak():
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

def run(name):
    source = Path(sys.argv[1], name)
    return validate_file(source=source, work=source.with_name("work"), endpoint="/v1/chat/completions",
                         limits=InputLimits(max_bytes=1 << 40))

run("small")
before = peak()
verdict = run(sys.argv[2])
print(verdict.lines, len(verdict.faults), peak() - before)
"""


def grown(folder: Path, name: str) -> tuple[int, int, int]:
    """Lines, faults and by how many KiB a fresh process grew at most."""
    (folder / "small").write_bytes(line())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), name], check=True, capture_output=True, text=True
    )
    lines, faults, kib = map(int, done.stdout.split())
    return lines, faults, kib


@pytest.mark.rule("C6", "Validation streams: memory does not grow with the file.")
def test_a_monstrous_line_is_not_held(tmp_path: Path) -> None:
    """C6: memory does not grow with a line."""
    with (tmp_path / "line").open("wb") as file:
        file.truncate(150 * 1024 * 1024)
    lines, faults, kib = grown(tmp_path, "line")
    assert (lines, faults) == (0, 1)
    assert kib < 30 * 1024


def test_a_long_file_is_not_held(tmp_path: Path) -> None:
    """C6: memory does not grow with the file, also when many models keep many blocks open."""
    pad = "x" * 2900
    with (tmp_path / "file").open("wb") as file:
        for n in range(50_000):
            file.write(line(str(n), body={"model": f"m{n % 60}", "pad": pad}) + b"\n")
    lines, faults, kib = grown(tmp_path, "file")
    assert (lines, faults) == (50_000, 0)
    assert kib < 30 * 1024

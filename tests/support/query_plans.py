"""What the plans of statements may read, the same on every database."""

GROWING = {"batches", "files", "ledger", "line_errors", "segments", "samples", "shards", "lanes"}
"""Tables that grow with history. No statement may scan one of them."""

SMALL_INDEXES = {
    "files_uploading": "uploads under way",
    "batches_validating": "creates under way",
    "batches_to_finish": "batches that wait for their end",
    "batches_with_work": "batches that ended lately",
    "shards_leased": "shards that workers hold",
}
"""Partial indexes that may be scanned: what each holds does not grow with history."""

SUMS = {"count_queued_lines"}
"""Statements that may read all open shards. They run at most for a small part of the time."""

SURVEYS = {"count_open_batches", "oldest_and_nearest_batch"}
"""Statements that may read all projects or all open batches. They run at most for a small part of the time."""

EXISTENCE = {"needs_objects"}
"""Statements that end at the first row that they find."""

WHOLE_READS = SUMS | SURVEYS | EXISTENCE
"""Statements that are not checked for scans."""

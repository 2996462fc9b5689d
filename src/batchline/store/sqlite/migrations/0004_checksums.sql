-- Checksums are 63 bits of XXH3. What an earlier version wrote has none and is read without a check.
ALTER TABLE shards ADD COLUMN checksum INTEGER;
ALTER TABLE segments ADD COLUMN checksum INTEGER;
ALTER TABLE files ADD COLUMN checksum INTEGER;

-- lines: the number of lines in the segment. charges: what was charged for them, to be given back if they are lost.
ALTER TABLE segments ADD COLUMN lines INTEGER;
ALTER TABLE segments ADD COLUMN charges BLOB;

-- failures: how often finalizing failed; it is tried again later each time, and after the batches that never failed.
-- repairs: how often damage was repaired; lost lines run again only a few times.
ALTER TABLE batches ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN repairs INTEGER NOT NULL DEFAULT 0;
DROP INDEX batches_to_finish;
CREATE INDEX batches_to_finish ON batches (failures, expires_at)
    WHERE drained = 1 AND status IN ('in_progress', 'finalizing', 'cancelling');

-- A batch that is finalizing runs lines again if their results were damaged, and must end at its window too.
DROP INDEX batches_running;
CREATE INDEX batches_running ON batches (expires_at)
    WHERE status IN ('in_progress', 'finalizing') AND stop IS NULL AND drained = 0;

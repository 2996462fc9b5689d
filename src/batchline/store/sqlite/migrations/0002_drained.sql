-- drained: no shard is left to run, so that nobody needs to look at the shards of every running batch to know.
ALTER TABLE batches ADD COLUMN drained INTEGER NOT NULL DEFAULT 0;
UPDATE batches SET drained = 1
WHERE in_progress_at IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM shards WHERE batch_id = batches.id AND state IN ('open', 'leased'));
CREATE INDEX batches_to_finish ON batches (expires_at)
    WHERE drained = 1 AND status IN ('in_progress', 'finalizing', 'cancelling');

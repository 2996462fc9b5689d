-- What held something when the backup was taken is not there any more, and that is nobody's fault: shards run again
-- without a strike, under a new epoch.
UPDATE shards SET epoch = epoch + 1,
    state = CASE WHEN (SELECT stop FROM batches WHERE id = batch_id) IS NULL THEN 'open' ELSE 'closed' END
WHERE state = 'leased';
UPDATE shards SET owner = NULL, lease_until = NULL WHERE owner IS NOT NULL OR lease_until IS NOT NULL;
DELETE FROM files WHERE state = 'uploading';
DELETE FROM processes;

-- The service itself tells the owners of these that they were interrupted, as it finds them held by somebody gone.
UPDATE batches SET lease_until = 0 WHERE status = 'validating';
UPDATE batches SET owner = NULL, lease_until = NULL WHERE status <> 'validating';
UPDATE batches SET drained = 1
WHERE status IN ('in_progress', 'finalizing', 'cancelling') AND drained = 0
    AND NOT EXISTS (SELECT 1 FROM shards WHERE batch_id = batches.id AND state IN ('open', 'leased'));

-- The work of batches that are over may be half removed already, and its objects are not in the backup.
DELETE FROM shards WHERE batch_id IN (
    SELECT id FROM batches WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')
);
DELETE FROM segments WHERE batch_id IN (
    SELECT id FROM batches WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')
);
DELETE FROM samples WHERE batch_id IN (
    SELECT id FROM batches WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')
);
UPDATE batches SET work_key = NULL
WHERE status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND work_key IS NOT NULL;
DELETE FROM lanes WHERE NOT EXISTS (
    SELECT 1 FROM shards
    WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
);

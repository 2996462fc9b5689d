-- The processes that held leases when the backup was taken do not exist any more, which is no fault of their shards:
-- these run again without a strike, under a new epoch.
UPDATE shards SET epoch = epoch + 1,
    state = (
        SELECT CASE
            WHEN stop IS NOT NULL THEN 'closed' WHEN hold = 'held' AND status = 'in_progress' THEN 'withheld' ELSE 'open'
        END FROM batches WHERE id = batch_id
    )
WHERE state = 'leased';
UPDATE shards SET owner = NULL, lease_until = NULL WHERE owner IS NOT NULL OR lease_until IS NOT NULL;
DELETE FROM files WHERE state = 'uploading';
DELETE FROM processes;

-- The owner stays set and the lease has ended: so the service finds these batches interrupted, and fails them with the
-- usual message.
UPDATE batches SET lease_until = 0 WHERE status = 'validating';
UPDATE batches SET owner = NULL, lease_until = NULL WHERE status <> 'validating';
UPDATE batches SET drained = 1
WHERE status IN ('in_progress', 'finalizing', 'cancelling') AND drained = 0
    AND NOT EXISTS (SELECT 1 FROM shards WHERE batch_id = batches.id AND state IN ('open', 'leased', 'withheld'));

-- The work of terminal batches may be half deleted already, and its objects are not in the backup.
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

-- Shards that were leased are open now, so their lanes must be open too. All lanes start at the same virtual time.
DELETE FROM lanes;
INSERT INTO lanes (project_id, model, virtual_time, open)
SELECT DISTINCT project_id, model, 0, 1 FROM shards WHERE state = 'open';

-- The restored service is another one than that which the backup was taken of, with objects of its own.
UPDATE identity SET database_id = NULL, objects_id = NULL;
DELETE FROM sightings;

-- Indexes are made again; their objects are not in the backup.
DELETE FROM reuse_indexes;
-- Everyone signs in again.
DELETE FROM sessions;
DELETE FROM admin_sessions;

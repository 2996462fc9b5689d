-- name: key_owner
-- Whom a live key stands for, if it belongs to the project that was named.
SELECT keys.id AS key_id, projects.id AS project_id, projects.organization_id,
    organizations.balance + organizations.credits AS funds
FROM keys JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE keys.digest = :digest AND keys.revoked_at IS NULL AND (:project_id IS NULL OR projects.id = :project_id);

-- name: insert_organization
-- One organization of a name.
INSERT INTO organizations (id, name, created_at) VALUES (:organization_id, :name, :at) ON CONFLICT (name) DO NOTHING;

-- name: organization_by_name
SELECT id FROM organizations WHERE name = :name;

-- name: organizations
SELECT id, name, created_at, balance, credits FROM organizations ORDER BY created_at, id;

-- name: insert_project
-- One project of a name in an organization.
INSERT INTO projects (id, organization_id, name, created_at)
VALUES (:project_id, :organization_id, :name, :at) ON CONFLICT (organization_id, name) DO NOTHING;

-- name: project_by_name
SELECT id FROM projects WHERE organization_id = :organization_id AND name = :name;

-- name: projects
SELECT projects.id, projects.name, projects.organization_id, organizations.name AS organization, projects.created_at
FROM projects JOIN organizations ON organizations.id = projects.organization_id
ORDER BY projects.created_at, projects.id;

-- name: lock_project
-- There is one writer at a time, so whatever a transaction reads stays as it is.
SELECT id FROM projects WHERE id = :project_id;

-- name: insert_key
INSERT INTO keys (id, project_id, digest, hint, created_at) VALUES (:key_id, :project_id, :digest, :hint, :at);

-- name: keys
-- Every key, oldest first.
SELECT keys.id, keys.project_id, projects.name AS project, projects.organization_id,
    organizations.name AS organization, keys.hint, keys.created_at, keys.last_used_at, keys.revoked_at
FROM keys JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
ORDER BY keys.created_at, keys.id;

-- name: revoke_key
UPDATE keys SET revoked_at = :at WHERE id = :key_id AND revoked_at IS NULL;

-- name: rotate_key
-- A new secret for the same key.
UPDATE keys SET digest = :digest, hint = :hint WHERE id = :key_id AND revoked_at IS NULL;

-- name: touch_key
UPDATE keys SET last_used_at = :at WHERE id = :key_id AND coalesce(last_used_at, 0) < :at;

-- name: set_free_credits
UPDATE metering SET free_credits = :free_credits WHERE id = 1;

-- name: free_credits
SELECT free_credits FROM metering WHERE id = 1;

-- name: unfunded_organizations
-- Those that never had money, and so start with the free credits.
SELECT id FROM organizations WHERE funded = 0;

-- name: organization
SELECT id, name, created_at, balance, credits FROM organizations WHERE id = :organization_id;

-- name: lock_organization
SELECT id, name, created_at, balance, credits FROM organizations WHERE id = :organization_id;

-- name: add_funds
-- Money that comes in or goes out; the organization counts as funded from then on.
UPDATE organizations SET balance = balance + :balance, credits = credits + :credits, funded = 1
WHERE id = :organization_id;

-- name: book_grant
INSERT INTO ledger (organization_id, kind, at, balance, credits)
VALUES (:organization_id, 'grant', :at, :balance, :credits);

-- name: book_usage
INSERT INTO ledger
    (organization_id, kind, at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
     output_tokens, reasoning_tokens)
VALUES
    (:organization_id, 'usage', :at, :balance, :credits, :key_id, :batch_id, :model, :requests, :input_tokens,
     :cached_tokens, :output_tokens, :reasoning_tokens)
ON CONFLICT (key_id, batch_id, model, at) WHERE kind = 'usage' DO UPDATE SET
    balance = balance + excluded.balance, credits = credits + excluded.credits,
    requests = requests + excluded.requests, input_tokens = input_tokens + excluded.input_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens,
    reasoning_tokens = reasoning_tokens + excluded.reasoning_tokens;

-- name: entries
-- All of an organization's ledger.
SELECT ledger.at, ledger.kind, ledger.balance, ledger.credits, projects.name AS project, ledger.model,
    nullif(ledger.batch_id, '') AS batch_id, ledger.requests
FROM ledger LEFT JOIN keys ON keys.id = ledger.key_id LEFT JOIN projects ON projects.id = keys.project_id
WHERE ledger.organization_id = :organization_id ORDER BY ledger.at, ledger.id;

-- name: usage
SELECT organizations.name AS organization, projects.name AS project, projects.id AS project_id, ledger.model,
    nullif(ledger.batch_id, '') AS batch_id, ledger.at AS since, ledger.requests, ledger.input_tokens,
    ledger.cached_tokens, ledger.output_tokens, ledger.reasoning_tokens, -(ledger.balance + ledger.credits) AS cost
FROM ledger JOIN keys ON keys.id = ledger.key_id JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = ledger.organization_id
WHERE ledger.kind = 'usage' AND ledger.at >= :since AND ledger.at < :until
    AND (:project_id IS NULL OR projects.id = :project_id)
ORDER BY ledger.at, ledger.id;

-- name: account_of_batch
-- Who pays for a batch.
SELECT batches.key_id, projects.organization_id
FROM batches JOIN projects ON projects.id = batches.project_id WHERE batches.id = :batch_id;

-- name: insert_upload
-- The row that stands for an object before a byte of it is written.
INSERT INTO files
    (id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state, owner, lease_until)
VALUES
    (:id, :project_id, :filename, :purpose, :bytes, :created_at, :expires_at, :is_error, :object_key, 'uploading',
     :owner, :now + :lease);

-- name: renew_upload
UPDATE files SET lease_until = :now + :lease WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: finish_upload
-- Make an upload visible, last in its project's order.
UPDATE files
SET state = 'stored', seq = (SELECT coalesce(max(seq), 0) + 1 FROM files), filename = :filename, bytes = :bytes,
    created_at = :created_at, expires_at = :expires_at, owner = NULL, lease_until = NULL
WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: abandon_upload
UPDATE files SET state = 'abandoned' WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: insert_result
-- A file that finalizing wrote, visible at once.
INSERT INTO files
    (id, seq, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state)
VALUES
    (:id, (SELECT coalesce(max(seq), 0) + 1 FROM files), :project_id, :filename, :purpose, :bytes, :created_at,
     :expires_at, :is_error, :object_key, 'stored');

-- name: file
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key
FROM files
WHERE id = :id AND project_id = :project_id AND state = 'stored' AND expires_at > :at;

-- name: file_seq
-- Where a file stands in its project's order, also when it is gone.
SELECT seq FROM files WHERE id = :id AND project_id = :project_id AND seq IS NOT NULL;

-- name: files_newest_first
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at
    AND (:purpose IS NULL OR purpose = :purpose) AND (:after IS NULL OR seq < :after)
ORDER BY seq DESC LIMIT :limit;

-- name: files_oldest_first
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at
    AND (:purpose IS NULL OR purpose = :purpose) AND (:after IS NULL OR seq > :after)
ORDER BY seq LIMIT :limit;

-- name: delete_file
UPDATE files SET state = 'deleted', removed_at = :at
WHERE id = :id AND project_id = :project_id AND state = 'stored' AND expires_at > :at
RETURNING id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key;

-- name: expire_files
UPDATE files SET state = 'expired', removed_at = :at
WHERE id IN (SELECT id FROM files WHERE state = 'stored' AND expires_at <= :at LIMIT :limit)
RETURNING object_key;

-- name: abandon_dead_uploads
-- The folder's lock is ours, so an upload of another owner died with its process.
UPDATE files SET state = 'abandoned', removed_at = :at
WHERE state = 'uploading' AND (owner <> :owner OR lease_until < :now)
RETURNING object_key;

-- name: referenced_keys
SELECT object_key FROM files WHERE object_key = :object_key AND state IN ('uploading', 'stored');

-- name: insert_batch
INSERT INTO batches
    (id, project_id, key_id, endpoint, input_file_id, metadata, status, created_at, expires_at, epoch, owner,
     lease_until, digest, idempotency_key)
VALUES
    (:id, :project_id, :key_id, :endpoint, :input_file_id, :metadata, 'validating', :created_at, :expires_at, :epoch,
     :owner, :now + :lease, :digest, :idempotency_key);

-- name: create_by_idempotency_key
SELECT id AS batch_id, digest, answer_status, answer_body, created_at
FROM batches WHERE project_id = :project_id AND idempotency_key = :idempotency_key;

-- name: clear_idempotency_key
UPDATE batches SET idempotency_key = NULL WHERE project_id = :project_id AND idempotency_key = :idempotency_key;

-- name: newest_create
-- The newest create of the same thing by the same key.
SELECT id AS batch_id, digest, answer_status, answer_body, answered
FROM batches WHERE key_id = :key_id AND digest = :digest AND created_at >= :since
ORDER BY seq DESC LIMIT 1;

-- name: create_record
SELECT id AS batch_id, digest, answer_status, answer_body FROM batches WHERE id = :batch_id;

-- name: mark_answered
UPDATE batches SET answered = 1 WHERE id = :batch_id;

-- name: store_answer
UPDATE batches SET answer_status = :status, answer_body = :body WHERE id = :batch_id;

-- name: renew_batch
UPDATE batches SET lease_until = :now + :lease
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: start_batch
UPDATE batches SET status = 'in_progress', in_progress_at = :at, total = :total, model = :model,
    work_key = :work_key, owner = NULL, lease_until = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: insert_shard
INSERT INTO shards (batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, strikes)
VALUES (:batch_id, :n, :project_id, :offset, :length, :lines, :model, :expires_at, :settled, :strikes);

-- name: fail_batch
UPDATE batches SET status = 'failed', failed_at = :at, errors = :errors, owner = NULL, lease_until = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: drop_batch
DELETE FROM batches WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: interrupted_batches
-- Batches whose validating process is gone.
SELECT id AS batch_id, epoch FROM batches
WHERE status = 'validating' AND (owner <> :owner OR lease_until < :now);

-- name: batch
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch
FROM batches WHERE id = :id AND (:project_id IS NULL OR project_id = :project_id);

-- name: lock_batch
SELECT id, stop FROM batches WHERE id = :batch_id;

-- name: live_counts
-- What the shards of a running batch add up to; a terminal batch has its own counts, frozen.
SELECT coalesce(sum(completed), 0) AS completed, coalesce(sum(failed), 0) AS failed,
    coalesce(sum(input_tokens), 0) AS input_tokens, coalesce(sum(cached_tokens), 0) AS cached_tokens,
    coalesce(sum(output_tokens), 0) AS output_tokens, coalesce(sum(reasoning_tokens), 0) AS reasoning_tokens
FROM shards WHERE batch_id = :batch_id;

-- name: batch_seq
SELECT seq FROM batches WHERE id = :id AND project_id = :project_id;

-- name: batches
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch
FROM batches
WHERE project_id = :project_id AND (:after IS NULL OR seq < :after) AND (:status IS NULL OR status = :status)
    AND (:created_after IS NULL OR created_at > :created_after)
    AND (:created_before IS NULL OR created_at < :created_before)
ORDER BY seq DESC LIMIT :limit;

-- name: cancel_validating
-- Nothing ran yet: the end is at once, and the validating process is fenced off.
UPDATE batches SET status = 'cancelled', stop = 'cancelled', cancelling_at = :at, cancelled_at = :at,
    epoch = epoch + 1, owner = NULL, lease_until = NULL
WHERE id = :id AND status = 'validating';

-- name: cancel_running
UPDATE batches SET status = 'cancelling', stop = coalesce(stop, 'cancelled'), cancelling_at = :at
WHERE id = :id AND status IN ('in_progress', 'finalizing');

-- name: close_open_shards
UPDATE shards SET state = 'closed' WHERE batch_id = :batch_id AND state = 'open';

-- name: mark_drained
-- Nothing is left to run.
UPDATE batches SET drained = 1
WHERE id = :batch_id AND drained = 0
    AND NOT EXISTS (SELECT 1 FROM shards WHERE batch_id = :batch_id AND state IN ('open', 'leased'));

-- name: lock_lane
SELECT 1;

-- name: open_lane
-- A lane that had nothing to do begins where the others are now: it gets its share, and nothing for the time before.
INSERT INTO lanes (project_id, model, virtual_time)
VALUES (
    :project_id, :model,
    coalesce(
        (SELECT min(virtual_time) FROM lanes WHERE EXISTS (
            SELECT 1 FROM shards
            WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
        )), 0)
)
ON CONFLICT (project_id, model) DO UPDATE SET virtual_time = max(virtual_time, excluded.virtual_time);

-- name: claimable_lanes
-- Lanes with something open, the one that had the least so far first.
SELECT project_id, model, virtual_time FROM lanes
WHERE EXISTS (
        SELECT 1 FROM shards
        WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
    )
    AND NOT EXISTS (
        SELECT 1 FROM json_each(:without) AS left_out
        WHERE coalesce(left_out.value ->> 'model', lanes.model) = lanes.model
            AND coalesce(left_out.value ->> 'project_id', lanes.project_id) = lanes.project_id
    )
ORDER BY virtual_time, project_id, model LIMIT :limit;

-- name: busy_lane
-- Nobody else is ever claiming.
SELECT 1 WHERE FALSE;

-- name: claimable_shards
-- What is open in a lane, the earliest deadline first.
SELECT project_id, expires_at, batch_id, n, "offset", length, lines, model, settled, epoch, strikes
FROM shards
WHERE state = 'open' AND project_id = :project_id AND model = :model
ORDER BY expires_at, batch_id, n LIMIT :limit OFFSET :offset;

-- name: advance_lane
UPDATE lanes SET virtual_time = virtual_time + :lines WHERE project_id = :project_id AND model = :model;

-- name: delete_idle_lanes
-- Of a batch's project, those without a shard that is open: opened again, a lane begins where the others are.
DELETE FROM lanes
WHERE project_id = (SELECT project_id FROM batches WHERE id = :batch_id) AND NOT EXISTS (
    SELECT 1 FROM shards
    WHERE state IN ('open', 'leased') AND shards.project_id = lanes.project_id AND shards.model = lanes.model
);

-- name: lease_shard
UPDATE shards SET state = 'leased', epoch = epoch + 1, owner = :owner, lease_until = :now + :lease
WHERE batch_id = :batch_id AND n = :n AND state = 'open' AND epoch = :epoch
RETURNING batch_id, n, epoch;

-- name: leased_batch
SELECT batches.id, batches.project_id, projects.organization_id, batches.endpoint, batches.expires_at,
    batches.work_key, keys.revoked_at IS NOT NULL AS key_revoked,
    organizations.balance + organizations.credits AS funds
FROM batches JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE batches.id = :batch_id;

-- name: renew_shards
UPDATE shards SET lease_until = :now + :lease WHERE state = 'leased' AND owner = :owner
RETURNING batch_id, n, epoch;

-- name: signals
SELECT batches.id AS batch_id, batches.stop, keys.revoked_at IS NOT NULL AS key_revoked,
    organizations.balance + organizations.credits AS funds
FROM batches JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE batches.id = :batch_id;

-- name: advance_shard
-- The fence: only the holder of the current epoch moves a shard.
UPDATE shards SET settled = :settled, completed = completed + :completed, failed = failed + :failed,
    input_tokens = input_tokens + :input_tokens, cached_tokens = cached_tokens + :cached_tokens,
    output_tokens = output_tokens + :output_tokens, reasoning_tokens = reasoning_tokens + :reasoning_tokens,
    state = CASE WHEN :done THEN 'done' ELSE 'leased' END
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND state = 'leased';

-- name: add_line_errors
-- The sample is that of the first line with the code.
INSERT INTO line_errors (batch_id, code, count, sample) VALUES (:batch_id, :code, :count, :sample)
ON CONFLICT (batch_id, code) DO UPDATE SET count = count + excluded.count;

-- name: line_errors
SELECT code, count, sample FROM line_errors WHERE batch_id = :batch_id ORDER BY count DESC, code;

-- name: add_sample
INSERT INTO samples (batch_id, at, lines) VALUES (:batch_id, :at, :lines)
ON CONFLICT (batch_id, at) DO UPDATE SET lines = lines + excluded.lines;

-- name: delete_old_samples
DELETE FROM samples WHERE batch_id = :batch_id AND at <= :until;

-- name: samples
SELECT at, lines FROM samples WHERE batch_id = :batch_id ORDER BY at;

-- name: unfinished_models
SELECT DISTINCT model FROM shards WHERE batch_id = :batch_id AND state IN ('open', 'leased') ORDER BY model;

-- name: insert_segment
INSERT INTO segments (batch_id, output_bytes, error_bytes, object_key, data)
VALUES (:batch_id, :output_bytes, :error_bytes, :object_key, :data);

-- name: release_shard
-- Handed back; to a batch that was stopped, for good.
UPDATE shards SET owner = NULL, lease_until = NULL,
    state = CASE WHEN (SELECT stop FROM batches WHERE id = :batch_id) IS NULL THEN 'open' ELSE 'closed' END
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND state = 'leased'
RETURNING project_id, model, expires_at, batch_id, n, state;

-- name: expired_leases
-- The folder's lock is ours, so that whoever holds a lease and is neither this process nor one of its own is dead.
SELECT batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, epoch, strikes
FROM shards WHERE state = 'leased' AND owner NOT IN (SELECT value FROM json_each(:live_owners))
ORDER BY batch_id, n LIMIT :limit;

-- name: reopen_shard
-- A new epoch, so that a holder who comes back is fenced off.
UPDATE shards SET state = :state, epoch = epoch + 1, strikes = :strikes, settled = :settled, owner = NULL,
    lease_until = NULL
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND state = 'leased';

-- name: next_shard_n
SELECT max(n) + 1 AS n FROM shards WHERE batch_id = :batch_id;

-- name: batches_past_window
SELECT id AS batch_id FROM batches
WHERE status = 'in_progress' AND stop IS NULL AND drained = 0 AND expires_at <= :at;

-- name: stop_expired
UPDATE batches SET stop = 'expired' WHERE id = :batch_id AND status = 'in_progress' AND stop IS NULL;

-- name: finalizable_batch
-- A batch with nothing left to run that nobody is putting together.
SELECT id, status, stop, epoch, work_key FROM batches
WHERE drained = 1 AND status IN ('in_progress', 'finalizing', 'cancelling')
    AND (owner IS NULL OR owner <> :owner OR lease_until < :now)
ORDER BY expires_at LIMIT 1;

-- name: lease_finalizable
UPDATE batches SET epoch = epoch + 1, owner = :owner, lease_until = :now + :lease,
    finalizing_at = CASE WHEN status = 'in_progress' AND stop IS NULL THEN :at ELSE finalizing_at END,
    status = CASE WHEN status = 'in_progress' AND stop IS NULL THEN 'finalizing' ELSE status END
WHERE id = :id AND epoch = :epoch;

-- name: closed_shards
SELECT batch_id, n, "offset", length, lines, model, settled, epoch, strikes
FROM shards WHERE batch_id = :batch_id AND state = 'closed' ORDER BY n;

-- name: segments
SELECT id, output_bytes, error_bytes, object_key, data
FROM segments WHERE batch_id = :batch_id AND id > :after ORDER BY id LIMIT :limit;

-- name: publish_batch
UPDATE batches
SET status = :status, completed = :completed, failed = :failed, input_tokens = :input_tokens,
    cached_tokens = :cached_tokens, output_tokens = :output_tokens, reasoning_tokens = :reasoning_tokens,
    output_file_id = :output_file_id, error_file_id = :error_file_id, owner = NULL, lease_until = NULL,
    completed_at = CASE WHEN :status = 'completed' THEN :at END,
    cancelled_at = CASE WHEN :status = 'cancelled' THEN :at END,
    expired_at = CASE WHEN :status = 'expired' THEN :at END
WHERE id = :batch_id AND epoch = :epoch;

-- name: prunable_batches
-- Terminal batches whose work is still stored.
SELECT id AS batch_id FROM batches
WHERE work_key IS NOT NULL AND status IN ('completed', 'expired', 'cancelled')
ORDER BY seq LIMIT :limit;

-- name: delete_shards
DELETE FROM shards WHERE batch_id = :batch_id;

-- name: delete_segments
DELETE FROM segments WHERE batch_id = :batch_id;

-- name: delete_samples
DELETE FROM samples WHERE batch_id = :batch_id;

-- name: clear_work_key
UPDATE batches SET work_key = NULL WHERE id = :batch_id;

-- name: active_batches
SELECT id FROM batches
WHERE id = :batch_id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: probe
UPDATE probe SET at = :now WHERE id = 1;

-- name: lock_fleet
-- There is one writer at a time anyway.
SELECT 1;

-- name: upsert_process
INSERT INTO processes (owner, lease_until, report, reserved) VALUES (:owner, :now + :lease, :report, :reserved)
ON CONFLICT (owner) DO UPDATE
SET lease_until = excluded.lease_until, report = excluded.report, reserved = excluded.reserved;

-- name: processes
-- Those that are alive.
SELECT owner, report, reserved FROM processes WHERE lease_until >= :now ORDER BY owner;

-- name: delete_expired_processes
DELETE FROM processes WHERE lease_until < :now;

-- name: delete_process
DELETE FROM processes WHERE owner = :owner;

-- name: count_queued_lines
-- What no worker holds.
SELECT coalesce(sum(lines), 0) AS lines FROM shards WHERE state = 'open';

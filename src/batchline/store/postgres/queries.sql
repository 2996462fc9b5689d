-- name: key_owner
-- Whom a live key stands for, if it belongs to the project that was named.
SELECT keys.id AS key_id, projects.id AS project_id, projects.organization_id,
    organizations.balance + organizations.credits AS funds
FROM keys JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE keys.digest = :digest AND keys.revoked_at IS NULL
    AND (:project_id::text IS NULL OR projects.id = :project_id::text);

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
-- Until the end of the transaction nobody else gives a place in this project's order.
SELECT id FROM projects WHERE id = :project_id FOR NO KEY UPDATE;

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
UPDATE keys SET last_used_at = used.at
FROM unnest(:key_id::text[], :at::bigint[]) AS used (key_id, at)
WHERE keys.id = used.key_id AND coalesce(keys.last_used_at, 0) < used.at;

-- name: set_free_credits
UPDATE metering SET free_credits = :free_credits WHERE id = 1;

-- name: free_credits
-- Locked, so that an organization is made wholly before or wholly after metering starts.
SELECT free_credits FROM metering WHERE id = 1 FOR SHARE;

-- name: unfunded_organizations
-- Those that never had money, and so start with the free credits.
SELECT id FROM organizations WHERE NOT funded ORDER BY id;

-- name: organization
SELECT id, name, created_at, balance, credits FROM organizations WHERE id = :organization_id;

-- name: lock_organization
-- As it is, and stays until the end of the transaction.
SELECT id, name, created_at, balance, credits FROM organizations WHERE id = :organization_id FOR NO KEY UPDATE;

-- name: add_funds
-- Money that comes in or goes out; the organization counts as funded from then on.
UPDATE organizations SET balance = balance + :balance, credits = credits + :credits, funded = TRUE
WHERE id = :organization_id;

-- name: book_grant
INSERT INTO ledger (organization_id, kind, at, balance, credits)
VALUES (:organization_id, 'grant', :at, :balance, :credits);

-- name: book_usage
INSERT INTO ledger
    (organization_id, kind, at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
     output_tokens, reasoning_tokens)
SELECT organization_id, 'usage', at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
    output_tokens, reasoning_tokens
FROM unnest(
    :organization_id::text[], :at::bigint[], :balance::bigint[], :credits::bigint[], :key_id::text[],
    :batch_id::text[], :model::text[], :requests::bigint[], :input_tokens::bigint[], :cached_tokens::bigint[],
    :output_tokens::bigint[], :reasoning_tokens::bigint[]
) AS used (
    organization_id, at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
    output_tokens, reasoning_tokens
)
ON CONFLICT (key_id, batch_id, hashtextextended(model, 0), at) WHERE kind = 'usage' DO UPDATE SET
    balance = ledger.balance + excluded.balance, credits = ledger.credits + excluded.credits,
    requests = ledger.requests + excluded.requests, input_tokens = ledger.input_tokens + excluded.input_tokens,
    cached_tokens = ledger.cached_tokens + excluded.cached_tokens,
    output_tokens = ledger.output_tokens + excluded.output_tokens,
    reasoning_tokens = ledger.reasoning_tokens + excluded.reasoning_tokens;

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
    AND (:project_id::text IS NULL OR projects.id = :project_id::text)
ORDER BY ledger.at, ledger.id;

-- name: account_of_batch
-- Who pays for a batch. It stays locked: whoever records next sees all that is recorded here.
SELECT batches.key_id, projects.organization_id
FROM batches JOIN projects ON projects.id = batches.project_id
WHERE batches.id = :batch_id FOR NO KEY UPDATE OF batches;

-- name: insert_upload
-- The row that stands for an object before a byte of it is written.
INSERT INTO files
    (id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state, owner, lease_until)
VALUES
    (:id, :project_id, :filename, :purpose, :bytes, :created_at, :expires_at, :is_error, :object_key, 'uploading',
     :owner, clock_timestamp() + make_interval(secs => :lease));

-- name: renew_upload
UPDATE files SET lease_until = clock_timestamp() + make_interval(secs => :lease)
WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: finish_upload
-- Make an upload visible, last in its project's order.
UPDATE files
SET state = 'stored', seq = nextval('file_seq'), filename = :filename, bytes = :bytes, created_at = :created_at,
    expires_at = :expires_at, owner = NULL, lease_until = NULL
WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: abandon_upload
UPDATE files SET state = 'abandoned' WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: insert_result
-- A file that finalizing wrote, visible at once.
INSERT INTO files
    (id, seq, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state)
VALUES
    (:id, nextval('file_seq'), :project_id, :filename, :purpose, :bytes, :created_at, :expires_at, :is_error,
     :object_key, 'stored');

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
    AND (:purpose::text IS NULL OR purpose = :purpose::text) AND (:after::bigint IS NULL OR seq < :after::bigint)
ORDER BY seq DESC LIMIT :limit;

-- name: files_oldest_first
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at
    AND (:purpose::text IS NULL OR purpose = :purpose::text) AND (:after::bigint IS NULL OR seq > :after::bigint)
ORDER BY seq LIMIT :limit;

-- name: delete_file
UPDATE files SET state = 'deleted', removed_at = :at
WHERE id = :id AND project_id = :project_id AND state = 'stored' AND expires_at > :at
RETURNING id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key;

-- name: expire_files
UPDATE files SET state = 'expired', removed_at = :at
WHERE id IN (
    SELECT id FROM files WHERE state = 'stored' AND expires_at <= :at LIMIT :limit FOR UPDATE SKIP LOCKED
)
RETURNING object_key;

-- name: abandon_dead_uploads
-- Only the database's clock tells that an upload is dead.
UPDATE files SET state = 'abandoned', removed_at = :at
WHERE state = 'uploading' AND lease_until < clock_timestamp()
RETURNING object_key;

-- name: referenced_keys
SELECT object_key FROM files WHERE object_key = ANY(:object_key::text[]) AND state IN ('uploading', 'stored');

-- name: insert_batch
INSERT INTO batches
    (id, project_id, key_id, endpoint, input_file_id, metadata, status, created_at, expires_at, epoch, owner,
     lease_until, digest, idempotency_key)
VALUES
    (:id, :project_id, :key_id, :endpoint, :input_file_id, :metadata, 'validating', :created_at, :expires_at, :epoch,
     :owner, clock_timestamp() + make_interval(secs => :lease), :digest, :idempotency_key);

-- name: create_by_idempotency_key
SELECT id AS batch_id, digest, answer_status, answer_body, created_at
FROM batches
WHERE project_id = :project_id AND hashtextextended(idempotency_key, 0) = hashtextextended(:idempotency_key, 0)
    AND idempotency_key = :idempotency_key;

-- name: clear_idempotency_key
UPDATE batches SET idempotency_key = NULL
WHERE project_id = :project_id AND hashtextextended(idempotency_key, 0) = hashtextextended(:idempotency_key, 0)
    AND idempotency_key = :idempotency_key;

-- name: newest_create
-- The newest create of the same thing by the same key.
SELECT id AS batch_id, digest, answer_status, answer_body, answered
FROM batches WHERE key_id = :key_id AND digest = :digest AND created_at >= :since
ORDER BY seq DESC LIMIT 1;

-- name: create_record
SELECT id AS batch_id, digest, answer_status, answer_body FROM batches WHERE id = :batch_id;

-- name: mark_answered
UPDATE batches SET answered = TRUE WHERE id = :batch_id;

-- name: store_answer
UPDATE batches SET answer_status = :status, answer_body = :body WHERE id = :batch_id;

-- name: renew_batch
UPDATE batches SET lease_until = clock_timestamp() + make_interval(secs => :lease)
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: start_batch
UPDATE batches SET status = 'in_progress', in_progress_at = :at, total = :total, model = :model,
    work_key = :work_key, owner = NULL, lease_until = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: insert_shard
INSERT INTO shards (batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, strikes)
SELECT * FROM unnest(
    :batch_id::text[], :n::integer[], :project_id::text[], :offset::bigint[], :length::bigint[], :lines::integer[],
    :model::text[], :expires_at::bigint[], :settled::bytea[], :strikes::integer[]
);

-- name: fail_batch
UPDATE batches SET status = 'failed', failed_at = :at, errors = :errors, owner = NULL, lease_until = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: drop_batch
DELETE FROM batches WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: interrupted_batches
-- Batches whose validating process is gone.
SELECT id AS batch_id, epoch FROM batches
WHERE status = 'validating' AND lease_until < clock_timestamp()
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED;

-- name: batch
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch
FROM batches WHERE id = :id AND (:project_id::text IS NULL OR project_id = :project_id::text);

-- name: lock_batch
-- Until the end of the transaction nobody else moves these batches.
SELECT id, stop FROM batches WHERE id = ANY (:batch_id::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: live_counts
-- What the shards of a running batch add up to; a terminal batch has its own counts, frozen.
SELECT coalesce(sum(completed), 0)::bigint AS completed, coalesce(sum(failed), 0)::bigint AS failed,
    coalesce(sum(input_tokens), 0)::bigint AS input_tokens, coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
    coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(reasoning_tokens), 0)::bigint AS reasoning_tokens
FROM shards WHERE batch_id = :batch_id;

-- name: batch_seq
SELECT seq FROM batches WHERE id = :id AND project_id = :project_id;

-- name: batches
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch
FROM batches
WHERE project_id = :project_id AND (:after::bigint IS NULL OR seq < :after::bigint)
    AND (:status::text IS NULL OR status = :status::text)
    AND (:created_after::bigint IS NULL OR created_at > :created_after::bigint)
    AND (:created_before::bigint IS NULL OR created_at < :created_before::bigint)
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
-- Whoever asks holds the batch's lock, so the last shard that ends finds all others ended. The last ones cut are the
-- last ones run: looked at first, they mostly tell at once that there is work left.
UPDATE batches SET drained = TRUE
WHERE id = :batch_id AND NOT drained AND NOT EXISTS (
    SELECT 1 FROM (
        SELECT state FROM shards WHERE batch_id = :batch_id ORDER BY batch_id DESC, n DESC OFFSET 0
    ) AS last_first WHERE state IN ('open', 'leased')
);

-- name: lock_lane
-- Nobody else opens this lane meanwhile, and nobody raises the floor over a lane that is just being opened.
SELECT pg_advisory_xact_lock_shared(1651794792, 1),
    pg_advisory_xact_lock(hashtextextended(:model, hashtextextended(:project_id, 0)));

-- name: open_lane
-- A lane that had nothing to do begins where the others are now: it gets its share, and nothing for the time before.
WITH others AS (
    SELECT coalesce(
        (SELECT min(virtual_time) FROM lanes WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)),
        (SELECT last_value FROM lane_floor)
    ) AS virtual_time
), opened AS (
    UPDATE lanes SET open = TRUE,
        virtual_time = CASE WHEN open THEN lanes.virtual_time ELSE greatest(lanes.virtual_time, others.virtual_time) END,
        (next_expires_at, next_batch_id, next_n) = (
            SELECT expires_at, batch_id, n FROM (
                SELECT next_expires_at, next_batch_id, next_n WHERE open
                UNION ALL SELECT :expires_at::bigint, :batch_id::text, :n::integer
            ) AS known (expires_at, batch_id, n) ORDER BY expires_at, batch_id, n LIMIT 1
        )
    FROM others
    WHERE project_id = :project_id::text AND hashtextextended(model, 0) = hashtextextended(:model::text, 0)
        AND model = :model::text
    RETURNING 1
)
INSERT INTO lanes (project_id, model, virtual_time, next_expires_at, next_batch_id, next_n, open)
SELECT :project_id::text, :model::text, virtual_time, :expires_at::bigint, :batch_id::text, :n::integer, TRUE
FROM others WHERE NOT EXISTS (SELECT 1 FROM opened);

-- name: claimable_lanes
-- Lanes with something open that nobody else is claiming from, the one that had the least so far first. Whoever may
-- raise the floor is alone with that until its transaction ends.
SELECT ctid::text AS place, project_id, model, virtual_time, next_expires_at, next_batch_id, next_n,
    virtual_time > (SELECT last_value FROM lane_floor)
        AND (SELECT pg_try_advisory_xact_lock(1651794792, 1)) AS may_raise
FROM lanes
WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)
    AND NOT EXISTS (
        SELECT 1 FROM json_to_recordset(:without::json) AS left_out (model text, project_id text)
        WHERE coalesce(left_out.model, lanes.model) = lanes.model
            AND coalesce(left_out.project_id, lanes.project_id) = lanes.project_id
    )
ORDER BY virtual_time LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED;

-- name: busy_lane
-- Waits until the first of the lanes that others are claiming from is free.
SELECT 1 FROM lanes
WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)
    AND NOT EXISTS (
        SELECT 1 FROM json_to_recordset(:without::json) AS left_out (model text, project_id text)
        WHERE coalesce(left_out.model, lanes.model) = lanes.model
            AND coalesce(left_out.project_id, lanes.project_id) = lanes.project_id
    )
ORDER BY virtual_time LIMIT 1 FOR NO KEY UPDATE;

-- name: claimable_shards
-- What is open in lanes, the earliest deadline first.
SELECT shard.*
FROM unnest(
    :project_id::text[], :model::text[], :next_expires_at::bigint[], :next_batch_id::text[], :next_n::integer[],
    :limit::bigint[], :offset::bigint[]
) AS lane (project_id, model, next_expires_at, next_batch_id, next_n, most, skipped)
CROSS JOIN LATERAL (
    SELECT project_id, expires_at, batch_id, n, "offset", length, lines, model, settled, epoch, strikes
    FROM shards
    WHERE state = 'open' AND owner IS NULL AND project_id = lane.project_id
        AND hashtextextended(model, 0) = hashtextextended(lane.model, 0) AND model = lane.model
        AND (expires_at, batch_id, n) >= (lane.next_expires_at, lane.next_batch_id, lane.next_n)
    ORDER BY expires_at, batch_id, n LIMIT lane.most OFFSET lane.skipped
) AS shard;

-- name: advance_lane
-- Where the lanes were before this statement, no lane that is open was behind the least of them: that is the new floor.
WITH raised AS (
    SELECT setval('lane_floor', least_open.virtual_time)
    FROM (
        SELECT min(virtual_time) AS virtual_time FROM lanes
        WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)
    ) AS least_open
    WHERE TRUE = ANY (:may_raise::boolean[]) AND least_open.virtual_time > (SELECT last_value FROM lane_floor)
)
UPDATE lanes SET virtual_time = virtual_time + moved.lines, next_expires_at = moved.next_expires_at,
    next_batch_id = moved.next_batch_id, next_n = moved.next_n, open = moved.open
FROM unnest(
    :place::text[], :lines::bigint[], :next_expires_at::bigint[], :next_batch_id::text[], :next_n::integer[],
    :open::boolean[]
) AS moved (place, lines, next_expires_at, next_batch_id, next_n, open) LEFT JOIN raised ON TRUE
WHERE lanes.ctid = moved.place::tid;

-- name: delete_idle_lanes
-- Of a batch's project, those without a shard that is open: opened again, a lane begins where the others are.
DELETE FROM lanes WHERE project_id = (SELECT project_id FROM batches WHERE id = :batch_id) AND NOT open;

-- name: lease_shard
UPDATE shards SET state = 'leased', epoch = shards.epoch + 1, owner = free.owner,
    lease_until = clock_timestamp() + make_interval(secs => free.lease), lease = make_interval(secs => free.lease)
FROM unnest(:batch_id::text[], :n::integer[], :epoch::integer[], :owner::text[], :lease::double precision[])
    AS free (batch_id, n, epoch, owner, lease)
WHERE shards.batch_id = free.batch_id AND shards.n = free.n AND shards.state = 'open' AND shards.epoch = free.epoch
RETURNING shards.batch_id, shards.n, shards.epoch;

-- name: leased_batch
SELECT batches.id, batches.project_id, projects.organization_id, batches.endpoint, batches.expires_at,
    batches.work_key, keys.revoked_at IS NOT NULL AS key_revoked,
    organizations.balance + organizations.credits AS funds
FROM batches JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE batches.id = ANY (:batch_id::text[]);

-- name: renew_shards
-- In the order in which records lock them.
WITH held AS (
    SELECT batch_id, n FROM shards WHERE state = 'leased' AND owner = :owner ORDER BY batch_id, n FOR NO KEY UPDATE
)
UPDATE shards SET lease_until = clock_timestamp() + make_interval(secs => :lease)
FROM held WHERE shards.batch_id = held.batch_id AND shards.n = held.n
RETURNING shards.batch_id, shards.n, shards.epoch;

-- name: signals
SELECT batches.id AS batch_id, batches.stop, keys.revoked_at IS NOT NULL AS key_revoked,
    organizations.balance + organizations.credits AS funds
FROM unnest(:batch_id::text[]) WITH ORDINALITY AS asked (batch_id, place) JOIN batches ON batches.id = asked.batch_id
    JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
ORDER BY asked.place;

-- name: advance_shard
-- The fence: only the holder of the current epoch moves a shard.
UPDATE shards SET settled = moved.settled, completed = shards.completed + moved.completed,
    failed = shards.failed + moved.failed, input_tokens = shards.input_tokens + moved.input_tokens,
    cached_tokens = shards.cached_tokens + moved.cached_tokens,
    output_tokens = shards.output_tokens + moved.output_tokens,
    reasoning_tokens = shards.reasoning_tokens + moved.reasoning_tokens,
    state = CASE WHEN moved.done THEN 'done' ELSE 'leased' END, owner = CASE WHEN NOT moved.done THEN owner END
FROM unnest(
    :batch_id::text[], :n::integer[], :epoch::integer[], :settled::bytea[], :completed::integer[], :failed::integer[],
    :input_tokens::bigint[], :cached_tokens::bigint[], :output_tokens::bigint[], :reasoning_tokens::bigint[],
    :done::boolean[]
) AS moved (
    batch_id, n, epoch, settled, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, done
)
WHERE shards.batch_id = moved.batch_id AND shards.n = moved.n AND shards.epoch = moved.epoch
    AND shards.state = 'leased';

-- name: add_line_errors
-- The sample is that of the first line with the code.
INSERT INTO line_errors (batch_id, code, count, sample)
SELECT * FROM unnest(:batch_id::text[], :code::text[], :count::bigint[], :sample::bytea[])
ON CONFLICT (batch_id, code) DO UPDATE SET count = line_errors.count + excluded.count;

-- name: line_errors
SELECT code, count, sample FROM line_errors WHERE batch_id = :batch_id ORDER BY count DESC, code;

-- name: add_sample
INSERT INTO samples (batch_id, at, lines) VALUES (:batch_id, :at, :lines)
ON CONFLICT (batch_id, at) DO UPDATE SET lines = samples.lines + excluded.lines;

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
UPDATE shards SET owner = NULL, lease_until = NULL, lease = NULL,
    state = CASE WHEN (SELECT stop FROM batches WHERE id = released.batch_id) IS NULL THEN 'open' ELSE 'closed' END
FROM unnest(:batch_id::text[], :n::integer[], :epoch::integer[]) AS released (batch_id, n, epoch)
WHERE shards.batch_id = released.batch_id AND shards.n = released.n AND shards.epoch = released.epoch
    AND shards.state = 'leased'
RETURNING shards.project_id, shards.model, shards.expires_at, shards.batch_id, shards.n, shards.state;

-- name: expired_leases
-- Only the database's clock tells that a worker is dead, and who asks is not. After a break of half a lease in which
-- nobody asked, as the database was gone, everybody has the time of a whole lease to renew.
WITH lapsed AS (
    SELECT min(lease) AS lease FROM shards
    WHERE owner IS NOT NULL AND state = 'leased' AND lease_until < clock_timestamp()
), watched AS (
    UPDATE watch SET seen = clock_timestamp(),
        since = CASE WHEN seen < clock_timestamp() - lapsed.lease / 2 THEN clock_timestamp() ELSE since END
    FROM lapsed WHERE id = 1
    RETURNING since
)
SELECT batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, epoch, strikes
FROM shards CROSS JOIN watched
WHERE owner IS NOT NULL AND state = 'leased' AND lease_until < clock_timestamp()
    AND owner NOT IN (SELECT json_array_elements_text(:live_owners::json))
    AND watched.since < clock_timestamp() - lease
ORDER BY batch_id, n LIMIT :limit FOR NO KEY UPDATE OF shards SKIP LOCKED;

-- name: reopen_shard
-- A new epoch, so that a holder who comes back is fenced off.
UPDATE shards SET state = :state, epoch = epoch + 1, strikes = :strikes, settled = :settled, owner = NULL,
    lease_until = NULL, lease = NULL
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND state = 'leased';

-- name: next_shard_n
SELECT max(n) + 1 AS n FROM shards WHERE batch_id = :batch_id;

-- name: batches_past_window
SELECT id AS batch_id FROM batches
WHERE status = 'in_progress' AND stop IS NULL AND NOT drained AND expires_at <= :at
ORDER BY expires_at LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED;

-- name: stop_expired
UPDATE batches SET stop = 'expired' WHERE id = :batch_id AND status = 'in_progress' AND stop IS NULL;

-- name: finalizable_batch
-- A batch with nothing left to run that nobody is putting together.
SELECT id, status, stop, epoch, work_key FROM batches
WHERE drained AND status IN ('in_progress', 'finalizing', 'cancelling')
    AND (owner IS NULL OR lease_until < clock_timestamp())
ORDER BY expires_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;

-- name: lease_finalizable
UPDATE batches SET epoch = epoch + 1, owner = :owner,
    lease_until = clock_timestamp() + make_interval(secs => :lease),
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
SET status = :status::text, completed = :completed, failed = :failed, input_tokens = :input_tokens,
    cached_tokens = :cached_tokens, output_tokens = :output_tokens, reasoning_tokens = :reasoning_tokens,
    output_file_id = :output_file_id, error_file_id = :error_file_id, owner = NULL, lease_until = NULL,
    completed_at = CASE WHEN :status::text = 'completed' THEN :at::bigint END,
    cancelled_at = CASE WHEN :status::text = 'cancelled' THEN :at::bigint END,
    expired_at = CASE WHEN :status::text = 'expired' THEN :at::bigint END
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
WHERE id = ANY(:batch_id::text[]) AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: probe
UPDATE probe SET at = clock_timestamp() WHERE id = 1;

-- name: lock_fleet
-- Shares are handed out one after the other.
SELECT pg_advisory_xact_lock(1651794792, 2);

-- name: upsert_process
INSERT INTO processes (owner, lease_until, report, reserved)
VALUES (:owner, clock_timestamp() + make_interval(secs => :lease), :report, :reserved)
ON CONFLICT (owner) DO UPDATE
SET lease_until = excluded.lease_until, report = excluded.report, reserved = excluded.reserved;

-- name: processes
-- Those that are alive.
SELECT owner, report, reserved FROM processes WHERE lease_until >= clock_timestamp() ORDER BY owner;

-- name: delete_expired_processes
DELETE FROM processes WHERE lease_until < clock_timestamp();

-- name: delete_process
DELETE FROM processes WHERE owner = :owner;

-- name: count_queued_lines
-- What no worker holds.
SELECT coalesce(sum(lines), 0)::bigint AS lines FROM shards WHERE state = 'open';

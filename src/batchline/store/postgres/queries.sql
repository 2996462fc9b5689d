-- name: key_owner
-- Finds the owner of a key that is neither revoked nor expired, if the key belongs to the named project.
SELECT keys.id AS key_id, keys.scopes, projects.id AS project_id, projects.organization_id, projects.daily_budget,
    organizations.balance + organizations.credits AS funds
FROM keys JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE keys.digest = :digest AND keys.revoked_at IS NULL AND (keys.expires_at IS NULL OR keys.expires_at > unix_time())
    AND (:project_id::text IS NULL OR projects.id = :project_id::text);

-- name: insert_session
-- Opens a session of a key that is neither revoked nor expired.
INSERT INTO sessions (digest, key_id, key_digest, expires_at)
SELECT :digest::bytea, keys.id, keys.digest, :expires_at::bigint FROM keys
WHERE keys.id = :key_id AND keys.revoked_at IS NULL AND (keys.expires_at IS NULL OR keys.expires_at > unix_time());

-- name: session
-- Finds a session that has not expired, with its key, unless that was revoked, has expired or got a new secret.
SELECT keys.id AS key_id, keys.scopes, projects.id AS project_id, projects.organization_id,
    organizations.balance + organizations.credits AS funds, keys.name AS key_name, keys.hint AS key_hint,
    projects.name AS project, organizations.name AS organization, sessions.expires_at
FROM sessions JOIN keys ON keys.digest = sessions.key_digest AND keys.id = sessions.key_id
    JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE sessions.digest = :digest AND sessions.expires_at > unix_time() AND keys.revoked_at IS NULL
    AND (keys.expires_at IS NULL OR keys.expires_at > unix_time());

-- name: delete_session
-- Ends a session.
DELETE FROM sessions WHERE digest = :digest;

-- name: delete_expired_sessions
-- Deletes the sessions that have expired.
DELETE FROM sessions WHERE expires_at <= unix_time();

-- name: insert_admin_session
-- Opens a session of the administrator.
INSERT INTO admin_sessions (digest, expires_at) VALUES (:digest, :expires_at);

-- name: admin_session
-- Finds a session of the administrator that has not expired, with the key of the open project if that is valid.
SELECT keys.id AS key_id, keys.scopes, projects.id AS project_id, projects.organization_id,
    organizations.balance + organizations.credits AS funds, keys.name AS key_name, keys.hint AS key_hint,
    projects.name AS project, organizations.name AS organization, admin_sessions.expires_at
FROM admin_sessions LEFT JOIN keys ON keys.id = admin_sessions.key_id AND keys.revoked_at IS NULL
        AND (keys.expires_at IS NULL OR keys.expires_at > unix_time())
    LEFT JOIN projects ON projects.id = keys.project_id
    LEFT JOIN organizations ON organizations.id = projects.organization_id
WHERE admin_sessions.digest = :digest AND admin_sessions.expires_at > unix_time();

-- name: open_in_admin_session
-- Sets the key of the project that the administrator has open.
UPDATE admin_sessions SET key_id = :key_id::text WHERE digest = :digest;

-- name: delete_admin_session
-- Ends a session of the administrator.
DELETE FROM admin_sessions WHERE digest = :digest;

-- name: delete_expired_admin_sessions
-- Deletes the sessions of the administrator that have expired.
DELETE FROM admin_sessions WHERE expires_at <= unix_time();

-- name: insert_organization
-- Creates an organization unless one has that name.
INSERT INTO organizations (id, name, created_at) VALUES (:organization_id, :name, :at) ON CONFLICT (name) DO NOTHING;

-- name: organization_by_name
-- Finds an organization by its name.
SELECT id FROM organizations WHERE name = :name;

-- name: organizations
-- Lists every organization, oldest first.
SELECT id, name, created_at, balance, credits FROM organizations WHERE deleted_at IS NULL ORDER BY created_at, id;

-- name: insert_project
-- Creates a project unless one in the organization has that name.
INSERT INTO projects (id, organization_id, name, created_at)
VALUES (:project_id, :organization_id, :name, :at) ON CONFLICT (organization_id, name) DO NOTHING;

-- name: project_by_name
-- Finds a project of an organization by its name.
SELECT id FROM projects WHERE organization_id = :organization_id AND name = :name;

-- name: projects
-- Lists every project, oldest first.
SELECT projects.id, projects.name, projects.organization_id, organizations.name AS organization, projects.created_at,
    projects.daily_budget
FROM projects JOIN organizations ON organizations.id = projects.organization_id
WHERE projects.deleted_at IS NULL ORDER BY projects.created_at, projects.id;

-- name: lock_project
-- Locks a project until the end of the transaction, so that no other transaction appends to its files or batches.
SELECT id, deleted_at FROM projects WHERE id = :project_id FOR NO KEY UPDATE;

-- name: insert_key
-- Creates a key.
INSERT INTO keys (id, project_id, digest, hint, name, scopes, created_at, expires_at)
VALUES (:key_id, :project_id, :digest, :hint, :name, :scopes, :at, :expires_at);

-- name: keys
-- Lists every key, oldest first.
SELECT keys.id, keys.project_id, projects.name AS project, projects.organization_id,
    organizations.name AS organization, keys.hint, keys.name, keys.scopes, keys.created_at, keys.expires_at,
    keys.last_used_at, keys.revoked_at
FROM keys JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE keys.deleted_at IS NULL ORDER BY keys.created_at, keys.id;

-- name: valid_key
-- Finds a key that is neither revoked nor expired.
SELECT id FROM keys WHERE id = :key_id AND keys.revoked_at IS NULL AND (keys.expires_at IS NULL OR keys.expires_at > unix_time());

-- name: revoke_key
-- Revokes a key, once.
UPDATE keys SET revoked_at = :at WHERE id = :key_id AND revoked_at IS NULL;

-- name: rotate_key
-- Gives a key a new secret.
UPDATE keys SET digest = :digest, hint = :hint WHERE id = :key_id AND revoked_at IS NULL;

-- name: rename_key
-- Gives a key another name.
UPDATE keys SET name = :name WHERE id = :key_id;

-- name: change_key
-- Changes the name, scopes and end of a key that is not revoked and is still as it was read.
UPDATE keys SET name = :name::text, scopes = :scopes::text, expires_at = :expires_at::bigint
WHERE id = :key_id AND revoked_at IS NULL AND name = :former_name::text AND scopes = :former_scopes::text
    AND coalesce(expires_at, 0) = :former_expires_at::bigint;

-- name: rename_project
-- Gives a project another name, unless another project of its organization has that name.
UPDATE projects SET name = :name WHERE id = :project_id AND NOT EXISTS (
    SELECT 1 FROM projects AS other
    WHERE other.organization_id = projects.organization_id AND other.name = :name AND other.id <> projects.id);

-- name: rename_organization
-- Gives an organization another name, unless another one has that name.
UPDATE organizations SET name = :name WHERE id = :organization_id AND NOT EXISTS (
    SELECT 1 FROM organizations AS other WHERE other.name = :name AND other.id <> organizations.id);

-- name: open_batches_of_project
-- Lists batches of a project that have not ended, oldest first; those of one key if it is named.
SELECT id FROM batches WHERE project_id = :project_id AND (:key_id::text IS NULL OR key_id = :key_id::text)
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
ORDER BY created_at, seq LIMIT :limit;

-- name: project_of_key
-- Finds the project of a key.
SELECT project_id FROM keys WHERE id = :key_id;

-- name: delete_key
-- Deletes a key, with the hash of its secret. It counts as revoked.
UPDATE keys SET deleted_at = :at, revoked_at = coalesce(revoked_at, :at), digest = convert_to(id, 'UTF8')
WHERE id = :key_id AND deleted_at IS NULL;

-- name: delete_keys_of_project
-- Deletes the keys of a project, with the hashes of their secrets.
UPDATE keys SET deleted_at = :at, revoked_at = coalesce(revoked_at, :at), digest = convert_to(id, 'UTF8')
WHERE project_id = :project_id AND deleted_at IS NULL;

-- name: expire_files_of_project
-- Lets the files of a project expire now, so that the next pass deletes them and their objects.
UPDATE files SET expires_at = created_at WHERE project_id = :project_id AND state = 'stored';

-- name: abandon_uploads_of_project
-- Ends the uploads to a project that are under way.
UPDATE files SET state = 'abandoned', removed_at = :at WHERE project_id = :project_id AND state = 'uploading';

-- name: delete_deliveries_of_project
-- Deletes all deliveries to the webhooks of a project.
DELETE FROM deliveries WHERE webhook_id IN (SELECT id FROM webhooks WHERE project_id = :project_id);

-- name: delete_webhooks_of_project
-- Deletes the webhooks of a project.
DELETE FROM webhooks WHERE project_id = :project_id;

-- name: delete_project
-- Deletes a project. Its name is free again.
UPDATE projects SET deleted_at = :at, name = name || ' (deleted ' || id || ')'
WHERE id = :project_id AND deleted_at IS NULL;

-- name: discard_project
-- Removes a project that this transaction has created.
DELETE FROM projects WHERE id = :project_id;

-- name: projects_of_organization
-- Lists the projects of an organization, oldest first.
SELECT name FROM projects WHERE organization_id = :organization_id AND deleted_at IS NULL ORDER BY created_at, id;

-- name: delete_organization
-- Deletes an organization. Its name is free again.
UPDATE organizations SET deleted_at = :at, name = name || ' (deleted ' || id || ')'
WHERE id = :organization_id AND deleted_at IS NULL;

-- name: set_daily_budget
-- Sets what a project may spend in a day; NULL leaves it to the settings file.
UPDATE projects SET daily_budget = :daily_budget WHERE id = :project_id AND deleted_at IS NULL;

-- name: touch_key
-- Records when a key was last used; an earlier time than the recorded one is ignored.
UPDATE keys SET last_used_at = used.at
FROM unnest(:key_id::text[], :at::bigint[]) AS used (key_id, at)
WHERE keys.id = used.key_id AND coalesce(keys.last_used_at, 0) < used.at;

-- name: set_free_credits
-- Sets the credits that new organizations start with.
UPDATE metering SET free_credits = :free_credits WHERE id = 1;

-- name: free_credits
-- Reads the credits that new organizations start with. The row is locked, so that an organization is created entirely
-- before or entirely after metering starts.
SELECT free_credits FROM metering WHERE id = 1 FOR SHARE;

-- name: unfunded_organizations
-- Lists the organizations that never had money; they get the free credits when metering starts.
SELECT id FROM organizations WHERE NOT funded AND deleted_at IS NULL ORDER BY id;

-- name: organization
-- Reads an organization.
SELECT id, name, created_at, balance, credits FROM organizations WHERE id = :organization_id;

-- name: lock_organization
-- Reads an organization and locks it until the end of the transaction.
SELECT id, name, created_at, balance, credits, deleted_at FROM organizations
WHERE id = :organization_id FOR NO KEY UPDATE;

-- name: add_funds
-- Adds money or takes it; the organization counts as funded from then on.
UPDATE organizations SET balance = balance + :balance, credits = credits + :credits, funded = TRUE
WHERE id = :organization_id;

-- name: book_grant
-- Writes a ledger entry for money that was set or given.
INSERT INTO ledger (organization_id, kind, at, balance, credits)
VALUES (:organization_id, 'grant', :at, :balance, :credits);

-- name: book_usage
-- Adds usage to the ledger entry of its key, batch, model and hour.
INSERT INTO ledger
    (organization_id, kind, at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
     output_tokens, reasoning_tokens, reused, saved)
SELECT organization_id, 'usage', at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
    output_tokens, reasoning_tokens, reused, saved
FROM unnest(
    :organization_id::text[], :at::bigint[], :balance::bigint[], :credits::bigint[], :key_id::text[],
    :batch_id::text[], :model::text[], :requests::bigint[], :input_tokens::bigint[], :cached_tokens::bigint[],
    :output_tokens::bigint[], :reasoning_tokens::bigint[], :reused::bigint[], :saved::bigint[]
) AS used (
    organization_id, at, balance, credits, key_id, batch_id, model, requests, input_tokens, cached_tokens,
    output_tokens, reasoning_tokens, reused, saved
)
ON CONFLICT (key_id, batch_id, hashtextextended(model, 0), at) WHERE kind = 'usage' DO UPDATE SET
    balance = ledger.balance + excluded.balance, credits = ledger.credits + excluded.credits,
    requests = ledger.requests + excluded.requests, input_tokens = ledger.input_tokens + excluded.input_tokens,
    cached_tokens = ledger.cached_tokens + excluded.cached_tokens,
    output_tokens = ledger.output_tokens + excluded.output_tokens,
    reasoning_tokens = ledger.reasoning_tokens + excluded.reasoning_tokens,
    reused = ledger.reused + excluded.reused, saved = ledger.saved + excluded.saved;

-- name: entries
-- Lists an organization's ledger entries, oldest first.
SELECT ledger.at, ledger.kind, ledger.balance, ledger.credits, projects.name AS project, ledger.model,
    nullif(ledger.batch_id, '') AS batch_id, ledger.requests
FROM ledger LEFT JOIN keys ON keys.id = ledger.key_id LEFT JOIN projects ON projects.id = keys.project_id
WHERE ledger.organization_id = :organization_id ORDER BY ledger.at, ledger.id;

-- name: usage
-- Lists usage by hour, project, model and batch, oldest first.
SELECT organizations.name AS organization, projects.name AS project, projects.id AS project_id, ledger.model,
    nullif(ledger.batch_id, '') AS batch_id, ledger.at AS since, ledger.requests, ledger.input_tokens,
    ledger.cached_tokens, ledger.output_tokens, ledger.reasoning_tokens, -(ledger.balance + ledger.credits) AS cost,
    ledger.reused, ledger.saved
FROM ledger JOIN keys ON keys.id = ledger.key_id JOIN projects ON projects.id = keys.project_id
    JOIN organizations ON organizations.id = ledger.organization_id
WHERE ledger.kind = 'usage' AND ledger.at >= :since AND ledger.at < :until
    AND (:project_id::text IS NULL OR projects.id = :project_id::text)
ORDER BY ledger.at, ledger.id;

-- name: account_of_batch
-- Finds the key and the organization that pay for a batch.
SELECT batches.key_id, projects.organization_id
FROM batches JOIN projects ON projects.id = batches.project_id
WHERE batches.id = :batch_id;

-- name: insert_upload
-- Creates the row of an upload before the first byte of its object is written.
INSERT INTO files
    (id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, state, owner, lease_until,
     lease)
VALUES
    (:id, :project_id, :filename, :purpose, :bytes, :created_at, :expires_at, :is_error, :object_key, 'uploading',
     :owner, clock_timestamp() + make_interval(secs => :lease), make_interval(secs => :lease));

-- name: renew_upload
-- Renews the lease on an upload.
UPDATE files SET lease_until = clock_timestamp() + make_interval(secs => :lease)
WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: finish_upload
-- Makes an upload visible as the last file of its project.
UPDATE files
SET state = 'stored', seq = nextval('file_seq'), filename = :filename, bytes = :bytes, created_at = :created_at,
    expires_at = :expires_at, owner = NULL, lease_until = NULL, lease = NULL
WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: abandon_upload
-- Marks an upload as abandoned by its own process.
UPDATE files SET state = 'abandoned' WHERE id = :id AND state = 'uploading' AND owner = :owner;

-- name: insert_result
-- Creates a file that the finalizer wrote; it is visible at once.
INSERT INTO files
    (id, seq, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum, state)
VALUES
    (:id, nextval('file_seq'), :project_id, :filename, :purpose, :bytes, :created_at, :expires_at, :is_error,
     :object_key, :checksum, 'stored');

-- name: file
-- Reads a file that is stored and not expired.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum
FROM files
WHERE id = :id AND project_id = :project_id AND state = 'stored' AND expires_at > :at;

-- name: stored_bytes
-- Adds up the files of a project.
SELECT coalesce(sum(bytes), 0) AS bytes FROM files WHERE project_id = :project_id AND state = 'stored';

-- name: stored_bytes_of_organization
-- Adds up the files of all projects of an organization.
SELECT coalesce(sum((SELECT sum(bytes) FROM files WHERE project_id = projects.id AND state = 'stored')), 0) AS bytes
FROM projects WHERE organization_id = :organization_id;

-- name: file_seq
-- Finds the position of a file in its project's order, even if the file was deleted or expired.
SELECT seq FROM files WHERE id = :id AND project_id = :project_id AND seq IS NOT NULL;

-- name: files_newest_first
-- Lists a page of files, newest first.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at
    AND seq < :after
ORDER BY seq DESC LIMIT :limit;

-- name: files_of_purpose_newest_first
-- Lists a page of files with one purpose, newest first.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at AND purpose = :purpose AND seq < :after
ORDER BY seq DESC LIMIT :limit;

-- name: files_oldest_first
-- Lists a page of files, oldest first.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at
    AND seq > :after
ORDER BY seq LIMIT :limit;

-- name: files_of_purpose_oldest_first
-- Lists a page of files with one purpose, oldest first.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum
FROM files
WHERE project_id = :project_id AND state = 'stored' AND expires_at > :at AND purpose = :purpose AND seq > :after
ORDER BY seq LIMIT :limit;

-- name: delete_file
-- Marks a file as deleted.
UPDATE files SET state = 'deleted', removed_at = unix_time()
WHERE id = :id AND project_id = :project_id AND state = 'stored' AND expires_at > :at
RETURNING id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum;

-- name: expire_files
-- Marks files past their expiry as expired, by the database's clock, and returns the keys of their objects.
UPDATE files SET state = 'expired', removed_at = unix_time()
WHERE id IN (
    SELECT id FROM files WHERE state = 'stored' AND expires_at <= unix_time()
    ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
)
RETURNING object_key;

-- name: abandon_dead_uploads
-- Marks uploads of dead processes as abandoned. Only the database's clock decides that a lease has ended.
UPDATE files SET state = 'abandoned', removed_at = unix_time()
WHERE state = 'uploading' AND lease_ended(lease_until, lease)
RETURNING object_key;

-- name: referenced_keys
-- Finds those object keys that an upload under way, a stored file or an index refers to.
SELECT object_key FROM files WHERE object_key = ANY(:object_key::text[]) AND state IN ('uploading', 'stored')
UNION ALL SELECT object_key FROM reuse_indexes WHERE object_key = ANY(:object_key::text[]);

-- name: known_keys
-- Finds those object keys that a row names, also if its file was removed.
SELECT object_key FROM files WHERE object_key = ANY(:object_key::text[]);

-- name: insert_batch
-- Creates a batch that is being validated.
INSERT INTO batches
    (id, project_id, key_id, endpoint, input_file_id, metadata, status, created_at, expires_at, epoch, owner,
     lease_until, lease, digest, idempotency_key, parent_batch_id, hold, output_lifetime,
     max_cost, reuse)
VALUES
    (:id, :project_id, :key_id, :endpoint, :input_file_id, :metadata, 'validating', :created_at, :expires_at, :epoch,
     :owner, clock_timestamp() + make_interval(secs => :lease), make_interval(secs => :lease), :digest,
     :idempotency_key, :parent_batch_id, :hold, :output_lifetime,
     :max_cost, :reuse);

-- name: create_by_idempotency_key
-- Finds the create that a project made with an idempotency key.
SELECT id AS batch_id, digest, answer_status, answer_body, created_at
FROM batches
WHERE project_id = :project_id AND hashtextextended(idempotency_key, 0) = hashtextextended(:idempotency_key, 0)
    AND idempotency_key = :idempotency_key;

-- name: clear_idempotency_key
-- Frees an idempotency key that is too old to count, so that a new batch can use it.
UPDATE batches SET idempotency_key = NULL
WHERE project_id = :project_id AND hashtextextended(idempotency_key, 0) = hashtextextended(:idempotency_key, 0)
    AND idempotency_key = :idempotency_key;

-- name: newest_create
-- Finds the newest create of a key with the same digest.
SELECT id AS batch_id, digest, answer_status, answer_body, answered
FROM batches WHERE key_id = :key_id AND digest = :digest AND created_at >= :since
ORDER BY seq DESC LIMIT 1;

-- name: create_record
-- Reads the create of a batch and its answer.
SELECT id AS batch_id, digest, answer_status, answer_body FROM batches WHERE id = :batch_id;

-- name: mark_answered
-- Records that the answer to a create was fully sent.
UPDATE batches SET answered = TRUE WHERE id = :batch_id;

-- name: store_answer
-- Stores the answer to a create, to be sent again byte for byte.
UPDATE batches SET answer_status = :status, answer_body = :body WHERE id = :batch_id;

-- name: renew_batch
-- Renews the lease on a batch that is being validated or finalized.
UPDATE batches SET lease_until = clock_timestamp() + make_interval(secs => :lease)
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner
    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: start_batch
-- Moves a batch from validating to in_progress, if its epoch is still the current one.
UPDATE batches SET status = 'in_progress', in_progress_at = greatest(:at, created_at), total = :total, model = :model,
    work_key = :work_key, sent_as = :sent_as, owner = NULL, lease_until = NULL, lease = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: insert_shard
-- Creates shards.
INSERT INTO shards
    (batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, strikes, checksum, state)
SELECT * FROM unnest(
    :batch_id::text[], :n::integer[], :project_id::text[], :offset::bigint[], :length::bigint[], :lines::integer[],
    :model::text[], :expires_at::bigint[], :settled::bytea[], :strikes::integer[], :checksum::bigint[],
    :state::text[]
);

-- name: fail_batch
-- Moves a batch from validating to failed, if its epoch is still the current one.
UPDATE batches SET status = 'failed', failed_at = greatest(:at, created_at), errors = :errors, owner = NULL,
    lease_until = NULL, lease = NULL
WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: drop_batch
-- Deletes a batch that is being validated.
DELETE FROM batches WHERE id = :batch_id AND epoch = :epoch AND status = 'validating';

-- name: interrupted_batches
-- Finds batches whose validating process died.
SELECT id AS batch_id, epoch FROM batches
WHERE status = 'validating' AND lease_ended(lease_until, lease)
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED;

-- name: batch
-- Reads a batch.
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch,
    parent_batch_id, hold, held_at, output_lifetime, max_cost, reuse
FROM batches WHERE id = :id AND (:project_id::text IS NULL OR project_id = :project_id::text);

-- name: lock_batch
-- Locks batches until the end of the transaction, in the order of their ids, and reads what their shards depend on.
SELECT id, stop, hold, coalesce(hold = 'held' AND status = 'in_progress' AND stop IS NULL, FALSE) AS held
FROM batches WHERE id = ANY (:batch_id::text[]) ORDER BY id FOR NO KEY UPDATE;

-- name: live_counts
-- Sums the counts of a batch's shards. A terminal batch has its own counts, which do not change any more.
SELECT coalesce(sum(completed), 0)::bigint AS completed, coalesce(sum(failed), 0)::bigint AS failed,
    coalesce(sum(input_tokens), 0)::bigint AS input_tokens, coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
    coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(reasoning_tokens), 0)::bigint AS reasoning_tokens
FROM shards WHERE batch_id = :batch_id;

-- name: batch_position
-- Finds the position of a batch in its project's order.
SELECT created_at, seq FROM batches WHERE id = :id AND project_id = :project_id;

-- name: batches
-- Lists a page of batches, newest first.
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch,
    hold, held_at, output_lifetime, max_cost, reuse
FROM batches
WHERE project_id = :project_id AND created_at > :created_after
    AND (created_at, seq) < (:before_created_at::bigint, :before_seq::bigint)
ORDER BY created_at DESC, seq DESC LIMIT :limit;

-- name: batches_of_status
-- Lists a page of batches with one status, newest first.
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch,
    hold, held_at, output_lifetime, max_cost, reuse
FROM batches
WHERE project_id = :project_id AND status = :status AND created_at > :created_after
    AND (created_at, seq) < (:before_created_at::bigint, :before_seq::bigint)
ORDER BY created_at DESC, seq DESC LIMIT :limit;

-- name: open_batches
-- Lists batches of all projects that have not ended, oldest first. The index has the projects first, so it is searched
-- for each.
SELECT b.id, b.project_id, b.key_id, b.endpoint, b.input_file_id, b.metadata, b.status, b.stop, b.errors,
    b.output_file_id, b.error_file_id, b.created_at, b.expires_at, b.in_progress_at, b.finalizing_at,
    b.completed_at, b.failed_at, b.expired_at, b.cancelling_at, b.cancelled_at, b.total, b.completed, b.failed,
    b.input_tokens, b.cached_tokens, b.output_tokens, b.reasoning_tokens, b.model, b.epoch, b.hold, b.held_at,
    b.output_lifetime, b.max_cost, b.reuse
FROM projects AS p CROSS JOIN batches AS b
WHERE b.project_id = p.id AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
ORDER BY b.created_at, b.seq LIMIT :limit;

-- name: search_batches
-- Lists a page of batches that name a model, are held, or have a text in their id or metadata, newest first.
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch,
    hold, held_at, output_lifetime
FROM batches
WHERE project_id = :project_id AND created_at > :created_after
    AND (created_at, seq) < (:before_created_at::bigint, :before_seq::bigint)
    AND (:status::text IS NULL OR status = :status::text
        OR :status::text = 'held' AND hold = 'held' AND status = 'in_progress' AND stop IS NULL)
    AND (:model::text IS NULL OR model = :model::text)
    AND (:text::text IS NULL OR position(lower(:text::text) IN lower(id)) > 0
        OR position(lower(encode(convert_to(:text::text, 'UTF8'), 'escape')) IN lower(encode(metadata, 'escape'))) > 0)
ORDER BY created_at DESC, seq DESC LIMIT :limit;

-- name: cancel_validating
-- Cancels a batch before any line ran. It is terminal at once, and its new epoch fences the validating process off.
UPDATE batches SET status = 'cancelled', stop = 'cancelled', cancelling_at = greatest(:at, created_at),
    cancelled_at = greatest(:at, created_at), epoch = epoch + 1, owner = NULL, lease_until = NULL, lease = NULL
WHERE id = :id AND status = 'validating';

-- name: cancel_running
-- Stops a batch that has shards; its lines in flight may still be recorded.
UPDATE batches SET status = 'cancelling', stop = coalesce(stop, 'cancelled'),
    cancelling_at = greatest(:at, in_progress_at, finalizing_at)
WHERE id = :id AND status IN ('in_progress', 'finalizing');

-- name: close_open_shards
-- Closes the shards of a batch that no worker holds. If ``follows``, those stay whose lines may still take an answer of
-- the same batch.
UPDATE shards SET state = 'closed' WHERE batch_id = :batch_id
    AND (state IN ('open', 'withheld') OR state = 'following' AND NOT (
        :follows::boolean AND (SELECT reuse = 'follow' FROM batches WHERE id = :batch_id)
    ));

-- name: hold_counts
-- Reads what decides whether a batch is held: its lines, those that are recorded, and whether any could run now.
SELECT batches.total, batches.hold,
    (SELECT coalesce(sum(completed + failed), 0)::bigint FROM shards WHERE batch_id = :batch_id) AS recorded,
    EXISTS (SELECT 1 FROM shards WHERE batch_id = :batch_id AND state IN ('open', 'leased')) AS running
FROM batches WHERE id = :batch_id AND status = 'in_progress' AND stop IS NULL;

-- name: set_hold
-- Sets whether a batch is held, and since when, by the database's clock.
UPDATE batches SET hold = :hold::text,
    held_at = CASE WHEN :hold::text = 'held' THEN greatest(unix_time(), in_progress_at) ELSE held_at END
WHERE id = :batch_id;

-- name: release_hold
-- Ends the hold of a batch for good.
UPDATE batches SET hold = 'off' WHERE id = :batch_id AND hold = 'held' AND status = 'in_progress' AND stop IS NULL;

-- name: withhold_open_shards
-- Lets no worker claim the open shards of a batch.
UPDATE shards SET state = 'withheld' WHERE batch_id = :batch_id AND state = 'open';

-- name: withheld_shards
-- Lists the shards of a batch that no worker may claim.
SELECT project_id, model, expires_at, batch_id, n FROM shards WHERE batch_id = :batch_id AND state = 'withheld';

-- name: open_withheld_shards
-- Lets workers claim the shards of a batch again.
UPDATE shards SET state = 'open' WHERE batch_id = :batch_id AND state = 'withheld';

-- name: mark_drained
-- Marks a batch as drained if no shard of it is open, leased or withheld. The caller holds the batch's lock, so the
-- transaction that ends the last shard sees that all others have ended. Shards with high numbers run last: looking at
-- them first mostly finds one that is not done at once.
UPDATE batches SET drained = TRUE
WHERE id = :batch_id AND NOT drained AND NOT EXISTS (
    SELECT 1 FROM (
        SELECT state FROM shards WHERE batch_id = :batch_id ORDER BY batch_id DESC, n DESC OFFSET 0
    ) AS last_first WHERE state IN ('open', 'leased', 'withheld')
);

-- name: lock_lanes
-- Locks the lanes of a project until the end of the transaction: no other transaction opens one of them meanwhile, and
-- none raises the floor above a lane that is being opened. It is one lock, however many models the project names.
SELECT pg_advisory_xact_lock_shared(1651794792, 1), pg_advisory_xact_lock(hashtextextended(:project_id, 0));

-- name: lane_start
-- Finds the virtual time at which a lane starts: that of the open lane with the least.
SELECT coalesce(
    (SELECT min(virtual_time) FROM lanes WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)),
    (SELECT last_value FROM lane_floor)
) AS virtual_time;

-- name: open_lane
-- Opens lanes for new open shards. A lane that was idle starts at the virtual time of the others: it is served equally
-- from now on, and gets nothing extra for the time before.
WITH opening AS (
    SELECT * FROM unnest(
        :project_id::text[], :model::text[], :virtual_time::bigint[], :expires_at::bigint[], :batch_id::text[],
        :n::integer[]
    ) AS first (project_id, model, virtual_time, expires_at, batch_id, n)
), opened AS (
    UPDATE lanes SET open = TRUE,
        virtual_time = CASE
            WHEN open THEN lanes.virtual_time ELSE greatest(lanes.virtual_time, opening.virtual_time)
        END,
        (next_expires_at, next_batch_id, next_n) = (
            SELECT expires_at, batch_id, n FROM (
                SELECT next_expires_at, next_batch_id, next_n WHERE open
                UNION ALL SELECT opening.expires_at, opening.batch_id, opening.n
            ) AS known (expires_at, batch_id, n) ORDER BY expires_at, batch_id, n LIMIT 1
        )
    FROM opening
    WHERE lanes.project_id = opening.project_id
        AND hashtextextended(lanes.model, 0) = hashtextextended(opening.model, 0) AND lanes.model = opening.model
    RETURNING lanes.project_id, lanes.model
)
INSERT INTO lanes (project_id, model, virtual_time, next_expires_at, next_batch_id, next_n, open)
SELECT project_id, model, virtual_time, expires_at, batch_id, n, TRUE
FROM opening WHERE (project_id, model) NOT IN (SELECT project_id, model FROM opened);

-- name: claimable_lanes
-- Locks lanes with open shards that no other claim has locked, the one with the least virtual time first. A claim that
-- may raise the floor is the only one that may, until its transaction ends.
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
-- Waits for the first of the lanes that other claims have locked.
SELECT 1 FROM lanes
WHERE open AND virtual_time >= (SELECT last_value FROM lane_floor)
    AND NOT EXISTS (
        SELECT 1 FROM json_to_recordset(:without::json) AS left_out (model text, project_id text)
        WHERE coalesce(left_out.model, lanes.model) = lanes.model
            AND coalesce(left_out.project_id, lanes.project_id) = lanes.project_id
    )
ORDER BY virtual_time LIMIT 1 FOR NO KEY UPDATE;

-- name: claimable_shards
-- Lists the open shards of lanes, the earliest deadline first.
SELECT shard.*
FROM unnest(
    :project_id::text[], :model::text[], :next_expires_at::bigint[], :next_batch_id::text[], :next_n::integer[],
    :limit::bigint[], :offset::bigint[]
) AS lane (project_id, model, next_expires_at, next_batch_id, next_n, most, skipped)
CROSS JOIN LATERAL (
    SELECT project_id, expires_at, batch_id, n, "offset", length, lines, model, settled, epoch, strikes, checksum
    FROM shards
    WHERE state = 'open' AND owner IS NULL AND project_id = lane.project_id
        AND hashtextextended(model, 0) = hashtextextended(lane.model, 0) AND model = lane.model
        AND (expires_at, batch_id, n) >= (lane.next_expires_at, lane.next_batch_id, lane.next_n)
    ORDER BY expires_at, batch_id, n LIMIT lane.most OFFSET lane.skipped
) AS shard;

-- name: advance_lane
-- Adds the lines that a claim took to the virtual time of lanes, and stores the next shard of each. The floor becomes
-- the least virtual time that open lanes had before this statement, because no open lane was below it.
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
-- Deletes the closed lanes of a batch's project; one that is opened again starts where the others are.
DELETE FROM lanes WHERE project_id = (SELECT project_id FROM batches WHERE id = :batch_id) AND NOT open;

-- name: lease_shard
-- Leases open shards under new epochs, except those that changed since they were read.
UPDATE shards SET state = 'leased', epoch = shards.epoch + 1, owner = free.owner,
    lease_until = clock_timestamp() + make_interval(secs => free.lease), lease = make_interval(secs => free.lease)
FROM unnest(:batch_id::text[], :n::integer[], :epoch::integer[], :owner::text[], :lease::double precision[])
    AS free (batch_id, n, epoch, owner, lease)
WHERE shards.batch_id = free.batch_id AND shards.n = free.n AND shards.state = 'open' AND shards.epoch = free.epoch
RETURNING shards.batch_id, shards.n, shards.epoch;

-- name: leased_batch
-- Reads what a worker needs to know about batches.
SELECT batches.id, batches.project_id, projects.organization_id, batches.endpoint, batches.expires_at,
    batches.work_key, keys.revoked_at IS NOT NULL AS key_revoked,
    projects.daily_budget, organizations.balance + organizations.credits AS funds,
    CASE WHEN batches.max_cost IS NOT NULL THEN batches.max_cost + (
        SELECT coalesce(sum(balance + credits), 0)::bigint FROM ledger
        WHERE key_id = batches.key_id AND batch_id = batches.id AND kind = 'usage'
    ) END AS cost_left
FROM batches JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
WHERE batches.id = ANY (:batch_id::text[]);

-- name: renew_shards
-- Renews every lease on shards that an owner still holds. The rows are locked in the order in which records lock them.
WITH held AS (
    SELECT batch_id, n FROM shards WHERE state = 'leased' AND owner = :owner ORDER BY batch_id, n FOR NO KEY UPDATE
)
UPDATE shards SET lease_until = clock_timestamp() + make_interval(secs => :lease)
FROM held WHERE shards.batch_id = held.batch_id AND shards.n = held.n
RETURNING shards.batch_id, shards.n, shards.epoch;

-- name: signals
-- Reads the stops, the holds, the revocations and the funds of batches.
SELECT batches.id AS batch_id, batches.stop, keys.revoked_at IS NOT NULL AS key_revoked,
    coalesce(batches.hold = 'held' AND batches.status = 'in_progress', FALSE) AS held,
    projects.daily_budget, organizations.balance + organizations.credits AS funds,
    CASE WHEN batches.max_cost IS NOT NULL THEN batches.max_cost + (
        SELECT coalesce(sum(balance + credits), 0)::bigint FROM ledger
        WHERE key_id = batches.key_id AND batch_id = batches.id AND kind = 'usage'
    ) END AS cost_left
FROM unnest(:batch_id::text[]) WITH ORDINALITY AS asked (batch_id, place) JOIN batches ON batches.id = asked.batch_id
    JOIN keys ON keys.id = batches.key_id JOIN projects ON projects.id = batches.project_id
    JOIN organizations ON organizations.id = projects.organization_id
ORDER BY asked.place;

-- name: advance_shard
-- Records the progress of shards. The fence: only the holder of the current epoch changes a shard, and only if its
-- bitmap is what the holder saw last. A database that went back to an earlier state may give the same epoch to another
-- owner, or have lost what this one recorded. The rows are locked in the order in which renewals lock them. The owner is
-- compared so that no index on it can be used: a snapshot that stays open fills that index with dead versions, and the
-- planner takes it for nearly empty.
WITH held AS (
    SELECT shards.batch_id, shards.n
    FROM shards JOIN unnest(:batch_id::text[], :n::integer[]) AS wanted (batch_id, n)
        ON shards.batch_id = wanted.batch_id AND shards.n = wanted.n
    ORDER BY shards.batch_id, shards.n FOR NO KEY UPDATE OF shards
)
UPDATE shards SET settled = moved.settled, completed = shards.completed + moved.completed,
    failed = shards.failed + moved.failed, input_tokens = shards.input_tokens + moved.input_tokens,
    cached_tokens = shards.cached_tokens + moved.cached_tokens,
    output_tokens = shards.output_tokens + moved.output_tokens,
    reasoning_tokens = shards.reasoning_tokens + moved.reasoning_tokens,
    state = CASE WHEN moved.done THEN 'done' ELSE 'leased' END, owner = CASE WHEN NOT moved.done THEN shards.owner END
FROM held JOIN unnest(
    :batch_id::text[], :n::integer[], :epoch::integer[], :settled::bytea[], :completed::integer[], :failed::integer[],
    :input_tokens::bigint[], :cached_tokens::bigint[], :output_tokens::bigint[], :reasoning_tokens::bigint[],
    :done::boolean[], :owner::text[], :former::bytea[]
) AS moved (
    batch_id, n, epoch, settled, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, done,
    owner, former
) ON held.batch_id = moved.batch_id AND held.n = moved.n
WHERE shards.batch_id = held.batch_id AND shards.n = held.n AND shards.epoch = moved.epoch
    AND shards.owner IS NOT DISTINCT FROM moved.owner AND shards.settled = moved.former AND shards.state = 'leased';

-- name: add_line_errors
-- Adds to the number of errors by code. The sample is that of the first line with the code.
INSERT INTO line_errors (batch_id, code, count, sample)
SELECT * FROM unnest(:batch_id::text[], :code::text[], :count::bigint[], :sample::bytea[])
ON CONFLICT (batch_id, code) DO UPDATE SET count = line_errors.count + excluded.count;

-- name: line_errors
-- Lists the errors of a batch by code, the most frequent first.
SELECT code, count, sample FROM line_errors WHERE batch_id = :batch_id ORDER BY count DESC, code;

-- name: add_sample
-- Adds lines to the sample of a moment, from which the rate of a batch is computed.
INSERT INTO samples (batch_id, at, lines) VALUES (:batch_id, :at, :lines)
ON CONFLICT (batch_id, at) DO UPDATE SET lines = samples.lines + excluded.lines;

-- name: delete_old_samples
-- Deletes the samples that are too old for the rate.
DELETE FROM samples WHERE batch_id = :batch_id AND at <= :until;

-- name: samples
-- Lists the samples of a batch, oldest first.
SELECT at, lines FROM samples WHERE batch_id = :batch_id ORDER BY at;

-- name: unfinished_models
-- Lists the models of a batch's shards that may still run.
SELECT DISTINCT model FROM shards
WHERE batch_id = :batch_id AND state IN ('open', 'leased', 'withheld', 'following') ORDER BY model;

-- name: insert_segment
-- Stores a segment of a batch that is locked, or the key of its object.
INSERT INTO segments (batch_id, output_bytes, error_bytes, object_key, data, lines, checksum, charges, layout)
VALUES (:batch_id, :output_bytes, :error_bytes, :object_key, :data, :lines, :checksum, :charges, :layout);

-- name: record_segment
-- Locks a batch, stores a segment of it, or the key of its object, and finds the key and the organization that pay. By
-- the lock, the next transaction that records sees everything that is recorded in this one. The segment gets its number
-- when the batch is locked, so one with a higher number becomes visible later: a reader that is past a number misses
-- none below it.
WITH account AS (
    SELECT batches.id AS batch_id, batches.key_id, projects.organization_id, batches.hold, batches.max_cost
    FROM batches JOIN projects ON projects.id = batches.project_id
    WHERE batches.id = :batch_id FOR NO KEY UPDATE OF batches
), recorded AS (
    INSERT INTO segments (batch_id, output_bytes, error_bytes, object_key, data, lines, checksum, charges, layout)
    SELECT batch_id, :output_bytes::bigint, :error_bytes::bigint, :object_key::text, :data::bytea, :lines::integer,
        :checksum::bigint, :charges::bytea, :layout::bytea
    FROM account
)
SELECT key_id, organization_id, hold, max_cost FROM account;

-- name: lock_shards
-- Locks leased shards until the end of the transaction, in the order in which renewals lock them.
SELECT shards.n
FROM shards JOIN unnest(:batch_id::text[], :n::integer[]) AS wanted (batch_id, n)
    ON shards.batch_id = wanted.batch_id AND shards.n = wanted.n
WHERE shards.state = 'leased' ORDER BY shards.batch_id, shards.n FOR NO KEY UPDATE OF shards;

-- name: release_shard
-- Gives up the leases on shards. A shard is open again, closed if its batch was stopped, or withheld if it is held.
-- The owner is compared as in advance_shard.
UPDATE shards SET owner = NULL, lease_until = NULL, lease = NULL,
    state = released.state
FROM unnest(:batch_id::text[], :n::integer[], :epoch::integer[], :owner::text[], :state::text[])
    AS released (batch_id, n, epoch, owner, state)
WHERE shards.batch_id = released.batch_id AND shards.n = released.n AND shards.epoch = released.epoch
    AND shards.owner IS NOT DISTINCT FROM released.owner AND shards.state = 'leased'
RETURNING shards.project_id, shards.model, shards.expires_at, shards.batch_id, shards.n, shards.state;

-- name: close_shard
-- Closes a leased shard whose lines cannot be read.
UPDATE shards SET owner = NULL, lease_until = NULL, lease = NULL, state = 'closed'
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND owner = :owner AND state = 'leased';

-- name: held_shards
-- Lists the shards of a batch that an owner has leased.
SELECT batch_id, n, "offset", length, lines, model, settled, epoch, strikes, checksum
FROM shards WHERE batch_id = :batch_id AND owner = :owner AND state = 'leased';

-- name: watch_leases
-- Notes that a process can use the database. If none did so for half of a lease that seems to have ended, the database
-- was down: then each owner gets a whole lease of time to renew, from now on. So it does if the last note is of a later
-- time: the clock was set back, and the start of the period may be as far ahead as the clock was. So may leases: one
-- that ends later than after twice its length ends after its length. A batch that waits to be finalized again has no
-- length; it waits for a minute at most. Rows that are locked are left to the next note, so nothing waits here.
WITH lapsed AS (
    SELECT min(lease) AS lease FROM (
        SELECT lease FROM shards WHERE owner IS NOT NULL AND state = 'leased' AND lease_until < clock_timestamp()
        UNION ALL
        SELECT lease FROM files WHERE state = 'uploading' AND lease_until < clock_timestamp()
        UNION ALL
        SELECT lease FROM batches WHERE status = 'validating' AND lease_until < clock_timestamp()
        UNION ALL
        SELECT lease FROM batches
        WHERE drained AND status IN ('in_progress', 'finalizing', 'cancelling') AND lease_until < clock_timestamp()
    ) AS leases
), shortened_shards AS (
    UPDATE shards SET lease_until = clock_timestamp() + lease
    WHERE (batch_id, n) IN (
        SELECT batch_id, n FROM shards
        WHERE owner IS NOT NULL AND state = 'leased' AND lease_until > clock_timestamp() + 2 * lease
        FOR NO KEY UPDATE SKIP LOCKED
    )
), shortened_files AS (
    UPDATE files SET lease_until = clock_timestamp() + lease
    WHERE id IN (
        SELECT id FROM files WHERE state = 'uploading' AND lease_until > clock_timestamp() + 2 * lease
        FOR NO KEY UPDATE SKIP LOCKED
    )
), shortened_validations AS (
    UPDATE batches SET lease_until = clock_timestamp() + lease
    WHERE id IN (
        SELECT id FROM batches WHERE status = 'validating' AND lease_until > clock_timestamp() + 2 * lease
        FOR NO KEY UPDATE SKIP LOCKED
    )
), shortened_finalizations AS (
    UPDATE batches SET lease_until = clock_timestamp() + coalesce(lease, interval '1 minute')
    WHERE id IN (
        SELECT id FROM batches
        WHERE drained AND status IN ('in_progress', 'finalizing', 'cancelling')
            AND lease_until > clock_timestamp() + 2 * coalesce(lease, interval '1 minute')
        FOR NO KEY UPDATE SKIP LOCKED
    )
), shortened_processes AS (
    UPDATE processes SET lease_until = clock_timestamp() + make_interval(secs => :lease)
    WHERE owner IN (
        SELECT owner FROM processes WHERE lease_until > clock_timestamp() + 2 * make_interval(secs => :lease)
        FOR NO KEY UPDATE SKIP LOCKED
    )
)
UPDATE watch SET seen = clock_timestamp(),
    since = CASE
        WHEN seen < clock_timestamp() - lapsed.lease / 2 OR seen > clock_timestamp() THEN clock_timestamp() ELSE since
    END
FROM lapsed WHERE id = 1;

-- name: expired_leases
-- Finds shards whose leases have ended, by the database's clock; the live owners are known to be alive anyway.
SELECT batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, epoch, strikes, checksum
FROM shards
WHERE owner IS NOT NULL AND state = 'leased' AND lease_ended(lease_until, lease)
    AND owner NOT IN (SELECT json_array_elements_text(:live_owners::json))
ORDER BY batch_id, n LIMIT :limit FOR NO KEY UPDATE OF shards SKIP LOCKED;

-- name: reopen_shard
-- Reopens or closes the shard of a dead process. Its new epoch fences that process off if it is still alive.
UPDATE shards SET state = :state, epoch = epoch + 1, strikes = :strikes, settled = :settled, owner = NULL,
    lease_until = NULL, lease = NULL
WHERE batch_id = :batch_id AND n = :n AND epoch = :epoch AND state = 'leased';

-- name: next_shard_n
-- Finds the next free shard number of a batch.
SELECT max(n) + 1 AS n FROM shards WHERE batch_id = :batch_id;

-- name: batches_past_window
-- Finds batches with lines to run that are past their completion window, by the database's clock.
SELECT id AS batch_id FROM batches
WHERE status IN ('in_progress', 'finalizing') AND stop IS NULL AND NOT drained AND expires_at <= unix_time()
ORDER BY expires_at LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED;

-- name: stop_expired
-- Stops a batch that is past its completion window.
UPDATE batches SET stop = 'expired' WHERE id = :batch_id AND status IN ('in_progress', 'finalizing') AND stop IS NULL;

-- name: finalizable_batch
-- Finds a batch with no line left to run that no process is finalizing. Those that never failed come first.
SELECT id, epoch, work_key, failures, repairs, reuse FROM batches
WHERE drained AND status IN ('in_progress', 'finalizing', 'cancelling')
    AND (owner IS NULL OR lease_ended(lease_until, lease))
ORDER BY failures, expires_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;

-- name: lease_finalizable
-- Leases a batch to finalize it, under a new epoch; moves it to finalizing unless it was cancelled or has expired.
UPDATE batches SET epoch = epoch + 1, owner = :owner,
    lease_until = clock_timestamp() + make_interval(secs => :lease), lease = make_interval(secs => :lease),
    finalizing_at = CASE
        WHEN :finalizes::boolean AND status = 'in_progress' AND coalesce(stop, 'failed') = 'failed' THEN greatest(:at, in_progress_at)
        ELSE finalizing_at
    END,
    status = CASE
        WHEN :finalizes::boolean AND status = 'in_progress' AND coalesce(stop, 'failed') = 'failed' THEN 'finalizing' ELSE status
    END
WHERE id = :id AND epoch = :epoch;

-- name: defer_finalize
-- Keeps the lease on a batch that could not be finalized for a while, so that it is tried again after that.
UPDATE batches SET lease_until = clock_timestamp() + make_interval(secs => :seconds), lease = NULL, failures = failures + 1
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner;

-- name: stop_failed
-- Stops a batch by hand. Its new epoch fences off a process that tries to finalize it.
UPDATE batches SET stop = coalesce(stop, 'failed'), epoch = epoch + 1, owner = NULL, lease_until = NULL,
    lease = NULL, failures = 0
WHERE id = :batch_id AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: repair_batch
-- Ends the lease on a batch that was repaired, under a new epoch. It is drained unless lines run again.
UPDATE batches SET drained = :drained, repairs = repairs + 1, epoch = epoch + 1, owner = NULL, lease_until = NULL,
    lease = NULL
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner
    AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: batch_shards
-- Lists all shards of a batch.
SELECT batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, epoch, strikes, checksum
FROM shards WHERE batch_id = :batch_id ORDER BY n;

-- name: repair_shard
-- Sets shards of a drained batch to what its readable segments hold.
UPDATE shards SET settled = repaired.settled, completed = repaired.completed, failed = repaired.failed,
    input_tokens = repaired.input_tokens, cached_tokens = repaired.cached_tokens, output_tokens = repaired.output_tokens,
    reasoning_tokens = repaired.reasoning_tokens, state = repaired.state, epoch = shards.epoch + 1, owner = NULL,
    lease_until = NULL, lease = NULL
FROM unnest(
    :batch_id::text[], :n::integer[], :settled::bytea[], :completed::integer[], :failed::integer[],
    :input_tokens::bigint[], :cached_tokens::bigint[], :output_tokens::bigint[], :reasoning_tokens::bigint[],
    :state::text[]
) AS repaired (
    batch_id, n, settled, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, state
)
WHERE shards.batch_id = repaired.batch_id AND shards.n = repaired.n AND shards.state NOT IN ('open', 'leased');

-- name: segment_charges
-- Reads what was charged for the lines of segments.
SELECT charges FROM segments
WHERE batch_id = ANY (:batch_id::text[]) AND id = ANY (:id::bigint[]) AND charges IS NOT NULL;

-- name: empty_segment
-- Removes the lines of segments. Those in the layout keep their place in the order of the results.
UPDATE segments SET output_bytes = 0, error_bytes = 0, object_key = NULL, data = NULL, lines = 0, checksum = NULL,
    charges = NULL, layout = emptied.layout
FROM unnest(:batch_id::text[], :id::bigint[], :layout::bytea[]) AS emptied (batch_id, id, layout)
WHERE segments.batch_id = emptied.batch_id AND segments.id = emptied.id;

-- name: emptied_layouts
-- Lists the layouts of a batch's segments that repairs emptied.
SELECT layout FROM segments
WHERE batch_id = :batch_id AND output_bytes + error_bytes = 0 AND layout IS NOT NULL ORDER BY id;

-- name: insert_order
-- Stores the order of the lines in a batch's result files, unless it is known.
INSERT INTO result_orders (batch_id, data) VALUES (:batch_id, :data) ON CONFLICT DO NOTHING;

-- name: result_order
-- Reads the order of the lines in a batch's result files.
SELECT data FROM result_orders WHERE batch_id = :batch_id;

-- name: delete_order
-- Deletes the order of result files that have expired or were deleted.
DELETE FROM result_orders WHERE batch_id = ANY (:batch_id::text[]);

-- name: lock_order
-- Locks the order of the lines in a batch's result files until the end of the transaction, and names the files. Of two
-- transactions that delete one of them each, the later one then sees that the other file is deleted.
SELECT output_file_id, error_file_id
FROM result_orders JOIN batches ON batches.id = result_orders.batch_id
WHERE result_orders.batch_id = :batch_id FOR UPDATE OF result_orders;

-- name: child_batches
-- Lists the batches that run the failed lines of batches again, oldest first.
SELECT id, seq FROM batches WHERE parent_batch_id = ANY (:batch_id::text[]) ORDER BY seq;

-- name: work_of_batch
-- Reads where the work file of a batch is, and how often damage of the batch was repaired.
SELECT work_key, repairs FROM batches WHERE id = :batch_id;

-- name: delete_line_errors
-- Deletes the errors of a batch by code, which are counted again.
DELETE FROM line_errors WHERE batch_id = :batch_id;

-- name: cost_of_batch
-- Sums what a batch was charged, and what it saved by lines that took an earlier answer.
SELECT coalesce(sum(reused), 0)::bigint AS reused, coalesce(sum(saved), 0)::bigint AS saved,
    -coalesce(sum(balance + credits), 0)::bigint AS cost
FROM ledger WHERE key_id = :key_id AND batch_id = :batch_id AND kind = 'usage';

-- name: cost_of_project
-- Sums what a project was charged since a time.
SELECT -coalesce(sum(ledger.balance + ledger.credits), 0)::bigint AS cost
FROM keys JOIN ledger ON ledger.key_id = keys.id
WHERE keys.project_id = :project_id AND ledger.kind = 'usage' AND ledger.at >= :since;

-- name: charged
-- Sums what was taken for a batch's lines of one model.
SELECT -coalesce(sum(balance), 0)::bigint AS balance, -coalesce(sum(credits), 0)::bigint AS credits
FROM ledger
WHERE key_id = :key_id AND batch_id = :batch_id AND hashtextextended(model, 0) = hashtextextended(:model, 0)
    AND model = :model AND kind = 'usage';

-- name: closed_shards
-- Lists the shards of a batch that were closed with lines that never ran.
SELECT batch_id, n, "offset", length, lines, model, settled, epoch, strikes, checksum
FROM shards WHERE batch_id = :batch_id AND state = 'closed' ORDER BY n;

-- name: segments
-- Lists a page of a batch's segments, in the order in which they were recorded.
SELECT id, output_bytes, error_bytes, object_key, data, lines, checksum, charges, layout
FROM segments WHERE batch_id = :batch_id AND id > :after ORDER BY id LIMIT :limit;

-- name: publish_batch
-- Makes a batch terminal, with its final counts and files, if this process still holds its lease.
UPDATE batches
SET status = :status::text, completed = :completed, failed = :failed, input_tokens = :input_tokens,
    cached_tokens = :cached_tokens, output_tokens = :output_tokens, reasoning_tokens = :reasoning_tokens,
    output_file_id = :output_file_id, error_file_id = :error_file_id, owner = NULL, lease_until = NULL, lease = NULL,
    completed_at = CASE WHEN :status::text = 'completed' THEN greatest(:at, finalizing_at) END,
    cancelled_at = CASE WHEN :status::text = 'cancelled' THEN greatest(:at, cancelling_at) END,
    expired_at = CASE WHEN :status::text = 'expired' THEN greatest(:at, in_progress_at) END
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner;

-- name: prunable_batches
-- Lists batches that ended long enough ago, by the database's clock, and whose work is still stored; the earliest end
-- first.
SELECT id AS batch_id FROM batches
WHERE work_key IS NOT NULL AND status IN ('completed', 'expired', 'cancelled')
    AND coalesce(completed_at, expired_at, cancelled_at) <= unix_time() - :retention::bigint
    AND id NOT IN (SELECT json_array_elements_text(:without::text::json))
ORDER BY coalesce(completed_at, expired_at, cancelled_at) LIMIT :limit;

-- name: delete_shards
-- Deletes the shards of a batch.
DELETE FROM shards WHERE batch_id = :batch_id;

-- name: delete_segments
-- Deletes the segments of a batch.
DELETE FROM segments WHERE batch_id = :batch_id;

-- name: delete_samples
-- Deletes the samples of a batch.
DELETE FROM samples WHERE batch_id = :batch_id;

-- name: clear_work_key
-- Records that the work file of a batch was deleted.
UPDATE batches SET work_key = NULL WHERE id = :batch_id;

-- name: known_batches
-- Finds those batches that have a row, whether each is active, and whether its work is stored.
SELECT id, status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AS active,
    work_key IS NOT NULL AS has_work
FROM batches WHERE id = ANY(:batch_id::text[]);

-- name: probe
-- Writes a row, to prove that the database accepts commits.
UPDATE probe SET at = clock_timestamp() WHERE id = 1;

-- name: lock_fleet
-- Locks the shares of the caps, which are computed for one process at a time.
SELECT pg_advisory_xact_lock(1651794792, 2);

-- name: upsert_process
-- Stores the report of a process and its reserved shares, for the length of its lease.
INSERT INTO processes (owner, lease_until, report, reserved)
VALUES (:owner, clock_timestamp() + make_interval(secs => :lease), :report, :reserved)
ON CONFLICT (owner) DO UPDATE
SET lease_until = excluded.lease_until, report = excluded.report, reserved = excluded.reserved;

-- name: processes
-- Lists the processes whose leases have not ended.
SELECT owner, report, reserved FROM processes WHERE lease_until >= clock_timestamp() ORDER BY owner;

-- name: delete_expired_processes
-- Deletes the processes whose leases have ended.
DELETE FROM processes WHERE lease_until < clock_timestamp();

-- name: delete_process
-- Deletes a process that leaves.
DELETE FROM processes WHERE owner = :owner;

-- name: count_queued_lines
-- Counts the lines in shards that no worker holds.
SELECT coalesce(sum(lines), 0)::bigint AS lines FROM shards WHERE state = 'open';

-- name: count_open_batches
-- Counts the batches that have not ended, by status. The index has the projects first, so it is searched for each.
SELECT count(*) FILTER (WHERE b.status = 'validating') AS validating,
    count(*) FILTER (WHERE b.status = 'in_progress') AS in_progress,
    count(*) FILTER (WHERE b.status = 'finalizing') AS finalizing,
    count(*) FILTER (WHERE b.status = 'cancelling') AS cancelling
FROM projects AS p CROSS JOIN batches AS b
WHERE b.project_id = p.id AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- name: oldest_and_nearest_batch
-- Reads the creation of the oldest batch with open shards, and the first end of a window of a batch with unfinished ones.
SELECT min(CASE WHEN EXISTS (
        SELECT 1 FROM shards WHERE batch_id = batches.id AND state IN ('open', 'leased') AND state = 'open'
    ) THEN created_at END) AS oldest_created_at, min(expires_at) AS nearest_expires_at
FROM batches WHERE status IN ('in_progress', 'finalizing') AND stop IS NULL AND NOT drained;

-- name: schema_version
-- Reads the version of the tables, which a newer program may have changed.
SELECT version FROM schema_version;

-- name: identity
-- Reads the ids of the database and of its objects.
SELECT database_id, objects_id FROM identity WHERE id = 1;

-- name: name_database
-- Stores the id of the database, unless there is one already.
UPDATE identity SET database_id = :database_id WHERE id = 1 AND database_id IS NULL;

-- name: bind_objects
-- Stores the id of the objects, unless there is one already.
UPDATE identity SET objects_id = :objects_id WHERE id = 1 AND objects_id IS NULL;

-- name: renew_identity
-- Replaces both ids.
UPDATE identity SET database_id = :database_id, objects_id = :objects_id WHERE id = 1;

-- name: needs_objects
-- Finds out whether a row refers to an object.
SELECT EXISTS (SELECT FROM files WHERE state = 'stored') OR EXISTS (
    SELECT FROM batches WHERE status = 'in_progress' AND stop IS NULL AND NOT drained
) OR EXISTS (
    SELECT FROM batches WHERE drained AND status IN ('in_progress', 'finalizing', 'cancelling')
) AS needed;

-- name: repeat_sighting
-- Records that objects without a row were seen again, and returns whether the first time was long enough ago, by the
-- database's clock. If the first time was written by a clock that was ahead, it counts as seen first now.
UPDATE sightings SET first_at = least(first_at, unix_time()), last_at = unix_time()
FROM unnest(:object_key::text[], :age::bigint[]) AS seen (object_key, age)
WHERE sightings.object_key = seen.object_key
RETURNING sightings.object_key, unix_time() - sightings.first_at >= seen.age AS due;

-- name: count_sightings
-- Counts the objects without a row that were seen.
SELECT count(*) AS count FROM sightings;

-- name: insert_sighting
-- Records that objects without a row were seen for the first time.
INSERT INTO sightings (object_key, first_at, last_at)
SELECT object_key, unix_time(), unix_time() FROM unnest(:object_key::text[]) AS seen (object_key)
ON CONFLICT DO NOTHING RETURNING object_key;

-- name: delete_sighting
-- Forgets objects that were deleted.
DELETE FROM sightings WHERE object_key = ANY(:object_key::text[]);

-- name: delete_old_sightings
-- Forgets objects that were not seen again for a long time.
DELETE FROM sightings WHERE last_at <= unix_time() - :age::bigint;

-- name: inspected_ids
-- Lists a page of the ids of all batches.
SELECT id FROM batches WHERE id > :after ORDER BY id LIMIT :limit;

-- name: inspected_batch
-- Reads everything about a batch that a check of it needs.
SELECT id, project_id, key_id, endpoint, input_file_id, metadata, status, stop, errors, output_file_id, error_file_id,
    created_at, expires_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
    cancelled_at, total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, model, epoch,
    hold, held_at, output_lifetime, max_cost, reuse, work_key, drained, owner, failures, repairs
FROM batches WHERE id = :batch_id;

-- name: inspected_shards
-- Lists all shards of a batch with their states and counts.
SELECT batch_id, n, "offset", length, lines, model, settled, epoch, strikes, checksum, state, owner, completed, failed,
    input_tokens, cached_tokens, output_tokens, reasoning_tokens
FROM shards WHERE batch_id = :batch_id ORDER BY n;

-- name: inspected_segments
-- Lists all segments of a batch, without their data.
SELECT id, output_bytes, error_bytes, object_key, lines, checksum FROM segments WHERE batch_id = :batch_id ORDER BY id;

-- name: unclaimable_shards
-- Lists the shards of a batch that should run but that no claim finds, because their lane is closed, does not exist or
-- begins behind them, or because they are withheld although the batch is not held.
SELECT project_id, model, expires_at, batch_id, n FROM shards
WHERE batch_id = :batch_id AND state = 'open' AND NOT EXISTS (
    SELECT 1 FROM lanes
    WHERE lanes.project_id = shards.project_id AND lanes.open
        AND hashtextextended(lanes.model, 0) = hashtextextended(shards.model, 0) AND lanes.model = shards.model
        AND (lanes.next_expires_at, lanes.next_batch_id, lanes.next_n) <= (shards.expires_at, shards.batch_id, shards.n)
) OR batch_id = :batch_id AND state = 'withheld' AND NOT EXISTS (
    SELECT 1 FROM batches WHERE id = :batch_id AND hold IN ('trial', 'held') AND status = 'in_progress'
);

-- name: open_stray_shards
-- Opens the shards that are withheld although their batch is not held.
UPDATE shards SET state = 'open' WHERE batch_id = :batch_id AND state = 'withheld' AND NOT EXISTS (
    SELECT 1 FROM batches WHERE id = :batch_id AND hold IN ('trial', 'held') AND status = 'in_progress'
);

-- name: booked_usage
-- Sums the usage in the ledger entries of a batch. Lines that took an earlier answer count as requests.
SELECT coalesce(sum(requests + reused), 0)::bigint AS requests, coalesce(sum(input_tokens), 0)::bigint AS input_tokens,
    coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens, coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(reasoning_tokens), 0)::bigint AS reasoning_tokens
FROM ledger WHERE key_id = :key_id AND batch_id = :batch_id AND kind = 'usage';

-- name: inspected_file
-- Reads files in any state.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum, state
FROM files WHERE id = ANY (:id::text[]);

-- name: inspected_files
-- Lists a page of all files in any state.
SELECT id, project_id, filename, purpose, bytes, created_at, expires_at, is_error, object_key, checksum, state
FROM files WHERE id > :after ORDER BY id LIMIT :limit;

-- name: named_results
-- Reads the ids of the result files of batches.
SELECT output_file_id, error_file_id FROM batches WHERE id = ANY (:batch_id::text[]);

-- name: organization_books
-- Reads the money of an organization, and the sums of its ledger entries.
SELECT id, name, balance, credits,
    (SELECT coalesce(sum(balance), 0)::bigint FROM ledger WHERE organization_id = :organization_id) AS booked_balance,
    (SELECT coalesce(sum(credits), 0)::bigint FROM ledger WHERE organization_id = :organization_id) AS booked_credits
FROM organizations WHERE id = :organization_id;

-- name: set_to_ledger
-- Sets the money of an organization to the sums of its ledger entries.
UPDATE organizations SET
    balance = (SELECT coalesce(sum(balance), 0)::bigint FROM ledger WHERE organization_id = :organization_id),
    credits = (SELECT coalesce(sum(credits), 0)::bigint FROM ledger WHERE organization_id = :organization_id)
WHERE id = :organization_id;

-- name: correct_drained
-- Sets whether an active batch is drained by the states of its shards.
UPDATE batches SET drained = NOT EXISTS (
    SELECT 1 FROM shards WHERE batch_id = :batch_id AND state IN ('open', 'leased', 'withheld')
)
WHERE id = :batch_id AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: close_ended_shards
-- Closes the shards of an ended batch that could still run.
UPDATE shards SET state = 'closed', epoch = epoch + 1, owner = NULL, lease_until = NULL, lease = NULL
WHERE batch_id = :batch_id AND state IN ('open', 'leased', 'withheld', 'following') AND EXISTS (
    SELECT 1 FROM batches WHERE id = :batch_id AND status IN ('completed', 'failed', 'expired', 'cancelled')
);

-- name: unsettle_shard
-- Closes shards and clears the bits of lines that have no result, unless they changed since they were read.
UPDATE shards SET state = 'closed', settled = lost.settled, epoch = shards.epoch + 1, owner = NULL, lease_until = NULL,
    lease = NULL
FROM unnest(:batch_id::text[], :n::integer[], :epoch::integer[], :former::bytea[], :settled::bytea[])
    AS lost (batch_id, n, epoch, former, settled)
WHERE shards.batch_id = lost.batch_id AND shards.n = lost.n AND shards.epoch = lost.epoch
    AND shards.settled = lost.former;

-- name: retry_finalize
-- Lets a batch that could not be finalized be tried again at once. Its new epoch fences off a process that tries now.
UPDATE batches SET failures = 0, repairs = 0, epoch = epoch + 1, owner = NULL, lease_until = NULL, lease = NULL
WHERE id = :batch_id AND failures > 0 AND status IN ('in_progress', 'finalizing', 'cancelling');

-- name: correct_counts
-- Sets the counts of an ended batch, unless they changed since they were read.
UPDATE batches SET completed = :completed::integer, failed = :failed::integer, input_tokens = :input_tokens,
    cached_tokens = :cached_tokens, output_tokens = :output_tokens, reasoning_tokens = :reasoning_tokens
WHERE id = :batch_id AND status IN ('completed', 'expired', 'cancelled')
    AND total = :completed::integer + :failed::integer
    AND output_file_id IS NOT DISTINCT FROM :output_file_id::text
    AND error_file_id IS NOT DISTINCT FROM :error_file_id::text;

-- name: correct_times
-- Moves the times of a batch that run backwards: none is earlier than those before it.
UPDATE batches SET in_progress_at = CASE WHEN in_progress_at IS NOT NULL THEN greatest(in_progress_at, created_at) END,
    finalizing_at = CASE WHEN finalizing_at IS NOT NULL THEN greatest(finalizing_at, created_at, in_progress_at) END,
    completed_at = CASE
        WHEN completed_at IS NOT NULL THEN greatest(completed_at, created_at, in_progress_at, finalizing_at)
    END,
    failed_at = CASE WHEN failed_at IS NOT NULL THEN greatest(failed_at, created_at) END,
    expired_at = CASE WHEN expired_at IS NOT NULL THEN greatest(expired_at, created_at, in_progress_at) END,
    cancelling_at = CASE WHEN cancelling_at IS NOT NULL THEN greatest(cancelling_at, created_at, in_progress_at) END,
    cancelled_at = CASE
        WHEN cancelled_at IS NOT NULL THEN greatest(cancelled_at, created_at, in_progress_at, cancelling_at)
    END
WHERE id = :batch_id;

-- name: insert_webhook
-- Creates a webhook.
INSERT INTO webhooks (id, project_id, url, events, secret, by_operator, created_at, disabled_at)
VALUES (:id, :project_id, :url, :events, :secret, :by_operator, :created_at, :disabled_at);

-- name: webhooks
-- Lists every webhook, oldest first.
SELECT id, project_id, url, events, secret, by_operator, created_at, disabled_at FROM webhooks ORDER BY created_at, id;

-- name: webhook
-- Reads a webhook.
SELECT id, project_id, url, events, secret, by_operator, created_at, disabled_at FROM webhooks WHERE id = :id;

-- name: rotate_webhook
-- Gives a webhook a new secret.
UPDATE webhooks SET secret = :secret WHERE id = :id;

-- name: disable_webhook
-- Sends no further events to a webhook.
UPDATE webhooks SET disabled_at = unix_time() WHERE id = :id AND disabled_at IS NULL;

-- name: delete_webhook
-- Deletes a webhook.
DELETE FROM webhooks WHERE id = :id;

-- name: delete_deliveries
-- Deletes all deliveries to a webhook.
DELETE FROM deliveries WHERE webhook_id = :webhook_id;

-- name: insert_deliveries
-- Writes the event of a batch that has ended, once for each webhook of its project that wants it.
INSERT INTO deliveries (webhook_id, event_id, type, batch_id, created_at, next_at)
SELECT webhooks.id, :event_id::text, :type::text, batches.id,
    coalesce(batches.completed_at, batches.failed_at, batches.expired_at, batches.cancelled_at), unix_time()
FROM batches JOIN webhooks ON webhooks.project_id = batches.project_id
WHERE batches.id = :batch_id AND webhooks.disabled_at IS NULL
    AND strpos(',' || webhooks.events || ',', ',' || :type::text || ',') > 0
ON CONFLICT DO NOTHING;

-- name: deliveries
-- Lists the last deliveries to a webhook, newest first.
SELECT id, webhook_id, event_id, type, batch_id, created_at, state, epoch, attempts, next_at, ended_at, status, detail
FROM deliveries WHERE webhook_id = :webhook_id ORDER BY id DESC LIMIT :limit;

-- name: due_deliveries
-- Finds the first due delivery to each webhook, up to a number for each project. ``in_flight`` names the project of each
-- webhook that is being called. The project that has the fewest of these comes first.
SELECT id FROM (
    SELECT id, next_at, row_number() OVER (PARTITION BY project_id ORDER BY next_at, id)
        + (SELECT count(*) FROM json_each_text(:in_flight::text::json) AS called WHERE called.value = project_id) AS place_in_project
    FROM (
        SELECT deliveries.id, deliveries.next_at, webhooks.project_id,
            row_number() OVER (PARTITION BY webhook_id ORDER BY next_at, deliveries.id) AS place
        FROM deliveries JOIN webhooks ON webhooks.id = deliveries.webhook_id
        WHERE deliveries.state = 'pending' AND deliveries.next_at <= unix_time() AND webhooks.disabled_at IS NULL
            AND deliveries.webhook_id NOT IN (SELECT key FROM json_each_text(:in_flight::text::json))
    ) AS firsts WHERE place = 1
) AS due WHERE place_in_project <= :per_project::bigint ORDER BY place_in_project, next_at, id LIMIT :limit;

-- name: claim_delivery
-- Begins an attempt, unless another process did so first. If this process dies, the next attempt is made after a while.
UPDATE deliveries SET epoch = epoch + 1, next_at = unix_time() + due.lease
FROM unnest(:id::bigint[], :lease::bigint[]) AS due (id, lease)
WHERE deliveries.id = due.id AND state = 'pending' AND next_at <= unix_time()
RETURNING deliveries.id, webhook_id, event_id, type, batch_id, created_at, state, epoch, attempts, next_at, ended_at, status, detail;

-- name: end_attempt
-- Stores what came of an attempt, unless a later one began meanwhile.
UPDATE deliveries SET state = :state::text, attempts = attempts + 1, next_at = unix_time() + :wait::bigint,
    ended_at = CASE WHEN :state::text <> 'pending' THEN unix_time() END, status = :status::integer,
    detail = :detail::text
WHERE id = :id AND epoch = :epoch AND state = 'pending';

-- name: resend_delivery
-- Lets an ended delivery of a webhook that is not disabled be tried again, from its first attempt on.
UPDATE deliveries SET state = 'pending', epoch = epoch + 1, attempts = 0, next_at = unix_time(), ended_at = NULL
WHERE id = :id AND webhook_id = :webhook_id AND state <> 'pending' AND EXISTS (
    SELECT 1 FROM webhooks WHERE webhooks.id = deliveries.webhook_id AND webhooks.disabled_at IS NULL
);

-- name: fail_deliveries
-- Gives up the deliveries to a webhook that was disabled.
UPDATE deliveries SET state = 'failed', ended_at = unix_time()
WHERE webhook_id = :webhook_id AND state = 'pending';

-- name: delete_old_deliveries
-- Deletes deliveries that ended long ago, and those whose webhook was deleted or disabled when they were written.
DELETE FROM deliveries WHERE (state <> 'pending' AND ended_at <= unix_time() - :age::bigint) OR (
    state = 'pending' AND NOT EXISTS (
        SELECT 1 FROM webhooks WHERE webhooks.id = deliveries.webhook_id AND webhooks.disabled_at IS NULL
    )
);

-- name: project_usage
-- Sums up the usage of a project by bucket of time and model, oldest first.
SELECT ledger.at - ledger.at % :bucket_seconds::bigint AS start, ledger.model,
    sum(CASE WHEN ledger.batch_id <> '' THEN ledger.requests ELSE 0 END)::bigint AS lines,
    sum(ledger.requests)::bigint AS requests, sum(ledger.input_tokens)::bigint AS input_tokens,
    sum(ledger.cached_tokens)::bigint AS cached_tokens, sum(ledger.output_tokens)::bigint AS output_tokens,
    sum(ledger.reasoning_tokens)::bigint AS reasoning_tokens, -sum(ledger.balance + ledger.credits)::bigint AS cost,
    sum(ledger.reused)::bigint AS reused, sum(ledger.saved)::bigint AS saved
FROM keys JOIN ledger ON ledger.key_id = keys.id
WHERE keys.project_id = :project_id AND ledger.kind = 'usage' AND ledger.at >= :since AND ledger.at < :until
    AND (:model::text IS NULL OR ledger.model = :model::text)
GROUP BY 1, 2 ORDER BY 1, 2 LIMIT :limit;

-- name: model_rates
-- Lists how long the last completed batches of a project took that have only lines of one model.
SELECT total AS lines, completed_at - in_progress_at AS seconds FROM batches
WHERE project_id = :project_id AND status = 'completed' AND created_at > :since AND model = :model
ORDER BY created_at DESC, seq DESC LIMIT :limit;

-- name: following_shards
-- Lists the shards of a batch whose lines wait for an answer that they can take.
SELECT batch_id, n, project_id, "offset", length, lines, model, expires_at, settled, epoch, strikes, checksum
FROM shards WHERE batch_id = :batch_id AND state = 'following' ORDER BY n;

-- name: reuse_sources
-- Lists batches whose answers a project may reuse, newest first, with their indexes. The coalesce keeps the
-- planner from the indexes of stored files, which it would walk through entirely: each file is found by its id.
SELECT batches.id AS batch_id, batches.endpoint, batches.total, batches.completed, batches.input_file_id,
    batches.work_key, batches.sent_as, files.id AS output_file_id, files.object_key AS output_key,
    files.bytes AS output_bytes, files.checksum AS output_checksum, reuse_indexes.size AS index_bytes,
    reuse_indexes.checksum AS index_checksum, reuse_indexes.object_key AS index_key, reuse_indexes.data AS index_data
FROM batches JOIN files ON files.id = batches.output_file_id AND coalesce(files.state, '') = 'stored'
    AND files.expires_at > :at
    LEFT JOIN reuse_indexes ON reuse_indexes.batch_id = batches.id
WHERE batches.project_id = :project_id AND batches.created_at >= :since AND batches.endpoint = :endpoint
    AND batches.status IN ('completed', 'expired', 'cancelled')
ORDER BY batches.created_at DESC, batches.seq DESC LIMIT :limit;

-- name: reusable_files
-- Finds those of the files that are stored and not expired, by the database's clock.
SELECT id FROM files WHERE id = ANY (:id::text[]) AND coalesce(state, '') = 'stored' AND expires_at > unix_time();

-- name: insert_index
-- Stores the index of a batch, or the key of its object, unless there is one or the output file was removed. The file is
-- locked, so a transaction that removes it meanwhile deletes the index.
INSERT INTO reuse_indexes (batch_id, lines, size, checksum, object_key, data)
SELECT batches.id, :lines::bigint, :size::bigint, :checksum::bigint, :object_key::text, :data::bytea
FROM batches JOIN files ON files.id = batches.output_file_id AND coalesce(files.state, '') = 'stored'
WHERE batches.id = :batch_id FOR SHARE OF files
ON CONFLICT DO NOTHING;

-- name: delete_index
-- Deletes the indexes of batches whose results have expired, or that cannot be read.
DELETE FROM reuse_indexes WHERE batch_id = ANY (:batch_id::text[]);

-- name: end_reuse_step
-- Ends the lease on a batch that reuses answers, under a new epoch. It is drained unless lines may run now.
UPDATE batches SET reuse = 'follow', drained = :drained, epoch = epoch + 1, owner = NULL, lease_until = NULL, lease = NULL
WHERE id = :batch_id AND epoch = :epoch AND owner = :owner;

-- name: divide_shard
-- Records lines of a shard that took an answer, and lets its others run.
UPDATE shards SET settled = divided.settled, completed = shards.completed + divided.completed, state = divided.state,
    epoch = shards.epoch + 1
FROM unnest(:batch_id::text[], :n::integer[], :settled::bytea[], :completed::integer[], :state::text[])
    AS divided (batch_id, n, settled, completed, state)
WHERE shards.batch_id = divided.batch_id AND shards.n = divided.n AND shards.state = 'following';

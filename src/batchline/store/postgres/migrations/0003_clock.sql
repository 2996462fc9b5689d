-- The time that decides, in Unix seconds. It is stable within a statement, so that an index can be searched with it.
CREATE FUNCTION unix_time() RETURNS bigint LANGUAGE sql STABLE
AS 'SELECT floor(extract(epoch FROM statement_timestamp()))::bigint';

-- The length of a lease, as shards have it. It is missing in rows of an older version and in those of a backup, whose
-- processes do not exist any more.
ALTER TABLE files ADD COLUMN lease interval;
ALTER TABLE batches ADD COLUMN lease interval;

-- Whether a lease has ended. If no process watched leases for half a lease, the database was down: nobody could renew
-- then, and each owner gets a whole lease of time to do so. The watch table says since when there was no such break.
CREATE FUNCTION lease_ended(lease_until timestamptz, lease interval) RETURNS boolean LANGUAGE sql VOLATILE
AS 'SELECT lease_until < clock_timestamp() AND (
        lease IS NULL OR EXISTS (
            SELECT FROM watch WHERE seen >= clock_timestamp() - lease / 2 AND since < clock_timestamp() - lease
        )
    )';

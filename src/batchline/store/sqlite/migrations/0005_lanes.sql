-- A lane is open while it may have open shards. A transaction that opens a shard also opens its lane, and a claim that
-- finds no open shard in a lane closes it. So neither a claim nor the end of a batch looks at the shards of other lanes.
ALTER TABLE lanes ADD COLUMN open INTEGER NOT NULL DEFAULT 1;
UPDATE lanes SET open = EXISTS (
    SELECT 1 FROM shards WHERE state = 'open' AND shards.project_id = lanes.project_id AND shards.model = lanes.model
);
CREATE INDEX lanes_next ON lanes (open, virtual_time, project_id, model);
CREATE INDEX lanes_idle ON lanes (project_id) WHERE open = 0;

-- Pages of lists: batches are in the order of their creation, by status or not; files in the order in which they became
-- visible, by purpose or not.
DROP INDEX batches_of_project;
CREATE INDEX batches_of_project ON batches (project_id, created_at, seq);
CREATE INDEX batches_by_status ON batches (project_id, status, created_at, seq);
CREATE INDEX files_by_purpose ON files (project_id, purpose, seq) WHERE state = 'stored';

-- lines and state: the queued lines are counted in the index alone.
DROP INDEX shards_open;
CREATE INDEX shards_open ON shards (project_id, model, expires_at, batch_id, n, lines, state) WHERE state = 'open';

-- The closed lanes of a project, which are deleted when a batch of it ends.
CREATE INDEX lanes_idle ON lanes (project_id) WHERE NOT open;

-- Pages of lists: batches are in the order of their creation, by status or not; files in the order in which they became
-- visible, by purpose or not.
DROP INDEX batches_of_project;
CREATE INDEX batches_of_project ON batches (project_id, created_at, seq);
CREATE INDEX batches_by_status ON batches (project_id, status, created_at, seq);
CREATE INDEX files_by_purpose ON files (project_id, purpose, seq) WHERE state = 'stored';

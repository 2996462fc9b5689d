-- deleted_at: when an operator deleted it. Its row stays, because batches and the ledger refer to it. daily_budget: the
-- nano-units that a project may spend in a day, or NULL if the settings file decides.
ALTER TABLE organizations ADD COLUMN deleted_at bigint;
ALTER TABLE projects ADD COLUMN deleted_at bigint;
ALTER TABLE projects ADD COLUMN daily_budget bigint;
ALTER TABLE keys ADD COLUMN deleted_at bigint;

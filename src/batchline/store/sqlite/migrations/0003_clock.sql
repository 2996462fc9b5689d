-- One row. seen: when the service last looked for ended leases of its own. since: the start of the period in which this
-- happened without a long break. During a break the database could not be used; leases could not be renewed then either.
CREATE TABLE watch (
    id INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    lease REAL NOT NULL,
    seen REAL NOT NULL,
    since REAL NOT NULL
);

-- Who is signed in to the console. digest: the hash of the secret in the cookie. key_digest: the hash of the key that the
-- session was opened with, as it was then: a key that is revoked, expires or gets a new secret ends its sessions.
CREATE TABLE sessions (
    digest BLOB PRIMARY KEY,
    key_id TEXT NOT NULL REFERENCES keys (id),
    key_digest BLOB NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX sessions_expired ON sessions (expires_at);

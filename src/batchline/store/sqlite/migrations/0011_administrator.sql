-- Who is signed in to the console as the administrator. digest: an HMAC of the secret in the cookie with the
-- administrator's token, so that a session ends when the token is changed. key_id: the key of the project that is open.
CREATE TABLE admin_sessions (
    digest BLOB PRIMARY KEY,
    key_id TEXT REFERENCES keys (id),
    expires_at INTEGER NOT NULL
);
CREATE INDEX admin_sessions_expired ON admin_sessions (expires_at);

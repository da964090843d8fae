-- API keys: of each its hash, never the key. A revoked key keeps its row, so that a service whose last key was revoked
-- stays closed. The tenant is not in the primary key: it is what a look-up finds out.

CREATE TABLE api_keys (
    key_id     TEXT NOT NULL PRIMARY KEY,
    tenant_id  TEXT NOT NULL,
    name       TEXT,
    scope      TEXT NOT NULL CHECK (scope IN ('read', 'write', 'admin')),
    hash       BLOB NOT NULL CHECK (length(hash) = 32),     -- SHA-256 of the whole key
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

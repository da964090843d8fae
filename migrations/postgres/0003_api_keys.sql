-- API keys: of each its hash, never the key. A revoked key keeps its row, so that a service whose last key was revoked
-- stays closed. The tenant is not in the primary key: it is what a look-up finds out.

CREATE TABLE api_keys (
    key_id     text COLLATE "C" PRIMARY KEY,
    tenant_id  text COLLATE "C" NOT NULL,
    name       text,
    scope      text NOT NULL CHECK (scope IN ('read', 'write', 'admin')),
    hash       bytea NOT NULL CHECK (octet_length(hash) = 32),     -- SHA-256 of the whole key
    created_at timestamptz NOT NULL,
    revoked_at timestamptz
);

-- Retention: sessions are erased a while after their last exchange.

-- The period of a tenant, in the row with an empty user_id, and of its users, in seconds; 0 = never. A value of a session is in
-- its row. The most specific value applies.
CREATE TABLE retention_rules (
    tenant_id TEXT NOT NULL,
    user_id   TEXT NOT NULL,
    seconds   INTEGER NOT NULL CHECK (seconds >= 0),
    PRIMARY KEY (tenant_id, user_id)
) STRICT, WITHOUT ROWID;

-- Imports and branches keep the time of their last exchange, but their period begins when they were created: `retained_from`.
-- Only branches have `branched_at`, which is the same time. A session with a value of its own is found by its last hour, which changes only when its activity_hour does.
ALTER TABLE sessions ADD COLUMN retention_seconds INTEGER CHECK (retention_seconds >= 0);
ALTER TABLE sessions ADD COLUMN retained_from INTEGER;
ALTER TABLE sessions ADD COLUMN branched_at INTEGER;
ALTER TABLE sessions ADD COLUMN own_expiry_hour INTEGER GENERATED ALWAYS AS
    (CASE WHEN retention_seconds > 0 THEN activity_hour + retention_seconds / 3600 END) VIRTUAL;
CREATE INDEX sessions_by_own_expiry ON sessions (tenant_id, own_expiry_hour) WHERE own_expiry_hour IS NOT NULL;
CREATE INDEX sessions_by_branch_age ON sessions (tenant_id, branched_at) WHERE branched_at IS NOT NULL;

-- All tenants that have, or had, a session.
CREATE TABLE tenants (
    tenant_id TEXT NOT NULL PRIMARY KEY
) STRICT, WITHOUT ROWID;
CREATE TRIGGER sessions_add_tenant AFTER INSERT ON sessions
WHEN NOT EXISTS (SELECT 1 FROM tenants WHERE tenant_id = NEW.tenant_id)
BEGIN
    INSERT INTO tenants (tenant_id) VALUES (NEW.tenant_id);
END;

-- Background work that one replica does at a time. A lease of a few seconds is renewed while the work runs.
CREATE TABLE worker_leases (
    worker      TEXT NOT NULL PRIMARY KEY,
    token       BLOB,
    lease_until INTEGER,
    finished_at INTEGER
) STRICT, WITHOUT ROWID;

INSERT INTO tenants (tenant_id) SELECT DISTINCT tenant_id FROM sessions;
UPDATE sessions SET retained_from = CAST(unixepoch('subsec') * 1000000 AS INTEGER),
    branched_at = CAST(unixepoch('subsec') * 1000000 AS INTEGER)
WHERE fork_kind = 'rewind';

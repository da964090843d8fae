-- Retention: sessions are erased a while after their last exchange.

-- The period of a tenant, in the row with an empty user_id, and of its users, in seconds; 0 = never. A value of a session is in
-- its row. The most specific value applies.
CREATE TABLE retention_rules (
    tenant_id text COLLATE "C" NOT NULL,
    user_id   text COLLATE "C" NOT NULL,
    seconds   bigint NOT NULL CHECK (seconds >= 0),
    PRIMARY KEY (tenant_id, user_id)
);
ALTER TABLE retention_rules ENABLE ROW LEVEL SECURITY;
ALTER TABLE retention_rules FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON retention_rules USING (tenant_id = precis_tenant());

-- Imports and branches keep the time of their last exchange, but their period begins when they were created: `retained_from`.
-- Only branches have `branched_at`, which is the same time. A session with a value of its own is found by its last hour, which changes only when its activity_hour does.
ALTER TABLE sessions
    ADD COLUMN retention_seconds bigint CHECK (retention_seconds >= 0),
    ADD COLUMN retained_from timestamptz,
    ADD COLUMN branched_at timestamptz,
    ADD COLUMN own_expiry_hour bigint GENERATED ALWAYS AS
        (CASE WHEN retention_seconds > 0 THEN activity_hour + retention_seconds / 3600 END) STORED;
CREATE INDEX sessions_by_own_expiry ON sessions (tenant_id, own_expiry_hour) WHERE own_expiry_hour IS NOT NULL;
CREATE INDEX sessions_by_branch_age ON sessions (tenant_id, branched_at) WHERE branched_at IS NOT NULL;

-- All tenants that have, or had, a session. The worker that erases sessions reads it before it names a tenant, so there is no
-- row-level security.
CREATE TABLE tenants (
    tenant_id text COLLATE "C" PRIMARY KEY
);
CREATE FUNCTION add_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tenants (tenant_id) VALUES (NEW.tenant_id) ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;
CREATE TRIGGER add_tenant AFTER INSERT ON sessions FOR EACH ROW EXECUTE FUNCTION add_tenant();

-- Background work that one replica does at a time. A lease of a few seconds is renewed while the work runs.
CREATE TABLE worker_leases (
    worker      text COLLATE "C" PRIMARY KEY,
    token       uuid,
    lease_until timestamptz,
    finished_at timestamptz
);

-- Without this, the owner of the table would see no rows: there is no tenant.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
INSERT INTO tenants (tenant_id) SELECT DISTINCT tenant_id FROM sessions;
UPDATE sessions SET retained_from = now(), branched_at = now() WHERE fork_kind = 'rewind';
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;

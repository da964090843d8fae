-- Indexes for statements that read more and more rows as a table grows.

-- The keys of a tenant.
CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id);

-- The expired keys of a session. Without it, each exchange with a key reads all keys of the session.
CREATE INDEX idempotency_keys_by_time ON idempotency_keys (tenant_id, session_id, created_at);

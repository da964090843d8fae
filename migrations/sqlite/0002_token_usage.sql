-- What a tenant's consolidations have spent, in tokens, by the day: what the daily limit is held against. A tenant's,
-- not a session's or a user's: their erasure leaves it, and it says nothing about them.

CREATE TABLE token_usage (
    tenant_id TEXT NOT NULL,
    day       INTEGER NOT NULL,     -- since 1970-01-01, in UTC
    tokens    INTEGER NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
) STRICT, WITHOUT ROWID;

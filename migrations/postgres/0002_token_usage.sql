-- What a tenant's consolidations have spent, in tokens, by the day: what the daily limit is held against. A tenant's,
-- not a session's or a user's: their erasure leaves it, and it says nothing about them.

CREATE TABLE token_usage (
    tenant_id text COLLATE "C" NOT NULL,
    day       bigint NOT NULL,      -- since 1970-01-01, in UTC
    tokens    bigint NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
);

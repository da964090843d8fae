-- For each migration from this one on, the last migration of the oldest release that works with the schema after it. So an older
-- release can tell if it may use the schema of a newer one. A migration without a row is compatible with no older release.
--
-- The previous release, whose last migration is 15, works with this schema, but its /readyz fails.
CREATE TABLE schema_compatibility (
    version        bigint PRIMARY KEY,
    oldest_version bigint NOT NULL CHECK (oldest_version <= version)
);
INSERT INTO schema_compatibility (version, oldest_version) VALUES (17, 15);

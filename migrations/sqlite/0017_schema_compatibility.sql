-- For each migration from this one on, the last migration of the oldest release that works with the schema after it. So an older
-- release can tell if it may use the schema of a newer one. A migration without a row is compatible with no older release.
CREATE TABLE schema_compatibility (
    version        INTEGER PRIMARY KEY,
    oldest_version INTEGER NOT NULL CHECK (oldest_version <= version)
);
INSERT INTO schema_compatibility (version, oldest_version) VALUES (17, 16);

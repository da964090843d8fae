-- Records of consolidation: one for each revision that a run commits, and one for each run that ends without a commit. Revisions of
-- earlier releases have none.
--
-- Records disappear with their session, and with the revisions that a rewind removes, also if the previous release does it.
CREATE TABLE consolidation_records (
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    number     INTEGER NOT NULL CHECK (number >= 1),
    revision   INTEGER,
    details    TEXT NOT NULL, -- JSON: `domain::consolidation_record::RecordDetails`
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE,
    FOREIGN KEY (tenant_id, session_id, revision) REFERENCES revisions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
-- For the removal of a revision, and of the oldest records without a revision.
CREATE INDEX consolidation_records_by_revision ON consolidation_records (tenant_id, session_id, revision, number);

INSERT INTO schema_compatibility (version, oldest_version) VALUES (19, 16);

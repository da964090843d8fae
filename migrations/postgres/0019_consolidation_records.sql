-- Records of consolidation: one for each revision that a run commits, and one for each run that ends without a commit. Revisions of
-- earlier releases, and those that replicas of the previous release commit during an upgrade, have none.
--
-- Records disappear with their session, and with the revisions that a rewind removes, also if the previous release does it.
CREATE TABLE consolidation_records (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    number     bigint NOT NULL CHECK (number >= 1),
    revision   bigint,
    details    text NOT NULL, -- JSON: `domain::consolidation_record::RecordDetails`
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE,
    CONSTRAINT consolidation_records_of_revision FOREIGN KEY (tenant_id, session_id, revision)
        REFERENCES revisions ON DELETE CASCADE
);
-- For the removal of a revision, and of the oldest records without a revision.
CREATE INDEX consolidation_records_by_revision ON consolidation_records (tenant_id, session_id, revision, number);
ALTER TABLE consolidation_records ENABLE ROW LEVEL SECURITY;
ALTER TABLE consolidation_records FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON consolidation_records USING (tenant_id = precis_tenant());

INSERT INTO schema_compatibility (version, oldest_version) VALUES (19, 15);

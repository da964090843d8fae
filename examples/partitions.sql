-- Divides the tables `messages` and `revisions` into 16 partitions by the hash of tenant and session, so that all rows of a
-- session are in one partition. Stop all replicas, and run this once as the role of precis:
--
--     psql --set ON_ERROR_STOP=1 --file examples/partitions.sql "$DATABASE_URL"
--
-- It copies both tables and needs their size on the disk in addition. The transaction keeps the old tables if it fails.
BEGIN;

ALTER TABLE consolidation_records DROP CONSTRAINT consolidation_records_of_revision;

DO $$
DECLARE
    name text;
    key text;
    reject_change text;
BEGIN
    FOR name, key, reject_change IN VALUES
        ('messages', 'seq', 'reject_history_change'), ('revisions', 'revision', 'reject_revision_change')
    LOOP
        EXECUTE format('ALTER TABLE %I RENAME TO %I', name, name || '_whole');
        EXECUTE format('ALTER TABLE %I RENAME CONSTRAINT %I TO %I', name || '_whole', name || '_pkey', name || '_whole_pkey');
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (tenant_id, session_id, %I))
            PARTITION BY HASH (tenant_id, session_id)', name, name || '_whole', key);
        FOR part IN 0..15 LOOP
            EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES WITH (MODULUS 16, REMAINDER %s)',
                name || '_' || part, name, part);
            -- A partition has no policies of its own, so it shows no rows unless it is read through its parent.
            EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name || '_' || part);
            EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name || '_' || part);
            EXECUTE format('CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON %I
                FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change()', name || '_' || part);
        END LOOP;
        EXECUTE format('ALTER TABLE %I NO FORCE ROW LEVEL SECURITY', name || '_whole');
        EXECUTE format('INSERT INTO %I SELECT * FROM %I', name, name || '_whole');
        EXECUTE format('DROP TABLE %I', name || '_whole');
        EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON %I
            FOR EACH ROW EXECUTE FUNCTION %I()', name, reject_change);
        EXECUTE format('CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON %I
            FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change()', name);
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant_isolation ON %I USING (tenant_id = precis_tenant())', name);
    END LOOP;
    CREATE TRIGGER remove_deleted_from_search AFTER DELETE ON messages
        REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION remove_from_search();
    CREATE TRIGGER remove_redacted_from_search AFTER UPDATE ON messages
        REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION remove_from_search();
END
$$;

ALTER TABLE revisions ADD FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE;
ALTER TABLE consolidation_records ADD CONSTRAINT consolidation_records_of_revision
    FOREIGN KEY (tenant_id, session_id, revision) REFERENCES revisions ON DELETE CASCADE;

COMMIT;

-- The prefix of the lexemes of each tenant in the search index. If it belongs to one tenant, a search need not read the row of each
-- entry that it finds to check its tenant.
CREATE TABLE search_tenants (
    tenant_id TEXT NOT NULL PRIMARY KEY,
    prefix    TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX search_tenants_by_prefix ON search_tenants (prefix);
INSERT INTO search_tenants (tenant_id, prefix)
SELECT tenant_id, substr(lexemes, 1, 6) FROM (
    SELECT tenant_id, (SELECT s.lexemes FROM search AS s WHERE s.tenant_id = t.tenant_id LIMIT 1) AS lexemes FROM tenants AS t
) WHERE lexemes IS NOT NULL;
CREATE TRIGGER search_add_tenant AFTER INSERT ON search
WHEN NOT EXISTS (SELECT 1 FROM search_tenants WHERE tenant_id = NEW.tenant_id)
BEGIN
    INSERT INTO search_tenants (tenant_id, prefix) VALUES (NEW.tenant_id, substr(NEW.lexemes, 1, 6));
END;

INSERT INTO schema_compatibility (version, oldest_version) VALUES (20, 16);

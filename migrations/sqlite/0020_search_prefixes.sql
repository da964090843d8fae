-- The prefix of the lexemes of each tenant in the search index. If it belongs to one tenant, a search need not read the row of each
-- entry that it finds to check its tenant. NULL if the tenant has no entries.
ALTER TABLE tenants ADD COLUMN search_prefix TEXT;
UPDATE tenants AS t SET search_prefix =
    (SELECT substr(s.lexemes, 1, 6) FROM search AS s WHERE s.tenant_id = t.tenant_id LIMIT 1);
CREATE INDEX tenants_by_search_prefix ON tenants (search_prefix);
CREATE TRIGGER search_record_prefix AFTER INSERT ON search
WHEN EXISTS (SELECT 1 FROM tenants WHERE tenant_id = NEW.tenant_id AND search_prefix IS NULL)
BEGIN
    UPDATE tenants SET search_prefix = substr(NEW.lexemes, 1, 6) WHERE tenant_id = NEW.tenant_id;
END;

INSERT INTO schema_compatibility (version, oldest_version) VALUES (20, 16);

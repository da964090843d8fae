-- The second wall between tenants. The first is the tenant in every statement; this one holds where a statement forgets
-- it: a transaction sees the rows of the tenant that it has named (the setting precis.tenant), and none where it has
-- named none. FORCE, because precis usually owns its tables, and an owner is exempt otherwise. Superusers and roles
-- with BYPASSRLS still are.
CREATE FUNCTION precis_tenant() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT current_setting('precis.tenant', true) $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['sessions', 'messages', 'revisions', 'idempotency_keys', 'memories',
        'memory_revisions', 'token_usage'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY of_tenant ON %I USING (tenant_id = precis_tenant())', name);
    END LOOP;
END
$$;

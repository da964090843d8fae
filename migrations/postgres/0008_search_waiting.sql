-- Messages that are stored and not in the index yet. Whoever stores an exchange leaves a row for it, which costs little, and the
-- service indexes many at a time, a second later; a search indexes those that it could find before it looks. Without
-- row-level security: they are indexed for all tenants at once.
CREATE TABLE search_waiting (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    first_seq  bigint NOT NULL,
    last_seq   bigint NOT NULL,
    bytes      bigint NOT NULL,   -- of JSON
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, first_seq)
);
-- Its rows come and go, and every search passes over those that have gone until they are cleaned away.
ALTER TABLE search_waiting SET
    (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- In this order: where messages of the session are being indexed, this waits for the end of that, and then sees them.
CREATE OR REPLACE FUNCTION forget_search() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM search_waiting WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    RETURN NULL;
END
$$;

-- The messages of these runs, of whatever tenants, each with the place of its run among them and with its session's user. It
-- looks at one tenant after the other, each behind its policy. A plan that was made when the tables were small is kept by the
-- connection: without the setting it might read them whole, run by run, when they have grown.
CREATE FUNCTION search_unindexed(tenants text[], sessions text[], firsts bigint[], lasts bigint[])
    RETURNS TABLE (place bigint, seq bigint, created_at timestamptz, user_id text, message text)
    LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT DISTINCT t.id FROM unnest(tenants) AS t (id) LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        RETURN QUERY
            SELECT w.place, m.seq, m.created_at, s.user_id, m.message
            FROM unnest(tenants, sessions, firsts, lasts)
                WITH ORDINALITY AS w (tenant_id, session_id, first_seq, last_seq, place)
                CROSS JOIN LATERAL (
                    SELECT s.user_id FROM sessions AS s
                    WHERE s.tenant_id = of_tenant AND s.session_id = w.session_id OFFSET 0
                ) AS s
                CROSS JOIN LATERAL (
                    SELECT m.seq, m.created_at, m.message FROM messages AS m
                    WHERE m.tenant_id = of_tenant AND m.session_id = w.session_id
                        AND m.seq >= w.first_seq AND m.seq <= w.last_seq OFFSET 0
                ) AS m
            WHERE w.tenant_id = of_tenant;
    END LOOP;
END
$$;

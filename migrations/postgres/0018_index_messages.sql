-- The index worker adds messages and marks sessions by one call each.

-- Adds the entries of sessions that were not changed since their messages were read, and records the progress of these sessions, if
-- the index has this analyzer. Ranges are those of `advance_index`. Entries are lists: number of the range from 0, `seq`, time and
-- lexemes. They are inserted in the given order, because a higher id means a later message. Returns the number of sessions.
CREATE FUNCTION index_messages(of_tenant text, analyzer text, ranges json, entries json) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    unchanged text[];
BEGIN
    -- Keeps others from recording another analyzer until the transaction ends.
    IF analyzer IS DISTINCT FROM (SELECT version FROM search_analyzer) THEN
        RETURN 0;
    END IF;
    unchanged := ARRAY(SELECT advance_index(of_tenant, ranges));
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT of_tenant, r.session_id, CAST(e.entry ->> 1 AS bigint), timestamptz 'epoch'
            + CAST(e.entry ->> 2 AS bigint) / 1000000 * interval '1 second'
            + CAST(e.entry ->> 2 AS bigint) % 1000000 * interval '1 microsecond',
        array_to_tsvector(string_to_array(e.entry ->> 3, ' '))
    FROM (
        SELECT place - 1 AS number, range ->> 1 AS session_id
        FROM json_array_elements(ranges) WITH ORDINALITY AS p (range, place)
    ) AS r
        JOIN json_array_elements(entries) WITH ORDINALITY AS e (entry, place) ON CAST(e.entry ->> 0 AS bigint) = r.number
    WHERE r.session_id = ANY (unchanged) ORDER BY e.place;
    RETURN cardinality(unchanged);
END
$$;

-- Marks the next sessions of a rebuild as missing: those of a tenant after a session. Does nothing if another replica has marked them.
CREATE FUNCTION mark_next_sessions(of_tenant text, after_session text, max_sessions bigint) RETURNS void
    LANGUAGE plpgsql AS $$
DECLARE
    last_session text;
    next_tenant text;
BEGIN
    PERFORM FROM search_analyzer WHERE rebuild_tenant = of_tenant AND rebuild_session = after_session FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM set_config('precis.tenant', of_tenant, true);
    last_session := mark_sessions(of_tenant, after_session, max_sessions);
    IF last_session IS NULL THEN
        SELECT min(tenant_id) INTO next_tenant FROM tenants WHERE tenant_id > of_tenant;
        UPDATE search_analyzer
        SET rebuild_tenant = next_tenant, rebuild_session = CASE WHEN next_tenant IS NOT NULL THEN '' END;
    ELSE
        UPDATE search_analyzer SET rebuild_session = last_session;
    END IF;
END
$$;

INSERT INTO schema_compatibility (version, oldest_version) VALUES (18, 15);

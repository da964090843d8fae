-- The search index consists of segments, which the service writes: see `domain::search::segment`. Postgres stores their pages.
--
-- An exchange adds one row to `search_recent` together with the other exchanges of its transaction, instead of a row for each message
-- and an entry of a GIN index for each of its words. All tables have row-level security. All messages are indexed again.
DROP TABLE search;
DROP TABLE search_times;
DROP FUNCTION record_search_times();
DROP FUNCTION newest_matches(text, text[], text, timestamptz, timestamptz, bigint);
DROP FUNCTION index_messages(text, text, json, json);
DROP FUNCTION flush_search_index();

-- Messages that were indexed together and are in no segment yet, each as an element of the lists. A higher id was indexed later.
-- Terms are separated by spaces.
CREATE TABLE search_recent (
    tenant_id text COLLATE "C" NOT NULL,
    id        bigint GENERATED ALWAYS AS IDENTITY,
    analyzer  text NOT NULL,
    messages  bigint NOT NULL,
    bytes     bigint NOT NULL,   -- size of the terms
    sessions  text[] NOT NULL,
    users     text[] NOT NULL,
    seqs      bigint[] NOT NULL,
    times     timestamptz[] NOT NULL,
    terms     text[] NOT NULL,
    PRIMARY KEY (tenant_id, id)
);
-- Rows are short-lived, and each search skips the dead ones until they are vacuumed. Compressing them takes longer than writing them.
ALTER TABLE search_recent SET
    (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE search_recent ALTER sessions SET STORAGE EXTERNAL, ALTER users SET STORAGE EXTERNAL, ALTER seqs SET STORAGE EXTERNAL,
    ALTER times SET STORAGE EXTERNAL, ALTER terms SET STORAGE EXTERNAL;

-- `position` is the first id of the rows of `search_recent` that the segment was made of. A segment never changes: another one with
-- another id replaces it.
CREATE TABLE search_segments (
    tenant_id text COLLATE "C" NOT NULL,
    id        bigint GENERATED ALWAYS AS IDENTITY,
    position  bigint NOT NULL,
    analyzer  text NOT NULL,
    messages  bigint NOT NULL,
    bytes     bigint NOT NULL,   -- size of the pages
    PRIMARY KEY (tenant_id, id)
);

-- The pages of segments. They are small enough to be stored in their row.
CREATE TABLE search_pages (
    tenant_id  text COLLATE "C" NOT NULL,
    segment_id bigint NOT NULL,
    first_key  bytea NOT NULL,
    page       bytea NOT NULL,
    PRIMARY KEY (tenant_id, segment_id, first_key)
);
ALTER TABLE search_pages ALTER page SET STORAGE EXTERNAL;

-- Messages that are to be removed from rows of `search_recent` up to `position`, and from segments up to this position. Later ones can
-- contain other messages of a session with the same id.
CREATE TABLE search_removals (
    tenant_id  text COLLATE "C" NOT NULL,
    id         bigint GENERATED ALWAYS AS IDENTITY,
    session_id text COLLATE "C" NOT NULL,
    first_seq  bigint NOT NULL,
    last_seq   bigint NOT NULL,
    position   bigint NOT NULL,
    PRIMARY KEY (tenant_id, id)
);

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['search_recent', 'search_segments', 'search_pages', 'search_removals'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant_isolation ON %I USING (tenant_id = precis_tenant())', name);
    END LOOP;
END
$$;

-- Removes messages of a session from the index. The caller has locked the session, so that the entries of its later messages get
-- higher ids.
CREATE FUNCTION remove_from_index(of_tenant text, of_session text, first_removed bigint, last_removed bigint) RETURNS void
    LANGUAGE sql SET enable_seqscan = off AS $$
    INSERT INTO search_removals (tenant_id, session_id, first_seq, last_seq, position)
    SELECT of_tenant, of_session, first_removed, last_removed, p.position FROM (
        SELECT greatest((SELECT max(id) FROM search_recent WHERE tenant_id = of_tenant),
            (SELECT max(position) FROM search_segments WHERE tenant_id = of_tenant)) AS position
    ) AS p WHERE p.position IS NOT NULL AND last_removed >= first_removed
$$;

DROP TRIGGER delete_search_rows ON sessions;
DROP FUNCTION delete_search_rows();
CREATE FUNCTION remove_session_from_index() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM remove_from_index(OLD.tenant_id, OLD.session_id, 1, OLD.last_seq);
    RETURN NULL;
END
$$;
CREATE TRIGGER remove_session_from_index AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION remove_session_from_index();

-- The function of migration 13, which also removes the entries without the user.
CREATE OR REPLACE FUNCTION index_session_user() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM remove_from_index(OLD.tenant_id, OLD.session_id, 1, OLD.last_seq);
    NEW.indexed_seq := 0;
    RETURN NEW;
END
$$;

-- Returns the tenants with messages that are not indexed, and those with removals or enough rows for a segment. It reads one tenant at a time, under the
-- policy of that tenant.
DROP FUNCTION unindexed_tenants();
CREATE FUNCTION unindexed_tenants() RETURNS TABLE (tenant_id text, sessions bigint, messages bigint)
    LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT t.tenant_id FROM tenants AS t LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        RETURN QUERY
            SELECT of_tenant, u.sessions, u.messages FROM (
                SELECT count(*) AS sessions, coalesce(sum(s.last_seq - s.indexed_seq), 0)::bigint AS messages
                FROM sessions AS s WHERE s.tenant_id = of_tenant AND s.indexed_seq IS NOT NULL
            ) AS u
            WHERE u.sessions > 0 OR EXISTS (SELECT FROM search_removals AS r WHERE r.tenant_id = of_tenant)
                OR (SELECT count(*) FROM (SELECT FROM search_recent AS r WHERE r.tenant_id = of_tenant LIMIT 32) AS many) = 32;
    END LOOP;
END
$$;

-- Returns true if no tenant has anything in the index.
CREATE FUNCTION is_search_index_empty() RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT t.tenant_id FROM tenants AS t LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        IF EXISTS (SELECT FROM search_recent WHERE tenant_id = of_tenant)
            OR EXISTS (SELECT FROM search_segments WHERE tenant_id = of_tenant) THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END
$$;

-- The function of migration 13. Entries of messages that are missing do not exist.
CREATE OR REPLACE FUNCTION advance_index(of_tenant text, ranges json) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    range json;
BEGIN
    FOR range IN SELECT * FROM json_array_elements(ranges) LOOP
        PERFORM FROM sessions
        WHERE tenant_id = of_tenant AND session_id = range ->> 1 AND incarnation = CAST(range ->> 2 AS uuid)
            AND indexed_seq = CAST(range ->> 3 AS bigint)
        FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE sessions SET indexed_seq = nullif(CAST(range ->> 4 AS bigint), last_seq)
            WHERE tenant_id = of_tenant AND session_id = range ->> 1;
            RETURN NEXT range ->> 1;
        END IF;
    END LOOP;
END
$$;

-- Adds the entries of sessions that were not changed since their messages were read, and records the progress of these sessions, if
-- the index has this analyzer. Ranges are those of `advance_index`. Entries are lists: number of the range from 0, user, `seq`, time and
-- terms. Returns the number of sessions.
CREATE FUNCTION index_messages(of_tenant text, new_analyzer text, ranges json, entries json) RETURNS bigint
    LANGUAGE plpgsql AS $$
DECLARE
    unchanged text[];
BEGIN
    -- Keeps others from recording another analyzer until the transaction ends.
    IF new_analyzer IS DISTINCT FROM (SELECT version FROM search_analyzer) THEN
        RETURN 0;
    END IF;
    unchanged := ARRAY(SELECT advance_index(of_tenant, ranges));
    INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, seqs, times, terms)
    SELECT of_tenant, new_analyzer, count(*), sum(octet_length(e.terms)), array_agg(e.session_id), array_agg(e.user_id), array_agg(e.seq), array_agg(e.created_at),
        array_agg(e.terms)
    FROM (
        SELECT r.session_id, e.entry ->> 1 AS user_id, CAST(e.entry ->> 2 AS bigint) AS seq, timestamptz 'epoch'
                + CAST(e.entry ->> 3 AS bigint) / 1000000 * interval '1 second'
                + CAST(e.entry ->> 3 AS bigint) % 1000000 * interval '1 microsecond' AS created_at,
            e.entry ->> 4 AS terms
        FROM (
            SELECT place - 1 AS number, range ->> 1 AS session_id
            FROM json_array_elements(ranges) WITH ORDINALITY AS p (range, place)
        ) AS r
            JOIN json_array_elements(entries) WITH ORDINALITY AS e (entry, place) ON CAST(e.entry ->> 0 AS bigint) = r.number
        WHERE r.session_id = ANY (unchanged) ORDER BY e.place
    ) AS e HAVING count(*) > 0;
    RETURN cardinality(unchanged);
END
$$;

-- The function of migration 18, except that it empties the index of each tenant after its sessions are marked. Until then, searches use
-- the entries of the earlier analyzer. Nothing is added to the index meanwhile.
CREATE OR REPLACE FUNCTION mark_next_sessions(of_tenant text, after_session text, max_sessions bigint) RETURNS void
    LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    last_session text;
    next_tenant text;
    replaced bigint[];
BEGIN
    PERFORM FROM search_analyzer WHERE rebuild_tenant = of_tenant AND rebuild_session = after_session FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM set_config('precis.tenant', of_tenant, true);
    last_session := mark_sessions(of_tenant, after_session, max_sessions);
    IF last_session IS NULL THEN
        -- Some at a time. The lock waits for a merge that replaces some of them, whose result follows in the next call.
        replaced := ARRAY(SELECT id FROM search_segments WHERE tenant_id = of_tenant ORDER BY id LIMIT 16 FOR UPDATE);
        DELETE FROM search_pages WHERE tenant_id = of_tenant AND segment_id = ANY (replaced);
        DELETE FROM search_segments WHERE tenant_id = of_tenant AND id = ANY (replaced);
        DELETE FROM search_recent WHERE tenant_id = of_tenant AND id = ANY (
            ARRAY(SELECT id FROM search_recent WHERE tenant_id = of_tenant ORDER BY id LIMIT 64)
        );
        IF FOUND OR cardinality(replaced) > 0 THEN
            RETURN;
        END IF;
        SELECT min(tenant_id) INTO next_tenant FROM tenants WHERE tenant_id > of_tenant;
        UPDATE search_analyzer
        SET rebuild_tenant = next_tenant, rebuild_session = CASE WHEN next_tenant IS NOT NULL THEN '' END;
    ELSE
        UPDATE search_analyzer SET rebuild_session = last_session;
    END IF;
END
$$;

-- The function `append_exchanges` of migration 13, except that it adds a row to `search_recent`: with the messages of sessions that are
-- completely indexed, if `message_terms` has the terms of all messages, by the analyzer of the index, and the index is not being rebuilt.
CREATE FUNCTION store_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    group_defaults text[], group_bytes bigint[],
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[], message_times timestamptz[],
    message_terms text[],
    key_groups bigint[], key_sessions text[], key_texts text[], key_fingerprints bytea[], key_firsts bigint[],
    key_lasts bigint[],
    analyzer text, lock_wait text)
    RETURNS TABLE (place bigint, fingerprint bytea, first_seq bigint, last_seq bigint, created_at timestamptz,
        incarnation uuid, user_id text, is_indexed boolean)
    LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    of_tenant text;
    known_keys bigint := 0;
    row_count bigint;
    -- A variable, because row-level security permits no function call in the condition of an index.
    expired_before timestamptz := now() - interval '24 hours';
    first_group bigint; last_group bigint; tenant_sessions text[];
    first_message bigint; last_message bigint;
    first_key bigint; last_key bigint;
    has_entries boolean := false;
BEGIN
    PERFORM set_config('lock_timeout', lock_wait, true);
    IF cardinality(key_texts) > 0 THEN
        first_key := 1;
        FOR tenant IN 1 .. cardinality(tenant_ids) LOOP
            of_tenant := tenant_ids[tenant];
            last_key := tenant_keys[tenant];
            PERFORM set_config('precis.tenant', of_tenant, true);
            RETURN QUERY
                SELECT first_key - 1 + w.place, known.fingerprint, known.first_seq, known.last_seq, known.created_at,
                    NULL::uuid, CASE WHEN known.has_user THEN owner.user_id ELSE '' END, true
                FROM unnest(key_sessions[first_key:last_key], key_texts[first_key:last_key])
                    WITH ORDINALITY AS w (session_id, key, place)
                    CROSS JOIN LATERAL (
                        SELECT * FROM idempotency_keys AS stored
                        WHERE stored.tenant_id = of_tenant AND stored.session_id = w.session_id
                            AND stored.key = w.key OFFSET 0
                    ) AS known
                    CROSS JOIN LATERAL (
                        SELECT s.user_id FROM sessions AS s
                        WHERE s.tenant_id = of_tenant AND s.session_id = w.session_id OFFSET 0
                    ) AS owner;
            GET DIAGNOSTICS row_count = ROW_COUNT;
            known_keys := known_keys + row_count;
            first_key := last_key + 1;
        END LOOP;
        IF known_keys > 0 THEN
            RETURN;
        END IF;
    END IF;
    -- Keeps others from recording another analyzer until the transaction ends.
    IF cardinality(message_terms) > 0 THEN
        has_entries := analyzer IS NOT DISTINCT FROM (SELECT version FROM search_analyzer WHERE rebuild_tenant IS NULL);
    END IF;
    first_group := 1; first_message := 1; first_key := 1;
    FOR tenant IN 1 .. cardinality(tenant_ids) LOOP
        of_tenant := tenant_ids[tenant];
        last_group := tenant_groups[tenant];
        last_message := tenant_messages[tenant];
        last_key := tenant_keys[tenant];
        tenant_sessions := group_sessions[first_group:last_group];
        PERFORM set_config('precis.tenant', of_tenant, true);
        -- The clock is read once: if it were read twice around a full hour, the time and the hour of a session could
        -- differ, and the list of sessions would omit it.
        RETURN QUERY
            WITH appended AS (
                INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, stored_bytes,
                    created_at, updated_at, activity_hour, indexed_seq)
                SELECT of_tenant, w.session_id, coalesce(w.user_id, w.default_user, ''), coalesce(w.metadata, '{}'),
                    w.count, w.tokens, w.bytes, t.now, t.now, floor(extract(epoch FROM t.now) / 3600),
                    CASE WHEN NOT has_entries THEN 0 END
                FROM unnest(tenant_sessions, group_users[first_group:last_group],
                        group_defaults[first_group:last_group], group_metadata[first_group:last_group],
                        group_counts[first_group:last_group], group_tokens[first_group:last_group],
                        group_bytes[first_group:last_group])
                        AS w (session_id, user_id, default_user, metadata, count, tokens, bytes),
                    (SELECT clock_timestamp() AS now OFFSET 0) AS t
                ON CONFLICT (tenant_id, session_id) DO UPDATE SET
                    last_seq = s.last_seq + excluded.last_seq,
                    tokens = s.tokens + excluded.tokens,
                    stored_bytes = s.stored_bytes + excluded.stored_bytes,
                    metadata = coalesce(
                        group_metadata[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)],
                        s.metadata),
                    user_id = CASE WHEN s.user_id = '' THEN excluded.user_id ELSE s.user_id END,
                    incarnation = CASE WHEN s.user_id = '' AND excluded.user_id <> '' THEN gen_random_uuid()
                        ELSE s.incarnation END,
                    created_at = CASE WHEN s.last_seq = 0 THEN excluded.created_at ELSE s.created_at END,
                    updated_at = greatest(excluded.updated_at, s.updated_at),
                    activity_hour = greatest(excluded.activity_hour, s.activity_hour),
                    indexed_seq = coalesce(s.indexed_seq, CASE WHEN NOT has_entries THEN s.last_seq END)
                WHERE s.user_id IN ('', excluded.user_id)
                    OR group_users[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)] IS NULL
                RETURNING first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id) AS place,
                    s.session_id, s.last_seq, s.updated_at, s.incarnation, s.user_id, s.indexed_seq
            ), inserted_messages AS (
                INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                    created_at)
                SELECT of_tenant, a.session_id, a.last_seq - group_counts[a.place] + w.position, w.role, w.call_ids,
                    w.result_of, w.tokens, w.message, coalesce(w.created_at, a.updated_at)
                FROM unnest(message_groups[first_message:last_message], message_offsets[first_message:last_message],
                        message_roles[first_message:last_message], message_call_ids[first_message:last_message],
                        message_result_of[first_message:last_message], message_tokens[first_message:last_message],
                        message_json[first_message:last_message], message_times[first_message:last_message])
                        AS w (place, position, role, call_ids, result_of, tokens, message, created_at)
                    JOIN appended AS a ON a.place = w.place
            ), inserted_entries AS (
                INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, seqs, times, terms)
                SELECT of_tenant, analyzer, count(*), sum(octet_length(e.terms)), array_agg(e.session_id), array_agg(e.user_id), array_agg(e.seq),
                    array_agg(e.created_at), array_agg(e.terms)
                FROM (
                    SELECT a.session_id, a.user_id, a.last_seq - group_counts[a.place] + w.position AS seq,
                        coalesce(w.created_at, a.updated_at) AS created_at, w.terms
                    FROM unnest(message_groups[first_message:last_message],
                            message_offsets[first_message:last_message], message_terms[first_message:last_message],
                            message_times[first_message:last_message]) AS w (place, position, terms, created_at)
                        JOIN appended AS a ON a.place = w.place
                    WHERE has_entries AND a.indexed_seq IS NULL ORDER BY w.place, w.position
                ) AS e HAVING count(*) > 0
            ), inserted_keys AS (
                INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at,
                    has_user)
                SELECT of_tenant, a.session_id, w.key, w.fingerprint, a.last_seq - group_counts[a.place] + w.first,
                    a.last_seq - group_counts[a.place] + w.last, a.updated_at, a.user_id <> ''
                FROM unnest(key_groups[first_key:last_key], key_texts[first_key:last_key],
                        key_fingerprints[first_key:last_key], key_firsts[first_key:last_key],
                        key_lasts[first_key:last_key]) AS w (place, key, fingerprint, first, last)
                    JOIN appended AS a ON a.place = w.place
            ), deleted_keys AS (
                -- Expired keys of a session are deleted about every 64th message, so that they need no background job.
                DELETE FROM idempotency_keys AS expired USING appended AS a
                WHERE last_key >= first_key AND expired.tenant_id = of_tenant AND expired.session_id = a.session_id
                    AND a.last_seq % 64 < group_counts[a.place] AND expired.created_at < expired_before
                    AND expired.first_seq > 0
            )
            SELECT a.place::bigint, NULL::bytea, a.last_seq - group_counts[a.place] + 1, a.last_seq, a.updated_at,
                a.incarnation, a.user_id, a.indexed_seq IS NULL
            FROM appended AS a;
        first_group := last_group + 1;
        first_message := last_message + 1;
        first_key := last_key + 1;
    END LOOP;
END
$$;

-- Replicas of the previous release call the functions of migration 13. Their messages are indexed later.
DROP FUNCTION append_exchanges(
    text[], bigint[], bigint[], bigint[], bigint[], text[], text[], text[], bigint[], bigint[], text[], bigint[], bigint[], bigint[],
    text[], text[], text[], bigint[], text[], timestamptz[], bigint[], text[], text[], bytea[], bigint[], bigint[], bigint[], bigint[],
    bigint[], bigint[], text);
CREATE OR REPLACE FUNCTION append_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    group_defaults text[], group_bytes bigint[],
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[], message_times timestamptz[],
    message_lexemes text[],
    key_groups bigint[], key_sessions text[], key_texts text[], key_fingerprints bytea[], key_firsts bigint[],
    key_lasts bigint[],
    analyzer text, lock_wait text)
    RETURNS TABLE (place bigint, fingerprint bytea, first_seq bigint, last_seq bigint, created_at timestamptz,
        incarnation uuid, user_id text, is_indexed boolean)
    LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off AS $$
BEGIN
    RETURN QUERY SELECT * FROM store_exchanges(
        tenant_ids, tenant_groups, tenant_messages, tenant_keys, group_sessions, group_users, group_metadata,
        group_counts, group_tokens, group_defaults, group_bytes, message_groups, message_offsets, message_roles,
        message_call_ids, message_result_of, message_tokens, message_json, message_times, '{}', key_groups,
        key_sessions, key_texts, key_fingerprints, key_firsts, key_lasts, NULL, lock_wait
    );
END
$$;

-- All messages are missing from the new index. Branches of rewinds are not indexed. Without NO FORCE, the owner of the tables would see
-- no rows: there is no tenant.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
UPDATE sessions SET indexed_seq = 0 WHERE last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind';
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;
UPDATE search_analyzer SET rebuild_tenant = NULL, rebuild_session = NULL;

-- The previous release cannot search, redact or index messages with this schema, so its /readyz fails.
INSERT INTO schema_compatibility (version, oldest_version) VALUES (23, 23);

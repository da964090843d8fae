-- The state of the search index is a value of each session, and new exchanges are indexed in their own transaction.
--
-- `indexed_seq` is NULL if all messages of the session are in the index, and otherwise the last message before the first one that is
-- missing. An index contains it, but exchanges of complete sessions do not change it, so that they do not write to the indexes of
-- the table.
ALTER TABLE sessions ADD COLUMN indexed_seq bigint CHECK (indexed_seq >= 0 AND indexed_seq < last_seq);

-- A change of the analyzer rebuilds the index: the sessions after this tenant and session are still to be marked as missing. NULL
-- if the index is not being rebuilt.
ALTER TABLE search_analyzer ADD COLUMN rebuild_tenant text COLLATE "C", ADD COLUMN rebuild_session text COLLATE "C";

-- Without NO FORCE, the owner of the tables would see no rows: there is no tenant.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
UPDATE sessions AS s SET indexed_seq = m.indexed_seq
FROM (
    SELECT tenant_id, session_id, min(indexed_seq) AS indexed_seq FROM (
        SELECT tenant_id, session_id, first_seq - 1 AS indexed_seq FROM search_pending
        UNION ALL SELECT tenant_id, session_id, done_seq FROM search_reindex
    ) AS missing GROUP BY tenant_id, session_id
) AS m
WHERE s.tenant_id = m.tenant_id AND s.session_id = m.session_id AND m.indexed_seq < s.last_seq;
-- Messages may be missing anywhere if search was disabled. Branches of rewinds are not indexed.
UPDATE sessions SET indexed_seq = 0
WHERE last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind'
    AND NOT EXISTS (SELECT FROM search_analyzer WHERE version <> 'off');
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;
DELETE FROM search_analyzer WHERE version = 'off';
CREATE INDEX sessions_unindexed ON sessions (tenant_id, activity_hour DESC) WHERE indexed_seq IS NOT NULL;

DROP FUNCTION read_pending_messages(text[], text[], bigint[], bigint[]);
DROP TABLE search_pending;
DROP TABLE search_reindex;

-- The function of migration 1, without the pending messages. A worker that is indexing the session has locked its row.
CREATE OR REPLACE FUNCTION delete_search_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    RETURN NULL;
END
$$;

-- Indexes the messages of a session again after it was bound to a user, because entries contain the user.
DROP TRIGGER index_session_user ON sessions;
CREATE OR REPLACE FUNCTION index_session_user() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.indexed_seq := 0;
    RETURN NEW;
END
$$;
CREATE TRIGGER index_session_user BEFORE UPDATE OF user_id ON sessions FOR EACH ROW
    WHEN (OLD.user_id = '' AND NEW.user_id <> '' AND OLD.last_seq > 0) EXECUTE FUNCTION index_session_user();

-- The function of migration 10, except that the times are rounded to hours, and that a row that covers the new times is only read:
-- exchanges of all replicas would wait for each other's lock of the newest row.
CREATE OR REPLACE FUNCTION record_search_times() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO search_times AS t (bucket, oldest, newest)
    SELECT a.bucket, a.oldest, a.newest FROM (
        SELECT id >> 11 AS bucket, date_trunc('hour', min(created_at)) AS oldest,
            date_trunc('hour', max(created_at)) + interval '1 hour' AS newest
        FROM added GROUP BY 1
    ) AS a
    WHERE NOT EXISTS (
        SELECT FROM search_times AS k WHERE k.bucket = a.bucket AND k.oldest <= a.oldest AND k.newest >= a.newest
    )
    ORDER BY a.bucket
    ON CONFLICT (bucket) DO UPDATE
        SET oldest = least(t.oldest, excluded.oldest), newest = greatest(t.newest, excluded.newest);
    RETURN NULL;
END
$$;

-- Returns the tenants that have messages that are not indexed. It reads one tenant at a time, under the policy of that tenant.
CREATE FUNCTION unindexed_tenants() RETURNS TABLE (tenant_id text, sessions bigint, messages bigint)
    LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT t.tenant_id FROM tenants AS t LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        RETURN QUERY
            SELECT of_tenant, count(*), sum(s.last_seq - s.indexed_seq)::bigint FROM sessions AS s
            WHERE s.tenant_id = of_tenant AND s.indexed_seq IS NOT NULL HAVING count(*) > 0;
    END LOOP;
END
$$;

-- Records the progress of sessions that were not changed since their messages were read, and deletes earlier entries of these
-- messages. Ranges are lists of tenant, session, incarnation, `indexed_seq` and the last message. Returns the sessions. Sessions that
-- others have locked are left out: they may wait for a lock of this transaction. A loop, because a plan for an average tenant would
-- read all sessions of a large one.
CREATE FUNCTION advance_index(of_tenant text, ranges json) RETURNS SETOF text LANGUAGE plpgsql AS $$
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
            DELETE FROM search
            WHERE tenant_id = of_tenant AND session_id = range ->> 1 AND seq > CAST(range ->> 3 AS bigint)
                AND seq <= CAST(range ->> 4 AS bigint);
            RETURN NEXT range ->> 1;
        END IF;
    END LOOP;
END
$$;

-- Marks the next sessions of a tenant as missing, and returns the last one. Branches of rewinds are not indexed, except for later
-- messages. The settings: a plan for an average tenant would sort all sessions of a large one.
CREATE FUNCTION mark_sessions(of_tenant text, after_session text, max_sessions bigint) RETURNS text
    LANGUAGE plpgsql SET enable_sort = off SET enable_bitmapscan = off SET enable_seqscan = off AS $$
DECLARE
    last_session text;
BEGIN
    SELECT max(s.session_id) INTO last_session FROM (
        SELECT session_id FROM sessions
        WHERE tenant_id = of_tenant AND session_id > after_session ORDER BY session_id LIMIT max_sessions
    ) AS s;
    UPDATE sessions SET indexed_seq = 0
    WHERE tenant_id = of_tenant AND session_id > after_session AND session_id <= last_session AND last_seq > 0
        AND coalesce(fork_kind, '') <> 'rewind';
    RETURN last_session;
END
$$;

-- Functions of earlier versions.
DO $$
DECLARE
    function regprocedure;
BEGIN
    FOR function IN SELECT oid FROM pg_proc
        WHERE proname = 'append_exchanges' AND pronamespace = current_schema()::regnamespace
    LOOP
        EXECUTE format('DROP FUNCTION %s', function);
    END LOOP;
END
$$;

-- The function of migration 9, except that it adds the messages to the index: those of sessions that are completely indexed, if
-- `message_lexemes` has the lexemes of all messages, by the analyzer of the index. The lexeme of the user is added as
-- `domain::search::lexemes` makes it.
-- Without JIT: the planner expects many rows, and would compile each call, which takes ten times as long as the call.
CREATE FUNCTION append_exchanges(
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
    user_tag text;
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
    IF cardinality(message_lexemes) > 0 THEN
        has_entries := analyzer IS NOT DISTINCT FROM (SELECT version FROM search_analyzer);
    END IF;
    first_group := 1; first_message := 1; first_key := 1;
    FOR tenant IN 1 .. cardinality(tenant_ids) LOOP
        of_tenant := tenant_ids[tenant];
        last_group := tenant_groups[tenant];
        last_message := tenant_messages[tenant];
        last_key := tenant_keys[tenant];
        tenant_sessions := group_sessions[first_group:last_group];
        user_tag := left(encode(sha256(convert_to(of_tenant, 'UTF8')), 'hex'), 6) || ':u';
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
                INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
                SELECT of_tenant, a.session_id, a.last_seq - group_counts[a.place] + w.position,
                    coalesce(w.created_at, a.updated_at),
                    array_to_tsvector(string_to_array(w.lexemes, ' ') || CASE WHEN a.user_id <> '' THEN
                        ARRAY[user_tag || left(encode(sha256(convert_to(a.user_id, 'UTF8')), 'hex'), 16)] END)
                FROM unnest(message_groups[first_message:last_message], message_offsets[first_message:last_message],
                        message_lexemes[first_message:last_message], message_times[first_message:last_message])
                        AS w (place, position, lexemes, created_at)
                    JOIN appended AS a ON a.place = w.place
                WHERE has_entries AND a.indexed_seq IS NULL ORDER BY w.place, w.position
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

-- Replicas of the previous version call the function with ranges of messages that become pending. Their messages are indexed later.
CREATE FUNCTION append_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[], tenant_spans bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    group_defaults text[], group_bytes bigint[],
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[], message_times timestamptz[],
    key_groups bigint[], key_sessions text[], key_texts text[], key_fingerprints bytea[], key_firsts bigint[],
    key_lasts bigint[],
    span_groups bigint[], span_firsts bigint[], span_lasts bigint[], span_bytes bigint[],
    lock_wait text)
    RETURNS TABLE (place bigint, fingerprint bytea, first_seq bigint, last_seq bigint, created_at timestamptz,
        incarnation uuid, user_id text)
    LANGUAGE sql AS $$
    SELECT place, fingerprint, first_seq, last_seq, created_at, incarnation, user_id FROM append_exchanges(
        tenant_ids, tenant_groups, tenant_messages, tenant_keys, group_sessions, group_users, group_metadata,
        group_counts, group_tokens, group_defaults, group_bytes, message_groups, message_offsets, message_roles,
        message_call_ids, message_result_of, message_tokens, message_json, message_times, '{}', key_groups,
        key_sessions, key_texts, key_fingerprints, key_firsts, key_lasts, NULL, lock_wait
    )
$$;

-- The rows of `search_recent` have one text for the messages of a session, which the service encodes, instead of one for each message: see
-- `domain::search::recent`. So an exchange joins, sorts and aggregates fewer lists.
ALTER TABLE search_recent NO FORCE ROW LEVEL SECURITY;
ALTER TABLE search_recent RENAME seqs TO last_seqs;
UPDATE search_recent SET terms = ARRAY(
    SELECT '0  ' || w.terms FROM unnest(terms) WITH ORDINALITY AS w (terms, place) ORDER BY w.place
);
ALTER TABLE search_recent FORCE ROW LEVEL SECURITY;
-- Rows of up to 8 KB stay in their page, which is faster to write and to read.
ALTER TABLE search_recent SET (toast_tuple_target = 8160);

-- The function `store_exchanges` of migration 23, except that it gets a text of terms for each session.
CREATE FUNCTION insert_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    group_defaults text[], group_bytes bigint[],
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[], message_times timestamptz[],
    group_terms text[],
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
    IF cardinality(group_terms) > 0 THEN
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
                INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, last_seqs, times, terms)
                SELECT of_tenant, analyzer, sum(CAST(group_counts[a.place] AS integer)), sum(octet_length(group_terms[a.place])), array_agg(a.session_id),
                    array_agg(a.user_id), array_agg(a.last_seq), array_agg(a.updated_at), array_agg(group_terms[a.place])
                FROM appended AS a WHERE has_entries AND a.indexed_seq IS NULL HAVING count(*) > 0
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

-- Replicas of the previous release call this function. Their messages are indexed later.
DROP FUNCTION append_exchanges(
    text[], bigint[], bigint[], bigint[], text[], text[], text[], bigint[], bigint[], text[], bigint[], bigint[], bigint[], text[], text[],
    text[], bigint[], text[], timestamptz[], text[], bigint[], text[], text[], bytea[], bigint[], bigint[], text, text);
CREATE OR REPLACE FUNCTION store_exchanges(
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
BEGIN
    RETURN QUERY SELECT * FROM insert_exchanges(
        tenant_ids, tenant_groups, tenant_messages, tenant_keys, group_sessions, group_users, group_metadata,
        group_counts, group_tokens, group_defaults, group_bytes, message_groups, message_offsets, message_roles,
        message_call_ids, message_result_of, message_tokens, message_json, message_times, '{}', key_groups,
        key_sessions, key_texts, key_fingerprints, key_firsts, key_lasts, NULL, lock_wait
    );
END
$$;

-- Adds the messages of sessions that were not changed since these were read, and records the progress of these sessions, if the index has
-- this analyzer. Parts are the ranges of `advance_index` with user, `last_seq`, and the number and the terms of the messages. Returns the
-- number of sessions.
DROP FUNCTION index_messages(text, text, json, json);
CREATE FUNCTION index_parts(of_tenant text, new_analyzer text, parts json) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    unchanged text[];
BEGIN
    -- Keeps others from recording another analyzer until the transaction ends.
    IF new_analyzer IS DISTINCT FROM (SELECT version FROM search_analyzer) THEN
        RETURN 0;
    END IF;
    unchanged := ARRAY(SELECT advance_index(of_tenant, parts));
    INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, last_seqs, times, terms)
    SELECT of_tenant, new_analyzer, sum(p.messages), sum(octet_length(p.terms)), array_agg(p.session_id), array_agg(p.user_id),
        array_agg(p.last_seq), array_agg(timestamptz 'epoch'), array_agg(p.terms)
    FROM (
        SELECT part ->> 1 AS session_id, part ->> 5 AS user_id, CAST(part ->> 6 AS bigint) AS last_seq,
            CAST(part ->> 7 AS bigint) AS messages, part ->> 8 AS terms
        FROM json_array_elements(parts) AS p (part)
    ) AS p WHERE p.session_id = ANY (unchanged) AND p.messages > 0 HAVING count(*) > 0;
    RETURN cardinality(unchanged);
END
$$;

-- The previous release cannot search, redact or index messages with this schema, so its /readyz fails.
INSERT INTO schema_compatibility (version, oldest_version) VALUES (25, 25);

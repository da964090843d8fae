-- Sessions without a user, and sessions that are bound to a user before their first exchange.
--
-- An empty user_id stands for a session without a user: no user has this id, so no memory document belongs to it. A row
-- with last_seq = 0 only binds its session to a user. The session exists from its first exchange on.

-- False if the session had no user yet: repeating the request returns the same response, even if the session got its user
-- later.
ALTER TABLE idempotency_keys ADD COLUMN has_user boolean NOT NULL DEFAULT true;

-- Indexes the messages of a session again after it was bound to a user, because entries contain the user. The first DELETE
-- waits for a worker that is indexing messages without the user, and the second one then sees the new entries.
CREATE FUNCTION index_session_user() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    DELETE FROM search_pending
    WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND first_seq <= OLD.last_seq;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND seq <= OLD.last_seq;
    -- A range has about 1 MiB. If search is disabled, `precis reindex` will index all messages.
    INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
    SELECT OLD.tenant_id, OLD.session_id, min(seq), max(seq), sum(bytes), clock_timestamp()
    FROM (
        SELECT seq, octet_length(message) AS bytes, sum(octet_length(message)) OVER (ORDER BY seq) / 1048576 AS part
        FROM messages WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND seq <= OLD.last_seq
    ) AS m
    WHERE NOT EXISTS (SELECT FROM search_analyzer WHERE version = 'off')
    GROUP BY part;
    RETURN NULL;
END
$$;
CREATE TRIGGER index_session_user AFTER UPDATE OF user_id ON sessions FOR EACH ROW
    WHEN (OLD.user_id = '' AND NEW.user_id <> '' AND OLD.last_seq > 0) EXECUTE FUNCTION index_session_user();

-- The function of migration 4, except that each group has a default user, which may be NULL, that an exchange binds a
-- session without a user, and that the result contains the user. It has other parameters than that function, which stays
-- for replicas of the previous version. A session that gets its user also gets another incarnation, so that copies of the
-- session without the user become invalid.
CREATE FUNCTION append_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[], tenant_spans bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    group_defaults text[],
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[], message_times timestamptz[],
    key_groups bigint[], key_sessions text[], key_texts text[], key_fingerprints bytea[], key_firsts bigint[],
    key_lasts bigint[],
    span_groups bigint[], span_firsts bigint[], span_lasts bigint[], span_bytes bigint[],
    lock_wait text)
    RETURNS TABLE (place bigint, fingerprint bytea, first_seq bigint, last_seq bigint, created_at timestamptz,
        incarnation uuid, user_id text)
    LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
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
    first_span bigint; last_span bigint;
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
                    NULL::uuid, CASE WHEN known.has_user THEN owner.user_id ELSE '' END
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
    first_group := 1; first_message := 1; first_key := 1; first_span := 1;
    FOR tenant IN 1 .. cardinality(tenant_ids) LOOP
        of_tenant := tenant_ids[tenant];
        last_group := tenant_groups[tenant];
        last_message := tenant_messages[tenant];
        last_key := tenant_keys[tenant];
        last_span := tenant_spans[tenant];
        tenant_sessions := group_sessions[first_group:last_group];
        PERFORM set_config('precis.tenant', of_tenant, true);
        -- The clock is read once: if it were read twice around a full hour, the time and the hour of a session could
        -- differ, and the list of sessions would omit it.
        RETURN QUERY
            WITH appended AS (
                INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at,
                    updated_at, activity_hour)
                SELECT of_tenant, w.session_id, coalesce(w.user_id, w.default_user, ''), coalesce(w.metadata, '{}'),
                    w.count, w.tokens, t.now, t.now, floor(extract(epoch FROM t.now) / 3600)
                FROM unnest(tenant_sessions, group_users[first_group:last_group],
                        group_defaults[first_group:last_group], group_metadata[first_group:last_group],
                        group_counts[first_group:last_group], group_tokens[first_group:last_group])
                        AS w (session_id, user_id, default_user, metadata, count, tokens),
                    (SELECT clock_timestamp() AS now OFFSET 0) AS t
                ON CONFLICT (tenant_id, session_id) DO UPDATE SET
                    last_seq = s.last_seq + excluded.last_seq,
                    tokens = s.tokens + excluded.tokens,
                    metadata = coalesce(
                        group_metadata[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)],
                        s.metadata),
                    user_id = CASE WHEN s.user_id = '' THEN excluded.user_id ELSE s.user_id END,
                    incarnation = CASE WHEN s.user_id = '' AND excluded.user_id <> '' THEN gen_random_uuid()
                        ELSE s.incarnation END,
                    created_at = CASE WHEN s.last_seq = 0 THEN excluded.created_at ELSE s.created_at END,
                    updated_at = greatest(excluded.updated_at, s.updated_at),
                    activity_hour = greatest(excluded.activity_hour, s.activity_hour)
                WHERE s.user_id IN ('', excluded.user_id)
                    OR group_users[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)] IS NULL
                RETURNING first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id) AS place,
                    s.session_id, s.last_seq, s.updated_at, s.incarnation, s.user_id
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
            ), pending AS (
                INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
                SELECT of_tenant, a.session_id, a.last_seq - group_counts[a.place] + w.first,
                    a.last_seq - group_counts[a.place] + w.last, w.bytes, a.updated_at
                FROM unnest(span_groups[first_span:last_span], span_firsts[first_span:last_span],
                        span_lasts[first_span:last_span], span_bytes[first_span:last_span])
                        AS w (place, first, last, bytes)
                    JOIN appended AS a ON a.place = w.place
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
                a.incarnation, a.user_id
            FROM appended AS a;
        first_group := last_group + 1;
        first_message := last_message + 1;
        first_key := last_key + 1;
        first_span := last_span + 1;
    END LOOP;
END
$$;

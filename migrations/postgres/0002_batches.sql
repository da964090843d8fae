-- Statements for many sessions at a time, and the columns that tell a replica whether its cached copy of a session is
-- still valid.

-- Identifies a session beyond its id: a session that is erased and created again has another incarnation. Stored messages
-- of one incarnation never change, so a replica may keep them.
ALTER TABLE sessions ADD COLUMN incarnation uuid NOT NULL DEFAULT gen_random_uuid();
ALTER TABLE memories ADD COLUMN incarnation uuid NOT NULL DEFAULT gen_random_uuid();

-- The foreign keys of these tables cost a lookup of the session for each message and protected nothing: a message is inserted by
-- the statement that also locks the row of its session, so an erasure either waits for it or is complete before it. The
-- trigger replaces the cascade.
ALTER TABLE messages DROP CONSTRAINT messages_tenant_id_session_id_fkey;
ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_tenant_id_session_id_fkey;

CREATE FUNCTION delete_session_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM messages WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM idempotency_keys WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER delete_session_rows AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION delete_session_rows();

-- Returns the state of sessions of any tenants, with the position of each in the arguments. It reads one tenant at a time,
-- under the policy of that tenant. A session that does not exist has no row.
CREATE FUNCTION read_session_heads(tenants text[], sessions text[])
    RETURNS TABLE (place bigint, now timestamptz, incarnation uuid, last_seq bigint, tokens bigint, cursor_seq bigint,
        cursor_tokens bigint, revision bigint, lease_until timestamptz, failures integer, retry_at timestamptz,
        last_failure text, updated_at timestamptz, memory_incarnation uuid, memory_version bigint)
    LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT DISTINCT t.id FROM unnest(tenants) AS t (id) LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        RETURN QUERY
            SELECT w.place, clock_timestamp(), s.incarnation, s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens,
                s.revision, s.lease_until, s.failures, s.retry_at, s.last_failure, s.updated_at, d.incarnation, d.version
            FROM unnest(tenants, sessions) WITH ORDINALITY AS w (tenant_id, session_id, place)
                CROSS JOIN LATERAL (
                    SELECT * FROM sessions AS s
                    WHERE s.tenant_id = of_tenant AND s.session_id = w.session_id OFFSET 0
                ) AS s
                LEFT JOIN LATERAL (
                    SELECT d.incarnation, d.version FROM memories AS d
                    WHERE d.tenant_id = of_tenant AND d.user_id = s.user_id OFFSET 0
                ) AS d ON true
            WHERE w.tenant_id = of_tenant;
    END LOOP;
END
$$;

-- Appends exchanges to sessions of any tenants in one transaction.
--
-- A group holds the exchanges of one session. Groups are sorted by tenant and session, so that replicas lock sessions in the
-- same order. The groups of a tenant, their messages, keys and spans for the search index are consecutive in their arrays;
-- the arrays tenant_* hold the last position of each tenant. Positions and offsets count from 1; an offset counts the
-- messages of a group.
--
-- Returns a row for each group that was appended. A group without a row belongs to another user. If one of the idempotency
-- keys is known, appends nothing and returns the known exchanges, with the position of their key.
CREATE FUNCTION append_exchanges(
    tenant_ids text[], tenant_groups bigint[], tenant_messages bigint[], tenant_keys bigint[], tenant_spans bigint[],
    group_sessions text[], group_users text[], group_metadata text[], group_counts bigint[], group_tokens bigint[],
    default_user text,
    message_groups bigint[], message_offsets bigint[], message_roles text[], message_call_ids text[],
    message_result_of text[], message_tokens bigint[], message_json text[],
    key_groups bigint[], key_sessions text[], key_texts text[], key_fingerprints bytea[], key_firsts bigint[],
    key_lasts bigint[],
    span_groups bigint[], span_firsts bigint[], span_lasts bigint[], span_bytes bigint[],
    lock_wait text)
    RETURNS TABLE (place bigint, fingerprint bytea, first_seq bigint, last_seq bigint, created_at timestamptz,
        incarnation uuid)
    LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    of_tenant text;
    known_keys bigint := 0;
    row_count bigint;
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
                    NULL::uuid
                FROM unnest(key_sessions[first_key:last_key], key_texts[first_key:last_key])
                    WITH ORDINALITY AS w (session_id, key, place)
                    CROSS JOIN LATERAL (
                        SELECT * FROM idempotency_keys AS stored
                        WHERE stored.tenant_id = of_tenant AND stored.session_id = w.session_id
                            AND stored.key = w.key OFFSET 0
                    ) AS known;
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
                SELECT of_tenant, w.session_id, coalesce(w.user_id, default_user), coalesce(w.metadata, '{}'), w.count,
                    w.tokens, t.now, t.now, floor(extract(epoch FROM t.now) / 3600)
                FROM unnest(tenant_sessions, group_users[first_group:last_group],
                        group_metadata[first_group:last_group], group_counts[first_group:last_group],
                        group_tokens[first_group:last_group]) AS w (session_id, user_id, metadata, count, tokens),
                    (SELECT clock_timestamp() AS now OFFSET 0) AS t
                ON CONFLICT (tenant_id, session_id) DO UPDATE SET
                    last_seq = s.last_seq + excluded.last_seq,
                    tokens = s.tokens + excluded.tokens,
                    metadata = coalesce(
                        group_metadata[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)],
                        s.metadata),
                    updated_at = greatest(excluded.updated_at, s.updated_at),
                    activity_hour = greatest(excluded.activity_hour, s.activity_hour)
                WHERE s.user_id = excluded.user_id
                    OR group_users[first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id)] IS NULL
                RETURNING first_group - 1 + array_position(tenant_sessions COLLATE "C", s.session_id) AS place,
                    s.session_id, s.last_seq, s.updated_at, s.incarnation
            ), inserted_messages AS (
                INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                    created_at)
                SELECT of_tenant, a.session_id, a.last_seq - group_counts[a.place] + w.position, w.role, w.call_ids,
                    w.result_of, w.tokens, w.message, a.updated_at
                FROM unnest(message_groups[first_message:last_message], message_offsets[first_message:last_message],
                        message_roles[first_message:last_message], message_call_ids[first_message:last_message],
                        message_result_of[first_message:last_message], message_tokens[first_message:last_message],
                        message_json[first_message:last_message])
                        AS w (place, position, role, call_ids, result_of, tokens, message)
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
                INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at)
                SELECT of_tenant, a.session_id, w.key, w.fingerprint, a.last_seq - group_counts[a.place] + w.first,
                    a.last_seq - group_counts[a.place] + w.last, a.updated_at
                FROM unnest(key_groups[first_key:last_key], key_texts[first_key:last_key],
                        key_fingerprints[first_key:last_key], key_firsts[first_key:last_key],
                        key_lasts[first_key:last_key]) AS w (place, key, fingerprint, first, last)
                    JOIN appended AS a ON a.place = w.place
            ), deleted_keys AS (
                -- Expired keys of a session are deleted about every 64th message, so that they need no background job.
                DELETE FROM idempotency_keys AS expired USING appended AS a
                WHERE last_key >= first_key AND expired.tenant_id = of_tenant AND expired.session_id = a.session_id
                    AND a.last_seq % 64 < group_counts[a.place] AND expired.created_at < now() - interval '24 hours'
            )
            SELECT a.place::bigint, NULL::bytea, a.last_seq - group_counts[a.place] + 1, a.last_seq, a.updated_at,
                a.incarnation
            FROM appended AS a;
        first_group := last_group + 1;
        first_message := last_message + 1;
        first_key := last_key + 1;
        first_span := last_span + 1;
    END LOOP;
END
$$;

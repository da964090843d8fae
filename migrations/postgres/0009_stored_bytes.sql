-- Stored bytes: the size of the messages of a session as JSON, and their sum for a tenant.
--
-- An exchange adds to `stored_bytes` of its session only: a counter of the tenant would make exchanges of all sessions wait for
-- each other. The part of it that is counted for the tenant is `settled_bytes`. A background worker settles sessions, and from the
-- hour `settled_hour` on, sessions may have more or less than that, and are read one by one.
ALTER TABLE sessions
    ADD COLUMN stored_bytes bigint NOT NULL DEFAULT 0,
    ADD COLUMN settled_bytes bigint NOT NULL DEFAULT 0;
ALTER TABLE tenants
    ADD COLUMN settled_bytes bigint NOT NULL DEFAULT 0,
    ADD COLUMN settled_hour bigint NOT NULL DEFAULT 0;

-- The function of migration 7, except that a new session does not wait for a transaction that settles its tenant.
CREATE OR REPLACE FUNCTION add_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM tenants WHERE tenant_id = NEW.tenant_id;
    IF NOT FOUND THEN
        INSERT INTO tenants (tenant_id) VALUES (NEW.tenant_id) ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;

-- Changes of the settled bytes of a tenant that are not yet part of its sum. They are rows, so that transactions that change
-- sessions of one tenant do not wait for each other.
CREATE TABLE usage_changes (
    tenant_id text COLLATE "C" NOT NULL,
    id        bigint GENERATED ALWAYS AS IDENTITY,
    bytes     bigint NOT NULL,
    PRIMARY KEY (tenant_id, id)
);
ALTER TABLE usage_changes ENABLE ROW LEVEL SECURITY;
ALTER TABLE usage_changes FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON usage_changes USING (tenant_id = precis_tenant());

-- Without NO FORCE, the owner of the tables would see no rows: there is no tenant.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
ALTER TABLE messages NO FORCE ROW LEVEL SECURITY;
UPDATE sessions AS s SET stored_bytes = m.bytes, settled_bytes = m.bytes
FROM (SELECT tenant_id, session_id, sum(octet_length(message)) AS bytes FROM messages GROUP BY tenant_id, session_id) AS m
WHERE s.tenant_id = m.tenant_id AND s.session_id = m.session_id;
UPDATE tenants AS t SET settled_bytes = s.bytes, settled_hour = floor(extract(epoch FROM now()) / 3600) - 1
FROM (SELECT tenant_id, sum(stored_bytes) AS bytes FROM sessions GROUP BY tenant_id) AS s WHERE s.tenant_id = t.tenant_id;
ALTER TABLE messages FORCE ROW LEVEL SECURITY;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;

CREATE FUNCTION record_usage_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO usage_changes (tenant_id, bytes) VALUES (NEW.tenant_id, NEW.settled_bytes);
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO usage_changes (tenant_id, bytes) VALUES (NEW.tenant_id, NEW.settled_bytes - OLD.settled_bytes);
    ELSE
        INSERT INTO usage_changes (tenant_id, bytes) VALUES (OLD.tenant_id, -OLD.settled_bytes);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER record_settled_insert AFTER INSERT ON sessions FOR EACH ROW
    WHEN (NEW.settled_bytes <> 0) EXECUTE FUNCTION record_usage_change();
CREATE TRIGGER record_settled_update AFTER UPDATE OF settled_bytes ON sessions FOR EACH ROW
    WHEN (NEW.settled_bytes <> OLD.settled_bytes) EXECUTE FUNCTION record_usage_change();
CREATE TRIGGER record_settled_delete AFTER DELETE ON sessions FOR EACH ROW
    WHEN (OLD.settled_bytes <> 0) EXECUTE FUNCTION record_usage_change();

-- A message changes its size only by a redaction. The session may not have been active for long, so the change is settled.
CREATE FUNCTION record_message_change() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    change bigint := octet_length(NEW.message) - octet_length(OLD.message);
BEGIN
    UPDATE sessions SET stored_bytes = stored_bytes + change, settled_bytes = settled_bytes + change
    WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND last_seq >= NEW.seq;
    RETURN NULL;
END
$$;
CREATE TRIGGER record_message_change AFTER UPDATE OF message ON messages FOR EACH ROW
    WHEN (octet_length(NEW.message) <> octet_length(OLD.message)) EXECUTE FUNCTION record_message_change();

-- The function of migration 5, except that it adds the bytes of each group to its session.
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
                INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, stored_bytes,
                    created_at, updated_at, activity_hour)
                SELECT of_tenant, w.session_id, coalesce(w.user_id, w.default_user, ''), coalesce(w.metadata, '{}'),
                    w.count, w.tokens, w.bytes, t.now, t.now, floor(extract(epoch FROM t.now) / 3600)
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

-- Replicas of the previous version call the function without the bytes.
CREATE OR REPLACE FUNCTION append_exchanges(
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
    LANGUAGE sql AS $$
    SELECT * FROM append_exchanges(
        tenant_ids, tenant_groups, tenant_messages, tenant_keys, tenant_spans, group_sessions, group_users,
        group_metadata, group_counts, group_tokens, group_defaults, ARRAY(
            SELECT coalesce(sum(octet_length(m.json)), 0)::bigint
            FROM generate_subscripts(group_sessions, 1) AS g (place)
                LEFT JOIN unnest(message_groups, message_json) AS m (place, json) ON m.place = g.place
            GROUP BY g.place ORDER BY g.place
        ), message_groups, message_offsets,
        message_roles, message_call_ids, message_result_of, message_tokens, message_json, message_times, key_groups,
        key_sessions, key_texts, key_fingerprints, key_firsts, key_lasts, span_groups, span_firsts, span_lasts,
        span_bytes, lock_wait
    )
$$;

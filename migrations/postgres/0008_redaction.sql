-- Redaction of messages.

-- When, and with which API key, the content of the message was removed: `domain::redaction::RedactionMark`.
ALTER TABLE messages ADD COLUMN redaction text;      -- JSON
-- The message whose redaction removed the texts of the revision.
ALTER TABLE revisions ADD COLUMN redacted_seq bigint;

-- The same for all sessions that forks and rewinds have made of one session, also after its erasure. NULL if a session was
-- never copied.
ALTER TABLE sessions ADD COLUMN lineage uuid;
CREATE INDEX sessions_by_lineage ON sessions (tenant_id, lineage) WHERE lineage IS NOT NULL;

-- Row-level security would hide the sessions from their owner.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
WITH RECURSIVE origins AS MATERIALIZED (
    SELECT s.tenant_id, s.session_id, gen_random_uuid() AS lineage FROM sessions AS s
    WHERE s.forked_from IS NULL AND EXISTS (
        SELECT FROM sessions AS c WHERE c.tenant_id = s.tenant_id AND c.forked_from = s.session_id
    )
), copies AS (
    SELECT * FROM origins
    UNION ALL
    SELECT c.tenant_id, c.session_id, o.lineage FROM copies AS o
        JOIN sessions AS c ON c.tenant_id = o.tenant_id AND c.forked_from = o.session_id
)
UPDATE sessions AS s SET lineage = copies.lineage FROM copies
WHERE s.tenant_id = copies.tenant_id AND s.session_id = copies.session_id;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;

-- The functions of migration 6, except that they permit a redaction: once per row.
CREATE OR REPLACE FUNCTION reject_history_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND last_seq >= OLD.seq
        ) THEN
            RETURN OLD;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        IF OLD.redaction IS NULL AND NEW.redaction IS NOT NULL
            AND (OLD.tenant_id, OLD.session_id, OLD.seq, OLD.role, OLD.tool_call_ids, OLD.tool_result_of, OLD.created_at)
                IS NOT DISTINCT FROM
                (NEW.tenant_id, NEW.session_id, NEW.seq, NEW.role, NEW.tool_call_ids, NEW.tool_result_of, NEW.created_at)
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it',
        TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
$$;

CREATE OR REPLACE FUNCTION reject_revision_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND revision >= OLD.revision
        ) THEN
            RETURN OLD;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        IF OLD.redacted_seq IS NULL AND NEW.redacted_seq IS NOT NULL AND NEW.summary = '' AND NEW.added = ''
            AND (OLD.tenant_id, OLD.session_id, OLD.revision, OLD.kind, OLD.from_seq, OLD.to_seq, OLD.cursor_seq, OLD.source,
                OLD.created_at)
                IS NOT DISTINCT FROM
                (NEW.tenant_id, NEW.session_id, NEW.revision, NEW.kind, NEW.from_seq, NEW.to_seq, NEW.cursor_seq, NEW.source,
                NEW.created_at)
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it',
        TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
$$;

-- The function of migration 1, without redacted messages.
CREATE OR REPLACE FUNCTION read_pending_messages(tenants text[], sessions text[], firsts bigint[], lasts bigint[])
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
                        AND m.seq >= w.first_seq AND m.seq <= w.last_seq AND m.redaction IS NULL OFFSET 0
                ) AS m
            WHERE w.tenant_id = of_tenant;
    END LOOP;
END
$$;

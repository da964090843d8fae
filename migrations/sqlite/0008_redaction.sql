-- Redaction of messages.

-- When, and with which API key, the content of the message was removed: `domain::redaction::RedactionMark`.
ALTER TABLE messages ADD COLUMN redaction TEXT;      -- JSON
-- The message whose redaction removed the texts of the revision.
ALTER TABLE revisions ADD COLUMN redacted_seq INTEGER;

-- The same for all sessions that forks and rewinds have made of one session, also after its erasure. NULL if a session was
-- never copied.
ALTER TABLE sessions ADD COLUMN lineage BLOB;
CREATE INDEX sessions_by_lineage ON sessions (tenant_id, lineage) WHERE lineage IS NOT NULL;

WITH RECURSIVE origins AS MATERIALIZED (
    SELECT s.tenant_id, s.session_id, randomblob(16) AS lineage FROM sessions AS s
    WHERE s.forked_from IS NULL AND EXISTS (
        SELECT 1 FROM sessions AS c WHERE c.tenant_id = s.tenant_id AND c.forked_from = s.session_id
    )
), copies (tenant_id, session_id, lineage) AS (
    SELECT tenant_id, session_id, lineage FROM origins
    UNION ALL
    SELECT c.tenant_id, c.session_id, o.lineage FROM copies AS o
        JOIN sessions AS c ON c.tenant_id = o.tenant_id AND c.forked_from = o.session_id
)
UPDATE sessions AS s SET lineage = copies.lineage FROM copies
WHERE s.tenant_id = copies.tenant_id AND s.session_id = copies.session_id;

-- A redaction may change a row once.
DROP TRIGGER messages_reject_update;
CREATE TRIGGER messages_reject_update BEFORE UPDATE ON messages
WHEN NOT (OLD.redaction IS NULL AND NEW.redaction IS NOT NULL
    AND (OLD.tenant_id, OLD.session_id, OLD.seq, OLD.role, OLD.created_at)
        = (NEW.tenant_id, NEW.session_id, NEW.seq, NEW.role, NEW.created_at)
    AND OLD.tool_call_ids IS NEW.tool_call_ids AND OLD.tool_result_of IS NEW.tool_result_of)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it');
END;
DROP TRIGGER revisions_reject_update;
CREATE TRIGGER revisions_reject_update BEFORE UPDATE ON revisions
WHEN NOT (OLD.redacted_seq IS NULL AND NEW.redacted_seq IS NOT NULL AND NEW.summary = '' AND NEW.added = ''
    AND (OLD.tenant_id, OLD.session_id, OLD.revision, OLD.kind, OLD.cursor_seq, OLD.created_at)
        = (NEW.tenant_id, NEW.session_id, NEW.revision, NEW.kind, NEW.cursor_seq, NEW.created_at)
    AND OLD.from_seq IS NEW.from_seq AND OLD.to_seq IS NEW.to_seq AND OLD.source IS NEW.source)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it');
END;

-- Sessions without a user, and sessions that are bound to a user before their first exchange.
--
-- An empty user_id stands for a session without a user: no user has this id, so no memory document belongs to it. A row
-- with last_seq = 0 only binds its session to a user. The session exists from its first exchange on.

-- 0 if the session had no user yet: repeating the request returns the same response, even if the session got its user later.
ALTER TABLE idempotency_keys ADD COLUMN has_user INTEGER NOT NULL DEFAULT 1;

-- Indexes the messages of a session again after it was bound to a user, because entries contain the user. A range has about
-- 1 MiB. Its time is later than that of each pending range of the session, so that a worker that has read these messages
-- without the user cannot complete. If search is disabled, `precis reindex` will index all messages.
CREATE TRIGGER sessions_index_user AFTER UPDATE OF user_id ON sessions
WHEN OLD.user_id = '' AND NEW.user_id <> ''
BEGIN
    DELETE FROM search_pending WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
    SELECT OLD.tenant_id, OLD.session_id, min(seq), max(seq), sum(bytes), NEW.updated_at + 1
    FROM (
        SELECT seq, octet_length(message) AS bytes, sum(octet_length(message)) OVER (ORDER BY seq) / 1048576 AS part
        FROM messages WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id
    )
    WHERE NOT EXISTS (SELECT 1 FROM search_analyzer WHERE version = 'off')
    GROUP BY part;
END;

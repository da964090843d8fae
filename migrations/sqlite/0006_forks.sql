-- Forks and rewinds.

-- The session and the message that a session was forked from. `rewind` marks the branch that a rewind of `forked_from` has
-- removed from that session; `forked_through` is then the last message that both have in common. A session keeps these
-- branches: the statements that erase it erase them, too.
ALTER TABLE sessions ADD COLUMN forked_from TEXT;
ALTER TABLE sessions ADD COLUMN forked_through INTEGER;
ALTER TABLE sessions ADD COLUMN fork_kind TEXT CHECK (fork_kind IN ('fork', 'rewind'));
CREATE INDEX sessions_by_origin ON sessions (tenant_id, forked_from) WHERE forked_from IS NOT NULL;

-- A fork is independent. It only forgets the id of the erased session.
CREATE TRIGGER sessions_release_forks AFTER DELETE ON sessions
BEGIN
    UPDATE sessions SET forked_from = NULL, forked_through = NULL, fork_kind = NULL
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id;
END;

-- Messages after the `last_seq` of their session are not part of its history, and revisions after its `revision` are not part
-- of its revisions. A rewind lowers these numbers after it has copied the session, and then deletes the rows.
DROP TRIGGER messages_reject_delete;
CREATE TRIGGER messages_reject_delete BEFORE DELETE ON messages
WHEN EXISTS (SELECT 1 FROM sessions
             WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND last_seq >= OLD.seq)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure or the rewind of a session removes from it');
END;
DROP TRIGGER revisions_reject_delete;
CREATE TRIGGER revisions_reject_delete BEFORE DELETE ON revisions
WHEN EXISTS (SELECT 1 FROM sessions
             WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND revision >= OLD.revision)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure or the rewind of a session removes from it');
END;

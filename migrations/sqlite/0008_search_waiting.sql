-- Messages that are stored and not in the index yet. Whoever stores an exchange leaves a row for it, which costs little, and the
-- service indexes many at a time, a second later; a search indexes those that it could find before it looks.
CREATE TABLE search_waiting (
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    first_seq  INTEGER NOT NULL,
    last_seq   INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,   -- of JSON
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, first_seq)
) STRICT, WITHOUT ROWID;

DROP TRIGGER sessions_forget_search;
CREATE TRIGGER sessions_forget_search AFTER DELETE ON sessions
BEGIN
    DELETE FROM search_waiting WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
END;

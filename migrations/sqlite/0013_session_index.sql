-- The state of the search index is a value of each session.
--
-- `indexed_seq` is NULL if all messages of the session are in the index, and otherwise the last message before the first one that is
-- missing.
ALTER TABLE sessions ADD COLUMN indexed_seq INTEGER CHECK (indexed_seq >= 0 AND indexed_seq < last_seq);

-- A change of the analyzer rebuilds the index: the sessions after this tenant and session are still to be marked as missing. NULL
-- if the index is not being rebuilt.
ALTER TABLE search_analyzer ADD COLUMN rebuild_tenant TEXT;
ALTER TABLE search_analyzer ADD COLUMN rebuild_session TEXT;

UPDATE sessions AS s SET indexed_seq = m.indexed_seq
FROM (
    SELECT tenant_id, session_id, min(indexed_seq) AS indexed_seq FROM (
        SELECT tenant_id, session_id, first_seq - 1 AS indexed_seq FROM search_pending
        UNION ALL SELECT tenant_id, session_id, done_seq FROM search_reindex
    ) GROUP BY tenant_id, session_id
) AS m
WHERE s.tenant_id = m.tenant_id AND s.session_id = m.session_id AND m.indexed_seq < s.last_seq;
-- Messages may be missing anywhere if search was disabled. Branches of rewinds are not indexed.
UPDATE sessions SET indexed_seq = 0
WHERE last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind'
    AND NOT EXISTS (SELECT 1 FROM search_analyzer WHERE version <> 'off');
DELETE FROM search_analyzer WHERE version = 'off';
CREATE INDEX sessions_unindexed ON sessions (tenant_id, activity_hour DESC) WHERE indexed_seq IS NOT NULL;

DROP TRIGGER sessions_delete_search_rows;
CREATE TRIGGER sessions_delete_search_rows AFTER DELETE ON sessions
BEGIN
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
END;

-- Indexes the messages of a session again after it was bound to a user, because entries contain the user.
DROP TRIGGER sessions_index_user;
CREATE TRIGGER sessions_index_user AFTER UPDATE OF user_id ON sessions
WHEN OLD.user_id = '' AND NEW.user_id <> '' AND NEW.last_seq > 0
BEGIN
    UPDATE sessions SET indexed_seq = 0 WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id;
END;

DROP TABLE search_pending;
DROP TABLE search_reindex;

-- The trigger of migration 10, except that the times are rounded to hours, so that few entries change them.
DROP TRIGGER search_add_lexemes;
CREATE TRIGGER search_add_lexemes AFTER INSERT ON search
BEGIN
    INSERT INTO search_lexemes (rowid, lexemes) VALUES (NEW.id, NEW.lexemes);
    INSERT INTO search_times (bucket, oldest, newest)
        SELECT NEW.id >> 11, NEW.created_at / 3600000000 * 3600000000, (NEW.created_at / 3600000000 + 1) * 3600000000
        WHERE NOT EXISTS (
            SELECT 1 FROM search_times
            WHERE bucket = NEW.id >> 11 AND oldest <= NEW.created_at AND newest >= NEW.created_at
        )
        ON CONFLICT (bucket) DO UPDATE SET oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest);
END;

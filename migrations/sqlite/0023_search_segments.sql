-- The search index consists of segments, which the service writes: see `domain::search::segment`. SQLite stores their pages.
--
-- An exchange adds one row to `search_recent` together with the other exchanges of its transaction, instead of a row for each message
-- and an entry of FTS5 for each of its words. All messages are indexed again.
DROP TRIGGER search_record_prefix;
DROP TRIGGER search_add_lexemes;
DROP TRIGGER search_delete_lexemes;
DROP TRIGGER sessions_delete_search_rows;
DROP TABLE search_lexemes;
DROP VIEW search_lexemes_content;
DROP TABLE search;
DROP TABLE search_times;
DROP INDEX tenants_by_search_prefix;
ALTER TABLE tenants DROP COLUMN search_prefix;

-- Messages that were indexed together and are in no segment yet. Entries are lists of session, user, `seq`, time and terms separated by
-- spaces. A higher id was indexed later, and ids are not used again.
CREATE TABLE search_recent (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id TEXT NOT NULL,
    analyzer  TEXT NOT NULL,
    messages  INTEGER NOT NULL,
    bytes     INTEGER NOT NULL,   -- size of the terms
    entries   TEXT NOT NULL
) STRICT;
CREATE INDEX search_recent_by_tenant ON search_recent (tenant_id, id);

-- `position` is the first id of the rows of `search_recent` that the segment was made of. A segment never changes: another one with
-- another id replaces it.
CREATE TABLE search_segments (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id TEXT NOT NULL,
    position  INTEGER NOT NULL,
    analyzer  TEXT NOT NULL,
    messages  INTEGER NOT NULL,
    bytes     INTEGER NOT NULL   -- size of the pages
) STRICT;
CREATE INDEX search_segments_by_tenant ON search_segments (tenant_id, position);

-- The pages of segments.
CREATE TABLE search_pages (
    tenant_id  TEXT NOT NULL,
    segment_id INTEGER NOT NULL,
    first_key  BLOB NOT NULL,
    page       BLOB NOT NULL,
    PRIMARY KEY (segment_id, first_key)
) STRICT;

-- Messages that are to be removed from rows of `search_recent` up to `position`, and from segments up to this position. Later ones can
-- contain other messages of a session with the same id.
CREATE TABLE search_removals (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    first_seq  INTEGER NOT NULL,
    last_seq   INTEGER NOT NULL,
    position   INTEGER NOT NULL
) STRICT;
CREATE INDEX search_removals_by_tenant ON search_removals (tenant_id);

-- A view that removes the messages of its rows from the index, if there is one: a trigger cannot call a function.
CREATE VIEW search_removal AS SELECT tenant_id, session_id, first_seq, last_seq FROM search_removals;
CREATE TRIGGER search_removal_insert INSTEAD OF INSERT ON search_removal
BEGIN
    INSERT INTO search_removals (tenant_id, session_id, first_seq, last_seq, position)
        SELECT NEW.tenant_id, NEW.session_id, NEW.first_seq, NEW.last_seq, p.position FROM (
            SELECT max(coalesce((SELECT max(id) FROM search_recent WHERE tenant_id = NEW.tenant_id), 0),
                coalesce((SELECT max(position) FROM search_segments WHERE tenant_id = NEW.tenant_id), 0)) AS position
        ) AS p WHERE p.position > 0 AND NEW.last_seq >= NEW.first_seq;
END;

CREATE TRIGGER sessions_remove_from_index AFTER DELETE ON sessions WHEN OLD.last_seq > 0
BEGIN
    INSERT INTO search_removal (tenant_id, session_id, first_seq, last_seq)
        VALUES (OLD.tenant_id, OLD.session_id, 1, OLD.last_seq);
END;
-- The trigger of migration 13, which also removes the entries without the user.
DROP TRIGGER sessions_index_user;
CREATE TRIGGER sessions_index_user AFTER UPDATE OF user_id ON sessions
WHEN OLD.user_id = '' AND NEW.user_id <> '' AND NEW.last_seq > 0
BEGIN
    INSERT INTO search_removal (tenant_id, session_id, first_seq, last_seq)
        VALUES (NEW.tenant_id, NEW.session_id, 1, NEW.last_seq);
    UPDATE sessions SET indexed_seq = 0 WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id;
END;

-- All messages are missing from the new index. Branches of rewinds are not indexed.
UPDATE sessions SET indexed_seq = 0 WHERE last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind';
UPDATE search_analyzer SET rebuild_tenant = NULL, rebuild_session = NULL;

INSERT INTO schema_compatibility (version, oldest_version) VALUES (23, 23);

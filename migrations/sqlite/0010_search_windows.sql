-- The newest messages that contain a word, however common it is.
--
-- FTS5 returns the newest matches first, so searches need no index on times to scan the newest messages.
DROP INDEX search_by_time;

-- Rows enter the full-text index when they are inserted, because they are inserted in batches: FTS5 writes a segment for each
-- transaction.
DROP TRIGGER search_add_lexemes;
DROP TRIGGER search_delete_lexemes;
INSERT INTO search_lexemes (rowid, lexemes)
    SELECT id, lexemes FROM search WHERE id > (SELECT through_id FROM search_lexemes_progress) ORDER BY id;
DROP VIEW search_lexemes_content;
DROP TABLE search_lexemes_progress;
CREATE VIEW search_lexemes_content AS SELECT id, lexemes FROM search;

-- The first and last time of the messages in each 2048 consecutive ids. Imports have old messages with new ids.
CREATE TABLE search_times (
    bucket INTEGER PRIMARY KEY,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL
) STRICT;
INSERT INTO search_times SELECT id >> 11, min(created_at), max(created_at) FROM search GROUP BY 1;

CREATE TRIGGER search_add_lexemes AFTER INSERT ON search
BEGIN
    INSERT INTO search_lexemes (rowid, lexemes) VALUES (NEW.id, NEW.lexemes);
    INSERT INTO search_times (bucket, oldest, newest) VALUES (NEW.id >> 11, NEW.created_at, NEW.created_at)
        ON CONFLICT (bucket) DO UPDATE SET oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest)
        WHERE oldest > excluded.oldest OR newest < excluded.newest;
END;
CREATE TRIGGER search_delete_lexemes AFTER DELETE ON search
BEGIN
    INSERT INTO search_lexemes (search_lexemes, rowid, lexemes) VALUES ('delete', OLD.id, OLD.lexemes);
END;

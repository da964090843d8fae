-- What search finds messages by: the lexemes of each, as `domain::search::index` makes them.
CREATE TABLE search (
    id         INTEGER PRIMARY KEY,   -- counts up: a higher one was stored later
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    lexemes    TEXT NOT NULL,         -- with a space between any two
    UNIQUE (tenant_id, session_id, seq)
) STRICT;
CREATE INDEX search_by_time ON search (tenant_id, created_at, id);

-- The newest rows wait to be put into the index together, 256 at a time: a piece of it that is written for one message takes
-- longer than the message itself, and is merged with others later. `through_id`: the last row that is in it. Those above are
-- looked at one by one. Ids begin anew after the highest that is left, so this never stands above it.
CREATE TABLE search_lexemes_through (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    through_id INTEGER NOT NULL
) STRICT;
INSERT INTO search_lexemes_through (id, through_id) VALUES (1, 0);
CREATE VIEW search_lexemes_rows AS
    SELECT id, lexemes FROM search WHERE id <= (SELECT through_id FROM search_lexemes_through);

-- The index holds no text of its own. Lexemes are letters, digits and colons, folded already: this tokenizer
-- parts them at the spaces and leaves them as they are. To remove a row is to remove its lexemes from the index's pages,
-- so that nothing erased stays in the file; for that FTS5 must be told the old ones, which is why `search` keeps them.
CREATE VIRTUAL TABLE search_lexemes USING fts5 (
    lexemes, content = 'search_lexemes_rows', content_rowid = 'id', detail = 'none', columnsize = 0,
    tokenize = "ascii tokenchars ':'"
);
INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('secure-delete', 1);
-- Pieces are merged: not until there are 16 of a size, for that is work of whoever writes.
INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('automerge', 16);
CREATE TRIGGER search_is_indexed AFTER INSERT ON search WHEN NEW.id % 256 = 0
BEGIN
    INSERT INTO search_lexemes (rowid, lexemes)
        SELECT id, lexemes FROM search
        WHERE id > (SELECT through_id FROM search_lexemes_through) AND id <= NEW.id ORDER BY id;
    UPDATE search_lexemes_through SET through_id = NEW.id;
END;
CREATE TRIGGER search_is_forgotten AFTER DELETE ON search
BEGIN
    INSERT INTO search_lexemes (search_lexemes, rowid, lexemes)
        SELECT 'delete', OLD.id, OLD.lexemes WHERE OLD.id <= (SELECT through_id FROM search_lexemes_through);
    UPDATE search_lexemes_through SET through_id = (SELECT coalesce(max(id), 0) FROM search)
        WHERE through_id > (SELECT coalesce(max(id), 0) FROM search);
END;

CREATE TRIGGER sessions_forget_search AFTER DELETE ON sessions
BEGIN
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
END;

-- Messages that are still to be indexed, as far as `through_seq`: those that were stored before there was an index, and
-- all of them when the rules have changed. `precis reindex` works through them.
CREATE TABLE search_backlog (
    tenant_id   TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    done_seq    INTEGER NOT NULL DEFAULT 0,
    through_seq INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
INSERT INTO search_backlog (tenant_id, session_id, through_seq)
    SELECT tenant_id, session_id, last_seq FROM sessions WHERE last_seq > 0;

-- The rules by which the index is made, one row: what `Analysis::label` says.
CREATE TABLE search_rules (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    label TEXT NOT NULL
) STRICT;

-- The schema of precis on SQLite: the same tables and columns as on Postgres. Times are microseconds since 1970, in UTC.

CREATE TABLE sessions (
    tenant_id      TEXT NOT NULL,
    session_id     TEXT NOT NULL,
    user_id        TEXT NOT NULL,
    metadata       TEXT NOT NULL,
    last_seq       INTEGER NOT NULL CHECK (last_seq >= 0),
    tokens         INTEGER NOT NULL,
    cursor_seq     INTEGER NOT NULL DEFAULT 0 CHECK (cursor_seq BETWEEN 0 AND last_seq),
    cursor_tokens  INTEGER NOT NULL DEFAULT 0,
    summary        TEXT NOT NULL DEFAULT '',
    summary_words  INTEGER NOT NULL DEFAULT 0,
    summary_tokens INTEGER NOT NULL DEFAULT 0,
    revision       INTEGER NOT NULL DEFAULT 0,
    lease_token    BLOB,
    lease_until    INTEGER,
    failures       INTEGER NOT NULL DEFAULT 0,
    retry_at       INTEGER,
    last_failure   TEXT,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    activity_hour  INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id)
) STRICT;

CREATE INDEX sessions_by_activity ON sessions (tenant_id, activity_hour DESC);
CREATE INDEX sessions_by_user ON sessions (tenant_id, user_id, activity_hour DESC);

CREATE TABLE messages (
    tenant_id      TEXT NOT NULL,
    session_id     TEXT NOT NULL,
    seq            INTEGER NOT NULL CHECK (seq >= 1),
    role           TEXT NOT NULL,
    tool_call_ids  TEXT,          -- JSON list of the ids of the message's tool calls
    tool_result_of TEXT,          -- JSON string: the id of the tool call that the message answers
    tokens         INTEGER NOT NULL,
    message        TEXT NOT NULL, -- JSON exactly as the client sent it
    created_at     INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, seq),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE revisions (
    tenant_id      TEXT NOT NULL,
    session_id     TEXT NOT NULL,
    revision       INTEGER NOT NULL CHECK (revision >= 1),
    kind           TEXT NOT NULL,
    from_seq       INTEGER,
    to_seq         INTEGER,
    cursor_seq     INTEGER NOT NULL,
    summary        TEXT NOT NULL,
    summary_words  INTEGER NOT NULL,
    summary_tokens INTEGER NOT NULL,
    added          TEXT NOT NULL,
    meta           TEXT,      -- JSON
    source         TEXT,      -- JSON
    created_at     INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, revision),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT;

CREATE TABLE idempotency_keys (
    tenant_id   TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    key         TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    first_seq   INTEGER NOT NULL,
    last_seq    INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, key),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE memories (
    tenant_id  TEXT NOT NULL,
    user_id    TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version >= 1),
    content    TEXT NOT NULL,
    words      INTEGER NOT NULL,
    tokens     INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, user_id)
) STRICT;

CREATE TABLE memory_revisions (
    tenant_id  TEXT NOT NULL,
    user_id    TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version >= 1),
    content    TEXT NOT NULL,
    words      INTEGER NOT NULL,
    tokens     INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, user_id, version),
    FOREIGN KEY (tenant_id, user_id) REFERENCES memories ON DELETE CASCADE
) STRICT;

-- Tokens that the consolidations of a tenant used per day, for the daily limit. They belong to the tenant: the erasure of
-- a session or a user does not remove them, and they contain nothing about either.
CREATE TABLE token_usage (
    tenant_id TEXT NOT NULL,
    day       INTEGER NOT NULL,     -- days since 1970-01-01, in UTC
    tokens    INTEGER NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
) STRICT, WITHOUT ROWID;

-- API keys, as hashes. A revoked key keeps its row, so that a service still requires a key after its last key was revoked.
-- The tenant is not in the primary key, because a lookup determines it.
CREATE TABLE api_keys (
    key_id     TEXT NOT NULL PRIMARY KEY,
    tenant_id  TEXT NOT NULL,
    name       TEXT,
    scope      TEXT NOT NULL CHECK (scope IN ('read', 'write', 'admin')),
    hash       BLOB NOT NULL CHECK (length(hash) = 32),     -- SHA-256 of the complete key
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- Messages and revisions are append-only. Their rows can be deleted only together with the session: the erasure deletes
-- the session first, and the foreign key cascades.
CREATE TRIGGER messages_reject_update BEFORE UPDATE ON messages
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER messages_reject_delete BEFORE DELETE ON messages
WHEN EXISTS (SELECT 1 FROM sessions WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_reject_update BEFORE UPDATE ON revisions
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_reject_delete BEFORE DELETE ON revisions
WHEN EXISTS (SELECT 1 FROM sessions WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;
-- INSERT OR REPLACE deletes the old row without running the triggers above.
CREATE TRIGGER messages_reject_replace BEFORE INSERT ON messages
WHEN EXISTS (SELECT 1 FROM messages WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND seq = NEW.seq)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_reject_replace BEFORE INSERT ON revisions
WHEN EXISTS (SELECT 1 FROM revisions
             WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND revision = NEW.revision)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;

-- The search index: the lexemes of each message, as `domain::search::lexemes` makes them.
CREATE TABLE search (
    id         INTEGER PRIMARY KEY,   -- ascending: a higher id was stored later
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    lexemes    TEXT NOT NULL,         -- separated by spaces
    UNIQUE (tenant_id, session_id, seq)
) STRICT;
CREATE INDEX search_by_time ON search (tenant_id, created_at, id);

-- Rows enter the full-text index in groups of 256: writing an index segment for each message takes longer than storing the
-- message, and segments must be merged later. `through_id` is the last row in the full-text index; searches read the rows
-- after it one by one. SQLite reuses ids above the highest one that is left, so `through_id` must never be higher than that.
CREATE TABLE search_lexemes_progress (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    through_id INTEGER NOT NULL
) STRICT;
INSERT INTO search_lexemes_progress (id, through_id) VALUES (1, 0);
CREATE VIEW search_lexemes_content AS
    SELECT id, lexemes FROM search WHERE id <= (SELECT through_id FROM search_lexemes_progress);

-- The full-text index stores no text of its own. Lexemes are letters, digits and colons in lower case, so this tokenizer
-- splits them at spaces and does not change them. Deleting a row removes its lexemes from the pages of the index, so that
-- erased text does not stay in the file. FTS5 needs the old lexemes for that, which is why `search` keeps them.
CREATE VIRTUAL TABLE search_lexemes USING fts5 (
    lexemes, content = 'search_lexemes_content', content_rowid = 'id', detail = 'none', columnsize = 0,
    tokenize = "ascii tokenchars ':'"
);
INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('secure-delete', 1);
-- Segments are merged only when there are 16 of a size, because the writer does that work.
INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('automerge', 16);
CREATE TRIGGER search_add_lexemes AFTER INSERT ON search WHEN NEW.id % 256 = 0
BEGIN
    INSERT INTO search_lexemes (rowid, lexemes)
        SELECT id, lexemes FROM search
        WHERE id > (SELECT through_id FROM search_lexemes_progress) AND id <= NEW.id ORDER BY id;
    UPDATE search_lexemes_progress SET through_id = NEW.id;
END;
CREATE TRIGGER search_delete_lexemes AFTER DELETE ON search
BEGIN
    INSERT INTO search_lexemes (search_lexemes, rowid, lexemes)
        SELECT 'delete', OLD.id, OLD.lexemes WHERE OLD.id <= (SELECT through_id FROM search_lexemes_progress);
    UPDATE search_lexemes_progress SET through_id = (SELECT coalesce(max(id), 0) FROM search)
        WHERE through_id > (SELECT coalesce(max(id), 0) FROM search);
END;

-- Stored messages that are not in the index yet. An exchange adds a row here, which is cheap. The service indexes many
-- messages at a time, about a second later, and a search first indexes the pending messages that it could find.
CREATE TABLE search_pending (
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    first_seq  INTEGER NOT NULL,
    last_seq   INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,   -- size of the messages as JSON
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, first_seq)
) STRICT, WITHOUT ROWID;

-- Messages to index again up to `through_seq`: those stored while search was disabled, and all messages after a change of
-- the analyzer. `precis reindex` processes them.
CREATE TABLE search_reindex (
    tenant_id   TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    done_seq    INTEGER NOT NULL DEFAULT 0,
    through_seq INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

-- The analyzer that the index was built with, in one row: `Analyzer::version`.
CREATE TABLE search_analyzer (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    version TEXT NOT NULL
) STRICT;

-- Deletes the search rows of an erased session.
CREATE TRIGGER sessions_delete_search_rows AFTER DELETE ON sessions
BEGIN
    DELETE FROM search_pending WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
END;

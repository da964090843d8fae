-- Sessions, their history, the revisions of their summaries, idempotency keys, memory documents.
-- The same tables and columns as for Postgres; times are microseconds since 1970, in UTC.

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
CREATE INDEX sessions_of_user ON sessions (tenant_id, user_id, activity_hour DESC);

CREATE TABLE messages (
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq        INTEGER NOT NULL CHECK (seq >= 1),
    role       TEXT NOT NULL,
    opens      TEXT,          -- JSON list of the ids of its tool calls
    answers    TEXT,          -- JSON: the id of the tool call that it answers
    tokens     INTEGER NOT NULL,
    message    TEXT NOT NULL, -- JSON, as the client gave it
    created_at INTEGER NOT NULL,
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

-- What was said stays said. A row of a session's record goes only with the session itself: by the cascade of its
-- erasure, which removes the session first.
CREATE TRIGGER messages_are_never_changed BEFORE UPDATE ON messages
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER messages_are_never_removed BEFORE DELETE ON messages
WHEN EXISTS (SELECT 1 FROM sessions WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_are_never_changed BEFORE UPDATE ON revisions
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_are_never_removed BEFORE DELETE ON revisions
WHEN EXISTS (SELECT 1 FROM sessions WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;
-- INSERT OR REPLACE removes the old row without asking the triggers above.
CREATE TRIGGER messages_are_never_replaced BEFORE INSERT ON messages
WHEN EXISTS (SELECT 1 FROM messages WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND seq = NEW.seq)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;
CREATE TRIGGER revisions_are_never_replaced BEFORE INSERT ON revisions
WHEN EXISTS (SELECT 1 FROM revisions
             WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND revision = NEW.revision)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;

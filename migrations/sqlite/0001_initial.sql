-- The schema of precis on SQLite. Times are microseconds since 1970. Comments on columns: see the schema for Postgres.

CREATE TABLE sessions (
    tenant_id         TEXT NOT NULL,
    session_id        TEXT NOT NULL,
    user_id           TEXT NOT NULL,
    metadata          TEXT NOT NULL,
    last_seq          INTEGER NOT NULL CHECK (last_seq >= 0),
    tokens            INTEGER NOT NULL,
    stored_bytes      INTEGER NOT NULL DEFAULT 0,
    cursor_seq        INTEGER NOT NULL DEFAULT 0 CHECK (cursor_seq BETWEEN 0 AND last_seq),
    cursor_tokens     INTEGER NOT NULL DEFAULT 0,
    summary           TEXT NOT NULL DEFAULT '',
    summary_words     INTEGER NOT NULL DEFAULT 0,
    summary_tokens    INTEGER NOT NULL DEFAULT 0,
    revision          INTEGER NOT NULL DEFAULT 0,
    lease_token       BLOB,
    lease_until       INTEGER,
    failures          INTEGER NOT NULL DEFAULT 0,
    retry_at          INTEGER,
    last_failure      TEXT,
    window_tokens     INTEGER,
    window_fixed      INTEGER,
    language          TEXT,
    incarnation       BLOB,
    forked_from       TEXT,
    forked_through    INTEGER,
    fork_kind         TEXT CHECK (fork_kind IN ('fork', 'rewind')),
    lineage           BLOB,
    retention_seconds INTEGER CHECK (retention_seconds >= 0),
    retained_from     INTEGER,
    branched_at       INTEGER,
    -- The reservation of a session that is written or erased in several transactions: see `storage::import`.
    import_token      BLOB,
    import_until      INTEGER,
    import_bound      INTEGER,
    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    activity_hour     INTEGER NOT NULL,
    own_expiry_hour   INTEGER GENERATED ALWAYS AS
        (CASE WHEN retention_seconds > 0 THEN activity_hour + retention_seconds / 3600 END) VIRTUAL,
    PRIMARY KEY (tenant_id, session_id)
) STRICT;

CREATE INDEX sessions_by_activity ON sessions (tenant_id, activity_hour DESC);
CREATE INDEX sessions_by_user ON sessions (tenant_id, user_id, activity_hour DESC);
CREATE INDEX sessions_by_origin ON sessions (tenant_id, forked_from, activity_hour DESC) WHERE forked_from IS NOT NULL;
CREATE INDEX sessions_by_lineage ON sessions (tenant_id, lineage) WHERE lineage IS NOT NULL;
CREATE INDEX sessions_by_own_expiry ON sessions (tenant_id, own_expiry_hour) WHERE own_expiry_hour IS NOT NULL;
CREATE INDEX sessions_by_branch_age ON sessions (tenant_id, branched_at) WHERE branched_at IS NOT NULL;
CREATE INDEX sessions_by_import ON sessions (import_until) WHERE import_until IS NOT NULL;
CREATE INDEX sessions_by_language ON sessions (tenant_id, language) WHERE language <> 'english';

-- The id is also the id in the search index. `message` is the last column, because a long text is in pages of its own.
CREATE TABLE messages (
    id             INTEGER PRIMARY KEY,
    tenant_id      TEXT NOT NULL,
    session_id     TEXT NOT NULL,
    seq            INTEGER NOT NULL CHECK (seq >= 1),
    role           TEXT NOT NULL,
    tool_call_ids  TEXT,
    tool_result_of TEXT,
    tokens         INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    redaction      TEXT,
    message        TEXT NOT NULL,
    UNIQUE (tenant_id, session_id, seq),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT;

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
    meta           TEXT,
    source         TEXT,
    redacted_seq   INTEGER,
    created_at     INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, revision),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT;

CREATE TABLE consolidation_records (
    tenant_id  TEXT NOT NULL,
    session_id TEXT NOT NULL,
    number     INTEGER NOT NULL CHECK (number >= 1),
    revision   INTEGER,
    details    TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE,
    FOREIGN KEY (tenant_id, session_id, revision) REFERENCES revisions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX consolidation_records_by_revision ON consolidation_records (tenant_id, session_id, revision, number);

CREATE TABLE idempotency_keys (
    tenant_id   TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    key         TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    first_seq   INTEGER NOT NULL,
    last_seq    INTEGER NOT NULL,
    has_user    INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, session_id, key),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_keys_by_time ON idempotency_keys (tenant_id, session_id, created_at);

CREATE TABLE memories (
    tenant_id   TEXT NOT NULL,
    user_id     TEXT NOT NULL,
    version     INTEGER NOT NULL CHECK (version >= 1),
    content     TEXT NOT NULL,
    words       INTEGER NOT NULL,
    tokens      INTEGER NOT NULL,
    incarnation BLOB,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, user_id)
) STRICT;

CREATE TABLE memory_revisions (
    tenant_id  TEXT NOT NULL,
    user_id    TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version >= 1),
    content    TEXT NOT NULL,
    words      INTEGER NOT NULL,
    tokens     INTEGER NOT NULL,
    author     TEXT,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant_id, user_id, version),
    FOREIGN KEY (tenant_id, user_id) REFERENCES memories ON DELETE CASCADE
) STRICT;

CREATE TABLE token_usage (
    tenant_id TEXT NOT NULL,
    day       INTEGER NOT NULL,
    tokens    INTEGER NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
) STRICT, WITHOUT ROWID;

CREATE TABLE retention_rules (
    tenant_id TEXT NOT NULL,
    user_id   TEXT NOT NULL,
    seconds   INTEGER NOT NULL CHECK (seconds >= 0),
    PRIMARY KEY (tenant_id, user_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
    key_id     TEXT NOT NULL PRIMARY KEY,
    tenant_id  TEXT NOT NULL,
    name       TEXT,
    scope      TEXT NOT NULL CHECK (scope IN ('read', 'write', 'admin')),
    hash       BLOB NOT NULL CHECK (length(hash) = 32),
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id);

CREATE TABLE tenants (
    tenant_id TEXT NOT NULL PRIMARY KEY
) STRICT, WITHOUT ROWID;

CREATE TABLE worker_leases (
    worker      TEXT NOT NULL PRIMARY KEY,
    token       BLOB,
    lease_until INTEGER,
    finished_at INTEGER
) STRICT, WITHOUT ROWID;

-- The search index: the terms of each message, separated by spaces, and those of its tenant, session, user and role. The index
-- keeps neither the text nor positions. All characters except spaces belong to terms, because the analyzer has split the text.
CREATE VIRTUAL TABLE search_terms USING fts5 (
    terms, content = '', contentless_delete = 1, detail = none,
    tokenize = "unicode61 remove_diacritics 0 categories 'L* M* N* P* S* Co'"
);

CREATE TABLE search_analyzer (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    version TEXT NOT NULL
) STRICT;

CREATE TRIGGER sessions_add_tenant AFTER INSERT ON sessions
WHEN NOT EXISTS (SELECT 1 FROM tenants WHERE tenant_id = NEW.tenant_id)
BEGIN
    INSERT INTO tenants (tenant_id) VALUES (NEW.tenant_id);
END;

CREATE TRIGGER sessions_reject_importing BEFORE UPDATE OF last_seq, user_id, metadata ON sessions
WHEN OLD.import_token IS NOT NULL AND NEW.import_token IS OLD.import_token
BEGIN
    SELECT RAISE(ABORT, 'session-importing');
END;

CREATE TRIGGER sessions_release_forks AFTER DELETE ON sessions
BEGIN
    UPDATE sessions SET forked_from = NULL, forked_through = NULL, fork_kind = NULL
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id;
END;

CREATE TRIGGER messages_reject_replace BEFORE INSERT ON messages
WHEN EXISTS (SELECT 1 FROM messages WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND seq = NEW.seq)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure of a whole session removes from it');
END;

CREATE TRIGGER messages_reject_delete BEFORE DELETE ON messages
WHEN EXISTS (SELECT 1 FROM sessions
             WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND last_seq >= OLD.seq)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure or the rewind of a session removes from it');
END;

CREATE TRIGGER messages_reject_update BEFORE UPDATE ON messages
WHEN NOT (OLD.redaction IS NULL AND NEW.redaction IS NOT NULL
    AND (OLD.id, OLD.tenant_id, OLD.session_id, OLD.seq, OLD.role, OLD.created_at)
        = (NEW.id, NEW.tenant_id, NEW.session_id, NEW.seq, NEW.role, NEW.created_at)
    AND OLD.tool_call_ids IS NEW.tool_call_ids AND OLD.tool_result_of IS NEW.tool_result_of)
BEGIN
    SELECT RAISE(ABORT, 'messages is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it');
END;

CREATE TRIGGER messages_remove_from_search AFTER DELETE ON messages
BEGIN
    DELETE FROM search_terms WHERE rowid = OLD.id;
END;

CREATE TRIGGER messages_remove_redacted_from_search AFTER UPDATE ON messages
BEGIN
    DELETE FROM search_terms WHERE rowid = OLD.id;
END;

CREATE TRIGGER revisions_reject_replace BEFORE INSERT ON revisions
WHEN EXISTS (SELECT 1 FROM revisions
             WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND revision = NEW.revision)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure of a whole session removes from it');
END;

CREATE TRIGGER revisions_reject_delete BEFORE DELETE ON revisions
WHEN EXISTS (SELECT 1 FROM sessions
             WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND revision >= OLD.revision)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure or the rewind of a session removes from it');
END;

CREATE TRIGGER revisions_reject_update BEFORE UPDATE ON revisions
WHEN NOT (OLD.redacted_seq IS NULL AND NEW.redacted_seq IS NOT NULL AND NEW.summary = '' AND NEW.added = ''
    AND (OLD.tenant_id, OLD.session_id, OLD.revision, OLD.kind, OLD.cursor_seq, OLD.created_at)
        = (NEW.tenant_id, NEW.session_id, NEW.revision, NEW.kind, NEW.cursor_seq, NEW.created_at)
    AND OLD.from_seq IS NEW.from_seq AND OLD.to_seq IS NEW.to_seq AND OLD.source IS NEW.source)
BEGIN
    SELECT RAISE(ABORT, 'revisions is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it');
END;

-- Sessions, their history, the revisions of their summaries, idempotency keys, memory documents.
--
-- Every primary key begins with the tenant and, where there is one, the session: the schema can be sharded by either,
-- and all rows of a session live together.

CREATE TABLE sessions (
    tenant_id      text COLLATE "C" NOT NULL,
    session_id     text COLLATE "C" NOT NULL,
    user_id        text COLLATE "C" NOT NULL,
    metadata       text NOT NULL,
    last_seq       bigint NOT NULL CHECK (last_seq >= 0),
    tokens         bigint NOT NULL,
    cursor_seq     bigint NOT NULL DEFAULT 0 CHECK (cursor_seq BETWEEN 0 AND last_seq),
    cursor_tokens  bigint NOT NULL DEFAULT 0,
    summary        text NOT NULL DEFAULT '',
    summary_words  bigint NOT NULL DEFAULT 0,
    summary_tokens bigint NOT NULL DEFAULT 0,
    revision       bigint NOT NULL DEFAULT 0,
    lease_token    uuid,
    lease_until    timestamptz,
    failures       integer NOT NULL DEFAULT 0,
    retry_at       timestamptz,
    last_failure   text,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    activity_hour  bigint NOT NULL,
    PRIMARY KEY (tenant_id, session_id)
) WITH (fillfactor = 70);

-- The list of sessions, newest activity first. It orders by hour, and within the hour by time: an index on the time
-- itself would change with every exchange, and with it each update would have to touch every index of the table.
CREATE INDEX sessions_by_activity ON sessions (tenant_id, activity_hour DESC);
CREATE INDEX sessions_of_user ON sessions (tenant_id, user_id, activity_hour DESC);

CREATE TABLE messages (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL CHECK (seq >= 1),
    role       text NOT NULL,
    opens      text,          -- JSON list of the ids of its tool calls
    answers    text,          -- JSON: the id of the tool call that it answers
    tokens     bigint NOT NULL,
    message    text NOT NULL, -- JSON, as the client gave it; jsonb would reorder it and refuse \u0000
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, seq),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);

CREATE TABLE revisions (
    tenant_id      text COLLATE "C" NOT NULL,
    session_id     text COLLATE "C" NOT NULL,
    revision       bigint NOT NULL CHECK (revision >= 1),
    kind           text NOT NULL,
    from_seq       bigint,
    to_seq         bigint,
    cursor_seq     bigint NOT NULL,
    summary        text NOT NULL,
    summary_words  bigint NOT NULL,
    summary_tokens bigint NOT NULL,
    added          text NOT NULL,
    meta           text,      -- JSON
    source         text,      -- JSON
    created_at     timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, revision),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);

CREATE TABLE idempotency_keys (
    tenant_id   text COLLATE "C" NOT NULL,
    session_id  text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    first_seq   bigint NOT NULL,
    last_seq    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, key),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);

CREATE TABLE memories (
    tenant_id  text COLLATE "C" NOT NULL,
    user_id    text COLLATE "C" NOT NULL,
    version    bigint NOT NULL CHECK (version >= 1),
    content    text NOT NULL,
    words      bigint NOT NULL,
    tokens     bigint NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, user_id)
);

CREATE TABLE memory_revisions (
    tenant_id  text COLLATE "C" NOT NULL,
    user_id    text COLLATE "C" NOT NULL,
    version    bigint NOT NULL CHECK (version >= 1),
    content    text NOT NULL,
    words      bigint NOT NULL,
    tokens     bigint NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, user_id, version),
    FOREIGN KEY (tenant_id, user_id) REFERENCES memories ON DELETE CASCADE
);

-- What was said stays said. A row of a session's record goes only with the session itself: by the cascade of its
-- erasure, which removes the session first.
CREATE FUNCTION refuse_change_of_record() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND NOT EXISTS (
        SELECT FROM sessions WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id
    ) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure of a whole session removes from it', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON messages
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_record();
CREATE TRIGGER append_only_whole BEFORE TRUNCATE ON messages
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_record();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON revisions
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_record();
CREATE TRIGGER append_only_whole BEFORE TRUNCATE ON revisions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_record();

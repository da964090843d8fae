-- The schema of precis on Postgres.
--
-- Every primary key begins with the tenant, followed by the session if there is one: the schema can be sharded by either,
-- and all rows of a session are stored together. See `docs/architecture.md` for the columns.

CREATE TABLE sessions (
    tenant_id         text COLLATE "C" NOT NULL,
    session_id        text COLLATE "C" NOT NULL,
    user_id           text COLLATE "C" NOT NULL,    -- empty if the session has no user
    metadata          text NOT NULL,
    last_seq          bigint NOT NULL CHECK (last_seq >= 0),
    tokens            bigint NOT NULL,
    stored_bytes      bigint NOT NULL DEFAULT 0,    -- size of the messages as JSON
    cursor_seq        bigint NOT NULL DEFAULT 0 CHECK (cursor_seq BETWEEN 0 AND last_seq),
    cursor_tokens     bigint NOT NULL DEFAULT 0,
    summary           text NOT NULL DEFAULT '',
    summary_words     bigint NOT NULL DEFAULT 0,
    summary_tokens    bigint NOT NULL DEFAULT 0,
    revision          bigint NOT NULL DEFAULT 0,
    lease_token       uuid,
    lease_until       timestamptz,
    failures          integer NOT NULL DEFAULT 0,
    retry_at          timestamptz,
    last_failure      text,
    window_tokens     bigint,
    window_fixed      bigint,
    language          text COLLATE "C",    -- of its messages; null if it is not known
    -- Changes if the session is erased and created again, gets its user, or is rewound or redacted.
    incarnation       uuid NOT NULL DEFAULT gen_random_uuid(),
    -- The session and the message that a session was forked from. `rewind` marks the branch that a rewind of `forked_from`
    -- has removed from that session; `forked_through` is then the last message that both have in common.
    forked_from       text COLLATE "C",
    forked_through    bigint,
    fork_kind         text CHECK (fork_kind IN ('fork', 'rewind')),
    -- The same for all sessions that forks and rewinds have made of one session, also after its erasure. NULL if a session was
    -- never copied.
    lineage           uuid,
    retention_seconds bigint CHECK (retention_seconds >= 0),
    -- Imports and branches keep the time of their last exchange, but their retention begins when they were created:
    -- `retained_from`. Only branches have `branched_at`, which is the same time.
    retained_from     timestamptz,
    branched_at       timestamptz,
    created_at        timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    activity_hour     bigint NOT NULL,
    own_expiry_hour   bigint GENERATED ALWAYS AS
        (CASE WHEN retention_seconds > 0 THEN activity_hour + retention_seconds / 3600 END) STORED,
    PRIMARY KEY (tenant_id, session_id)
) WITH (fillfactor = 70);

-- The list of sessions is sorted by the time of the last activity, but indexed by its hour only. An index on the time
-- itself would change with every exchange, and then each update would have to write to every index of the table.
CREATE INDEX sessions_by_activity ON sessions (tenant_id, activity_hour DESC);
CREATE INDEX sessions_by_user ON sessions (tenant_id, user_id, activity_hour DESC);
CREATE INDEX sessions_by_origin ON sessions (tenant_id, forked_from, activity_hour DESC) WHERE forked_from IS NOT NULL;
CREATE INDEX sessions_by_lineage ON sessions (tenant_id, lineage) WHERE lineage IS NOT NULL;
CREATE INDEX sessions_by_language ON sessions (tenant_id, language) WHERE language <> 'english';
CREATE INDEX sessions_by_own_expiry ON sessions (tenant_id, own_expiry_hour) WHERE own_expiry_hour IS NOT NULL;
CREATE INDEX sessions_by_branch_age ON sessions (tenant_id, branched_at) WHERE branched_at IS NOT NULL;

-- A trigger deletes the messages of a session: a foreign key would cost a lookup for each message.
CREATE TABLE messages (
    tenant_id      text COLLATE "C" NOT NULL,
    session_id     text COLLATE "C" NOT NULL,
    seq            bigint NOT NULL CHECK (seq >= 1),
    role           text NOT NULL,
    tool_call_ids  text,          -- JSON list of the ids of the message's tool calls
    tool_result_of text,          -- JSON string: the id of the tool call that the message answers
    tokens         bigint NOT NULL,
    message        text NOT NULL, -- JSON as the client sent it; jsonb would reorder it and reject \u0000
    created_at     timestamptz NOT NULL,
    redaction      text,          -- JSON: `domain::redaction::RedactionMark`
    PRIMARY KEY (tenant_id, session_id, seq)
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
    redacted_seq   bigint,    -- the message whose redaction removed the texts
    PRIMARY KEY (tenant_id, session_id, revision),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);

-- Records of consolidation: one for each revision that a run commits, and one for each run that ends without a commit.
CREATE TABLE consolidation_records (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    number     bigint NOT NULL CHECK (number >= 1),
    revision   bigint,
    details    text NOT NULL, -- JSON: `domain::consolidation_record::RecordDetails`
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE,
    CONSTRAINT consolidation_records_of_revision FOREIGN KEY (tenant_id, session_id, revision)
        REFERENCES revisions ON DELETE CASCADE
);
-- For the removal of a revision, and of the oldest records without a revision.
CREATE INDEX consolidation_records_by_revision ON consolidation_records (tenant_id, session_id, revision, number);

-- A trigger deletes the keys of a session.
CREATE TABLE idempotency_keys (
    tenant_id   text COLLATE "C" NOT NULL,
    session_id  text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    first_seq   bigint NOT NULL,
    last_seq    bigint NOT NULL,
    created_at  timestamptz NOT NULL,
    has_user    boolean NOT NULL,   -- the session had its user after the exchange
    PRIMARY KEY (tenant_id, session_id, key)
);
-- The condition, which is always true, keeps plans for empty tables from using this index for a key.
CREATE INDEX idempotency_keys_by_time ON idempotency_keys (tenant_id, session_id, created_at) WHERE first_seq > 0;

CREATE TABLE memories (
    tenant_id   text COLLATE "C" NOT NULL,
    user_id     text COLLATE "C" NOT NULL,
    version     bigint NOT NULL CHECK (version >= 1),
    content     text NOT NULL,
    words       bigint NOT NULL,
    tokens      bigint NOT NULL,
    incarnation uuid NOT NULL DEFAULT gen_random_uuid(),    -- changes if the document is erased and written again
    created_at  timestamptz NOT NULL,
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
    author     text,
    PRIMARY KEY (tenant_id, user_id, version),
    FOREIGN KEY (tenant_id, user_id) REFERENCES memories ON DELETE CASCADE
);

-- Tokens that the consolidations of a tenant used per day, for the daily limit. They belong to the tenant: the erasure of
-- a session or a user does not remove them, and they contain nothing about either.
CREATE TABLE token_usage (
    tenant_id text COLLATE "C" NOT NULL,
    day       bigint NOT NULL,      -- days since 1970-01-01, in UTC
    tokens    bigint NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
);

-- The retention of a tenant, in the row with an empty user_id, and of its users, in seconds; 0 = never. A value of a session is
-- in its row. The most specific value applies.
CREATE TABLE retention_rules (
    tenant_id text COLLATE "C" NOT NULL,
    user_id   text COLLATE "C" NOT NULL,
    seconds   bigint NOT NULL CHECK (seconds >= 0),
    PRIMARY KEY (tenant_id, user_id)
);

-- API keys, as hashes. A revoked key keeps its row, so that a service still requires a key after its last key was revoked.
-- The tenant is not in the primary key, because a lookup determines it.
CREATE TABLE api_keys (
    key_id     text COLLATE "C" PRIMARY KEY,
    tenant_id  text COLLATE "C" NOT NULL,
    name       text,
    scope      text NOT NULL CHECK (scope IN ('read', 'write', 'admin')),
    hash       bytea NOT NULL CHECK (octet_length(hash) = 32),     -- SHA-256 of the complete key
    created_at timestamptz NOT NULL,
    revoked_at timestamptz
);
CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id);

-- All tenants that have, or had, a session. Workers read it before they name a tenant.
CREATE TABLE tenants (
    tenant_id text COLLATE "C" PRIMARY KEY
);

-- Background work that one replica does at a time. A lease of a few seconds is renewed while the work runs.
CREATE TABLE worker_leases (
    worker      text COLLATE "C" PRIMARY KEY,
    token       uuid,
    lease_until timestamptz,
    finished_at timestamptz
);

-- The search index: the terms of each message, and those of its tenant, session, user and role.
--
-- The table has no row-level security. With a policy, Postgres would read the whole table instead of its index, because `@@` is
-- not leakproof. Instead, two functions of `storage` alone name the table, both with the tenant, and the texts of hits are read
-- from `messages`, which has a policy. There is no index on the session: its term finds the rows.
CREATE TABLE search_terms (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL,
    micros     bigint NOT NULL,     -- the time of the message, in microseconds since 1970
    terms      tsvector NOT NULL
) WITH (toast_tuple_target = 4096);
-- For the newest messages with a common word.
CREATE INDEX search_terms_by_time ON search_terms (tenant_id, micros DESC, seq DESC);
CREATE INDEX search_terms_by_term ON search_terms USING gin (terms) WITH (fastupdate = on, gin_pending_list_limit = 256);

-- The analyzer that the search index was built with; no row if it may be incomplete.
CREATE TABLE search_analyzer (
    id      integer PRIMARY KEY CHECK (id = 1),
    version text NOT NULL
);

-- Row-level security is the second barrier between tenants, after the tenant in every statement. A transaction sees the
-- rows of the tenant in its setting precis.tenant, and no rows without that setting. FORCE is needed because precis
-- usually owns its tables and owners are exempt otherwise. Superusers and roles with BYPASSRLS remain exempt.
CREATE FUNCTION precis_tenant() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT current_setting('precis.tenant', true) $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['sessions', 'messages', 'revisions', 'consolidation_records', 'idempotency_keys', 'memories',
        'memory_revisions', 'token_usage', 'retention_rules'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant_isolation ON %I USING (tenant_id = precis_tenant())', name);
    END LOOP;
END
$$;

CREATE FUNCTION add_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM tenants WHERE tenant_id = NEW.tenant_id;
    IF NOT FOUND THEN
        INSERT INTO tenants (tenant_id) VALUES (NEW.tenant_id) ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER add_tenant AFTER INSERT ON sessions FOR EACH ROW EXECUTE FUNCTION add_tenant();

-- Messages and revisions are append-only. Messages after the `last_seq` of their session are not part of its history, and
-- revisions after its `revision` are not part of its revisions: erasures delete the session first, and rewinds lower these
-- numbers before they delete the rows. A redaction changes a row once.
CREATE FUNCTION reject_history_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A condition of its own for DELETE, because OLD has no columns in the trigger of TRUNCATE.
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND last_seq >= OLD.seq
        ) THEN
            RETURN OLD;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        IF OLD.redaction IS NULL AND NEW.redaction IS NOT NULL
            AND (OLD.tenant_id, OLD.session_id, OLD.seq, OLD.role, OLD.tool_call_ids, OLD.tool_result_of, OLD.created_at)
                IS NOT DISTINCT FROM
                (NEW.tenant_id, NEW.session_id, NEW.seq, NEW.role, NEW.tool_call_ids, NEW.tool_result_of, NEW.created_at)
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it',
        TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON messages
    FOR EACH ROW EXECUTE FUNCTION reject_history_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON messages
    FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change();

-- A function of its own, because the name of the table does not tell it apart: a partition has another name.
CREATE FUNCTION reject_revision_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND revision >= OLD.revision
        ) THEN
            RETURN OLD;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        IF OLD.redacted_seq IS NULL AND NEW.redacted_seq IS NOT NULL AND NEW.summary = '' AND NEW.added = ''
            AND (OLD.tenant_id, OLD.session_id, OLD.revision, OLD.kind, OLD.from_seq, OLD.to_seq, OLD.cursor_seq, OLD.source,
                OLD.created_at)
                IS NOT DISTINCT FROM
                (NEW.tenant_id, NEW.session_id, NEW.revision, NEW.kind, NEW.from_seq, NEW.to_seq, NEW.cursor_seq, NEW.source,
                NEW.created_at)
        THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it, and only a redaction changes it',
        TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON revisions
    FOR EACH ROW EXECUTE FUNCTION reject_revision_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON revisions
    FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change();

-- A session is erased with its messages, and with the branches that rewinds removed from it. A fork is independent, and only
-- forgets the id of the erased session. Each statement sees the branches of a rewind that the erasure has waited for.
CREATE FUNCTION delete_session_rows() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    DELETE FROM messages WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM idempotency_keys WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM sessions
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id AND fork_kind = 'rewind';
    UPDATE sessions SET forked_from = NULL, forked_through = NULL, fork_kind = NULL
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER delete_session_rows AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION delete_session_rows();

-- Returns the query for the messages of a session, by the term of `domain::search::index_terms`.
CREATE FUNCTION session_query(of_tenant text, of_session text) RETURNS tsquery LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CAST(''':s' || left(encode(sha256(convert_to(of_tenant || E'\n' || of_session, 'UTF8')), 'hex'), 16) || '''' AS tsquery)
$$;

-- Messages that are erased, rewound or redacted leave the search index in the same statement.
CREATE FUNCTION remove_from_search() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    range record;
BEGIN
    FOR range IN
        SELECT tenant_id, session_id, min(seq) AS first_seq, max(seq) AS last_seq FROM removed GROUP BY tenant_id, session_id
    LOOP
        -- The concatenation keeps plans for empty tables from using the index of times.
        DELETE FROM search_terms
        WHERE tenant_id || '' = range.tenant_id AND session_id = range.session_id AND seq BETWEEN range.first_seq AND range.last_seq
            AND terms @@ session_query(range.tenant_id, range.session_id);
    END LOOP;
    RETURN NULL;
END
$$;
CREATE TRIGGER remove_deleted_from_search AFTER DELETE ON messages
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION remove_from_search();
CREATE TRIGGER remove_redacted_from_search AFTER UPDATE ON messages
    REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION remove_from_search();

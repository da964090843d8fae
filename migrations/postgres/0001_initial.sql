-- The schema of precis on Postgres.
--
-- Every primary key begins with the tenant, followed by the session if there is one: the schema can be sharded by either,
-- and all rows of a session are stored together.

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

-- The list of sessions is sorted by the time of the last activity, but indexed by its hour only. An index on the time
-- itself would change with every exchange, and then each update would have to write to every index of the table.
CREATE INDEX sessions_by_activity ON sessions (tenant_id, activity_hour DESC);
CREATE INDEX sessions_by_user ON sessions (tenant_id, user_id, activity_hour DESC);

CREATE TABLE messages (
    tenant_id      text COLLATE "C" NOT NULL,
    session_id     text COLLATE "C" NOT NULL,
    seq            bigint NOT NULL CHECK (seq >= 1),
    role           text NOT NULL,
    tool_call_ids  text,          -- JSON list of the ids of the message's tool calls
    tool_result_of text,          -- JSON string: the id of the tool call that the message answers
    tokens         bigint NOT NULL,
    message        text NOT NULL, -- JSON exactly as the client sent it; jsonb would reorder it and reject \u0000
    created_at     timestamptz NOT NULL,
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

-- Tokens that the consolidations of a tenant used per day, for the daily limit. They belong to the tenant: the erasure of
-- a session or a user does not remove them, and they contain nothing about either.
CREATE TABLE token_usage (
    tenant_id text COLLATE "C" NOT NULL,
    day       bigint NOT NULL,      -- days since 1970-01-01, in UTC
    tokens    bigint NOT NULL CHECK (tokens >= 0),
    PRIMARY KEY (tenant_id, day)
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

-- Messages and revisions are append-only. Their rows can be deleted only together with the session: the erasure deletes
-- the session first, and the foreign key cascades.
CREATE FUNCTION reject_history_change() RETURNS trigger LANGUAGE plpgsql AS $$
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
    FOR EACH ROW EXECUTE FUNCTION reject_history_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON messages
    FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON revisions
    FOR EACH ROW EXECUTE FUNCTION reject_history_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON revisions
    FOR EACH STATEMENT EXECUTE FUNCTION reject_history_change();

-- Row-level security is the second barrier between tenants, after the tenant in every statement. A transaction sees the
-- rows of the tenant in its setting precis.tenant, and no rows without that setting. FORCE is needed because precis
-- usually owns its tables and owners are exempt otherwise. Superusers and roles with BYPASSRLS remain exempt.
CREATE FUNCTION precis_tenant() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT current_setting('precis.tenant', true) $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['sessions', 'messages', 'revisions', 'idempotency_keys', 'memories',
        'memory_revisions', 'token_usage'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant_isolation ON %I USING (tenant_id = precis_tenant())', name);
    END LOOP;
END
$$;

-- The search index: the lexemes of each message, as `domain::search::lexemes` makes them.
--
-- The table has no row-level security. With a policy, Postgres would read the whole table instead of the index, because
-- `@@` is not leakproof. Instead, every statement names `tenant_id`, every lexeme carries a prefix for its tenant, and
-- statements take only positions from this table: the messages are read from `messages`, which has a policy.
CREATE TABLE search (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL,
    id         bigint GENERATED ALWAYS AS IDENTITY,   -- ascending: a higher id was stored later
    created_at timestamptz NOT NULL,
    lexemes    tsvector NOT NULL,
    PRIMARY KEY (tenant_id, session_id, seq)
);
CREATE INDEX search_by_time ON search (tenant_id, created_at, id);
-- GIN collects new lexemes in a pending list. The writer that fills the list merges it into the index, which takes longer
-- than storing the message. Therefore the service flushes the list once per second; the limit (in KB) matters only for
-- bulk writes or if no service runs. It is small because every search reads the whole list.
CREATE INDEX search_by_lexeme ON search USING gin (lexemes) WITH (gin_pending_list_limit = 4096);

-- Stored messages that are not in the index yet. An exchange adds a row here, which is cheap. The service indexes many
-- messages at a time, about a second later, and a search first indexes the pending messages that it could find. There is
-- no row-level security because messages of all tenants are indexed together.
CREATE TABLE search_pending (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    first_seq  bigint NOT NULL,
    last_seq   bigint NOT NULL,
    bytes      bigint NOT NULL,   -- size of the messages as JSON
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, first_seq)
);
-- Rows are short-lived, and every search has to skip the dead ones until they are vacuumed.
ALTER TABLE search_pending SET
    (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Messages to index again up to `through_seq`: those stored while search was disabled, and all messages after a change of
-- the analyzer. `precis reindex` processes them for all tenants, so there is no row-level security.
CREATE TABLE search_reindex (
    tenant_id   text COLLATE "C" NOT NULL,
    session_id  text COLLATE "C" NOT NULL,
    done_seq    bigint NOT NULL DEFAULT 0,
    through_seq bigint NOT NULL,
    PRIMARY KEY (tenant_id, session_id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);

-- The analyzer that the index was built with, in one row: `Analyzer::version`.
CREATE TABLE search_analyzer (
    id      integer PRIMARY KEY CHECK (id = 1),
    version text NOT NULL
);

-- Deletes the search rows of an erased session. A trigger, because a foreign key would be checked for every stored
-- message. The order matters: if messages of the session are being indexed, the first DELETE waits for the end of that,
-- and the second one then sees the new rows.
CREATE FUNCTION delete_search_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM search_pending WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER delete_search_rows AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION delete_search_rows();

-- `flush_search_index()` merges the pending list into the index and returns the number of pages merged. Only the owner of
-- an index may do that, and the role of the service need not be the owner. If another connection is flushing, the function
-- fails after 100 ms instead of occupying a connection. The index name includes the schema, so that no other index can be
-- meant.
DO $make$
BEGIN
    EXECUTE format(
        'CREATE FUNCTION flush_search_index() RETURNS bigint LANGUAGE sql SECURITY DEFINER
            SET search_path = pg_catalog, pg_temp SET lock_timeout = ''100ms''
            AS $$ SELECT gin_clean_pending_list(%L::regclass) $$',
        quote_ident(current_schema()) || '.search_by_lexeme'
    );
END
$make$;

-- Returns the messages of pending ranges of any tenants, with the position of the range in the arguments and the user of
-- the session. It reads one tenant at a time, under the policy of that tenant. The setting enable_seqscan is needed because
-- connections keep plans: a plan made while the tables were small would later read whole tables for each range.
CREATE FUNCTION read_pending_messages(tenants text[], sessions text[], firsts bigint[], lasts bigint[])
    RETURNS TABLE (place bigint, seq bigint, created_at timestamptz, user_id text, message text)
    LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    of_tenant text;
BEGIN
    FOR of_tenant IN SELECT DISTINCT t.id FROM unnest(tenants) AS t (id) LOOP
        PERFORM set_config('precis.tenant', of_tenant, true);
        RETURN QUERY
            SELECT w.place, m.seq, m.created_at, s.user_id, m.message
            FROM unnest(tenants, sessions, firsts, lasts)
                WITH ORDINALITY AS w (tenant_id, session_id, first_seq, last_seq, place)
                CROSS JOIN LATERAL (
                    SELECT s.user_id FROM sessions AS s
                    WHERE s.tenant_id = of_tenant AND s.session_id = w.session_id OFFSET 0
                ) AS s
                CROSS JOIN LATERAL (
                    SELECT m.seq, m.created_at, m.message FROM messages AS m
                    WHERE m.tenant_id = of_tenant AND m.session_id = w.session_id
                        AND m.seq >= w.first_seq AND m.seq <= w.last_seq OFFSET 0
                ) AS m
            WHERE w.tenant_id = of_tenant;
    END LOOP;
END
$$;

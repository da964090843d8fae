-- What search finds messages by: the lexemes of each, as `domain::search::index` makes them.
--
-- In a table of its own, and without row-level security: behind a policy the database asks no index for lexemes, for
-- `@@` could tell of rows that the policy hides (it is not leakproof), and reads the whole table instead. What stands here
-- is bound to its tenant by `tenant_id`, which every statement names, and by a tag in each lexeme; and of what a
-- statement finds here only the place goes on: the message behind it is read from `messages`, behind its policy.
CREATE TABLE search (
    tenant_id  text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL,
    id         bigint GENERATED ALWAYS AS IDENTITY,   -- counts up: a higher one was stored later
    created_at timestamptz NOT NULL,
    lexemes    tsvector NOT NULL,
    PRIMARY KEY (tenant_id, session_id, seq)
);
CREATE INDEX search_by_time ON search (tenant_id, created_at, id);
-- New lexemes wait in a list that every search reads whole; with the default of 4 MB that takes longer than the rest.
CREATE INDEX search_by_lexeme ON search USING gin (lexemes) WITH (gin_pending_list_limit = 512);

-- No foreign key, which would be checked for every message that is stored.
CREATE FUNCTION forget_search() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM search WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER forget_search AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION forget_search();

-- Messages that are still to be indexed, as far as `through_seq`: those that were stored before there was an index, and
-- all of them when the rules have changed. `precis reindex` works through them, for all tenants: no row-level security.
CREATE TABLE search_backlog (
    tenant_id   text COLLATE "C" NOT NULL,
    session_id  text COLLATE "C" NOT NULL,
    done_seq    bigint NOT NULL DEFAULT 0,
    through_seq bigint NOT NULL,
    PRIMARY KEY (tenant_id, session_id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions ON DELETE CASCADE
);
-- The owner is held by the policies too, unless it says for a moment that it is not.
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;
INSERT INTO search_backlog (tenant_id, session_id, through_seq)
    SELECT tenant_id, session_id, last_seq FROM sessions WHERE last_seq > 0;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;

-- The rules by which the index is made, one row: what `Analysis::label` says.
CREATE TABLE search_rules (
    id    integer PRIMARY KEY CHECK (id = 1),
    label text NOT NULL
);

-- The newest messages that contain a word, however common it is.
--
-- GIN returns all rows with a key, in no order. So the index also has a key for each 2048 consecutive ids, a bucket: a word and
-- a few buckets are looked up together, which reads only this part of the word's rows. No other key begins with a colon.
DROP INDEX search_by_time;
DROP INDEX search_by_lexeme;
CREATE INDEX search_by_lexeme ON search
    USING gin ((lexemes || array_to_tsvector(ARRAY[':' || (id >> 11)]))) WITH (gin_pending_list_limit = 4096);

-- The first and last time of the messages in each bucket. Imports have old messages in new buckets.
CREATE TABLE search_times (
    bucket bigint PRIMARY KEY,
    oldest timestamptz NOT NULL,
    newest timestamptz NOT NULL
);
INSERT INTO search_times SELECT id >> 11, min(created_at), max(created_at) FROM search GROUP BY 1;

CREATE FUNCTION record_search_times() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO search_times AS t (bucket, oldest, newest)
    SELECT id >> 11, min(created_at), max(created_at) FROM added GROUP BY 1 ORDER BY 1
    ON CONFLICT (bucket) DO UPDATE
        SET oldest = least(t.oldest, excluded.oldest), newest = greatest(t.newest, excluded.newest)
        WHERE t.oldest > excluded.oldest OR t.newest < excluded.newest;
    RETURN NULL;
END
$$;
CREATE TRIGGER record_search_times AFTER INSERT ON search REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION record_search_times();

-- Returns the newest matches of each query, newest first, by reading backwards in windows of 2, 8, 32 and 128 buckets, and then
-- the rest. A prefix is compared with each row of the first window, because the index would read all rows with the prefix.
-- `OFFSET 0` separates finding the rows from sorting them. The settings: the planner cannot estimate a query that is a
-- variable, and would rather read the table.
CREATE FUNCTION newest_matches(
    of_tenant text, queries text[], of_session text, since timestamptz, until timestamptz, max_matches bigint)
    RETURNS TABLE (place bigint, ids bigint[], sessions text[], seqs bigint[], times timestamptz[])
    LANGUAGE plpgsql STABLE SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off
    SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    oldest_bucket bigint;
    newest_bucket bigint;
    first_bucket bigint;
    last_bucket bigint;
    buckets bigint;
    compares_rows boolean;
    matching tsquery;
    condition tsquery;
    found_rows record;
BEGIN
    IF since IS NULL AND until IS NULL THEN
        SELECT 0, max(t.bucket) INTO oldest_bucket, newest_bucket FROM search_times AS t;
    ELSE
        SELECT min(t.bucket), max(t.bucket) INTO oldest_bucket, newest_bucket FROM search_times AS t
        WHERE (since IS NULL OR t.newest >= since) AND (until IS NULL OR t.oldest < until);
    END IF;
    FOR number IN 1 .. cardinality(queries) LOOP
        place := number; ids := '{}'; sessions := '{}'; seqs := '{}'; times := '{}';
        matching := queries[number]::tsquery;
        last_bucket := newest_bucket;
        buckets := 2;
        WHILE last_bucket >= oldest_bucket AND cardinality(ids) < max_matches LOOP
            first_bucket := CASE WHEN buckets > 128 THEN oldest_bucket
                ELSE greatest(oldest_bucket, last_bucket - buckets + 1) END;
            compares_rows := buckets = 2 AND strpos(queries[number], ':*') > 0;
            IF last_bucket - first_bucket < 256 THEN
                condition := (
                    SELECT string_agg(quote_literal(':' || b), ' | ') FROM generate_series(first_bucket, last_bucket) AS b
                )::tsquery;
                IF NOT compares_rows THEN
                    condition := matching && condition;
                END IF;
            ELSE
                condition := matching;
            END IF;
            SELECT array_agg(m.id) AS ids, array_agg(m.session_id) AS sessions, array_agg(m.seq) AS seqs,
                array_agg(m.created_at) AS times INTO found_rows
            FROM (
                SELECT s.id, s.session_id, s.seq, s.created_at FROM (
                    SELECT e.tenant_id, e.session_id, e.seq, e.created_at, e.id, e.lexemes FROM search AS e
                    WHERE (e.lexemes || array_to_tsvector(ARRAY[':' || (e.id >> 11)])) @@ condition OFFSET 0
                ) AS s
                WHERE s.tenant_id = of_tenant AND (of_session IS NULL OR s.session_id = of_session)
                    AND (since IS NULL OR s.created_at >= since) AND (until IS NULL OR s.created_at < until)
                    AND s.id >= first_bucket << 11 AND s.id < (last_bucket + 1) << 11
                    AND (NOT compares_rows OR s.lexemes @@ matching)
                ORDER BY s.id DESC LIMIT max_matches - cardinality(newest_matches.ids)
            ) AS m;
            IF found_rows.ids IS NOT NULL THEN
                ids := ids || found_rows.ids;
                sessions := sessions || found_rows.sessions;
                seqs := seqs || found_rows.seqs;
                times := times || found_rows.times;
            END IF;
            last_bucket := first_bucket - 1;
            buckets := buckets * 4;
        END LOOP;
        RETURN NEXT;
    END LOOP;
END
$$;

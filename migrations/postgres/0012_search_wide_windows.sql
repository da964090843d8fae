-- Fewer keys for large parts of the index: a lookup of a word with 128 keys of 2048 ids takes 200 ms, because GIN then compares
-- each of these rows with all keys. So the index also has a key for each 32,768 consecutive ids, which begins with two colons.
CREATE INDEX search_by_two_buckets ON search
    USING gin ((lexemes || array_to_tsvector(ARRAY[':' || (id >> 11), '::' || (id >> 15)])))
    WITH (gin_pending_list_limit = 4096);
DROP INDEX search_by_lexeme;
ALTER INDEX search_by_two_buckets RENAME TO search_by_lexeme;

-- The function of migration 10, except for the windows: 2 buckets of 2048 ids, up to 20 more, then 4 and 16 of 32,768 ids, and the
-- rest.
CREATE OR REPLACE FUNCTION newest_matches(
    of_tenant text, queries text[], of_session text, since timestamptz, until timestamptz, max_matches bigint)
    RETURNS TABLE (place bigint, ids bigint[], sessions text[], seqs bigint[], times timestamptz[])
    LANGUAGE plpgsql STABLE SET enable_seqscan = off SET plan_cache_mode = force_generic_plan SET jit = off
    SET max_parallel_workers_per_gather = 0 AS $$
DECLARE
    oldest_bucket bigint;
    newest_bucket bigint;
    first_bucket bigint;
    last_bucket bigint;
    window_number integer;
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
        window_number := 1;
        WHILE last_bucket >= oldest_bucket AND cardinality(ids) < max_matches LOOP
            -- From the third window on, all windows begin with a large bucket.
            first_bucket := greatest(oldest_bucket, CASE window_number
                WHEN 1 THEN last_bucket - 1 WHEN 2 THEN ((last_bucket - 4) >> 4) << 4
                WHEN 3 THEN last_bucket + 1 - 64 WHEN 4 THEN last_bucket + 1 - 256 ELSE oldest_bucket END);
            compares_rows := window_number = 1 AND strpos(queries[number], ':*') > 0;
            IF window_number < 5 THEN
                condition := CASE WHEN window_number < 3 THEN (
                    SELECT string_agg(quote_literal(':' || b), ' | ') FROM generate_series(first_bucket, last_bucket) AS b)
                ELSE (
                    SELECT string_agg(quote_literal('::' || b), ' | ')
                    FROM generate_series(first_bucket >> 4, last_bucket >> 4) AS b)
                END::tsquery;
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
                    WHERE (e.lexemes || array_to_tsvector(ARRAY[':' || (e.id >> 11), '::' || (e.id >> 15)])) @@ condition
                    OFFSET 0
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
            window_number := window_number + 1;
        END LOOP;
        RETURN NEXT;
    END LOOP;
END
$$;

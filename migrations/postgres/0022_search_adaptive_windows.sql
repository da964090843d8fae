-- The function of migration 12, except for the windows. They had fixed sizes, so that a lookup read up to four times as many rows as it
-- returned. Now a window is as large as the rows of the earlier ones suggest, between a quarter of all of them and ten times as large. A
-- large window has keys of 32,768 ids, and of 2048 ids for its newest part. GIN compares each row with all keys, so a window has at most
-- 320 buckets. A word of which the newest 160 or more have few rows is then looked up without keys, which takes a tenth less time among a
-- million messages, except in a short range of times.
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
    first_small bigint;
    searched bigint;
    wanted bigint;
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
        searched := 0;
        wanted := 2;
        WHILE last_bucket >= oldest_bucket AND cardinality(ids) < max_matches LOOP
            compares_rows := searched = 0 AND strpos(queries[number], ':*') > 0;
            IF wanted > 320 AND searched >= 160
                AND ((since IS NULL AND until IS NULL) OR last_bucket + 1 - oldest_bucket > 320) THEN
                first_bucket := oldest_bucket;
                condition := matching;
            ELSE
                wanted := least(wanted, 320);
                first_bucket := last_bucket + 1 - wanted;
                first_small := first_bucket;
                IF wanted > 20 THEN
                    first_bucket := (first_bucket >> 4) << 4;
                    first_small := ((last_bucket + 1) >> 4) << 4;
                END IF;
                first_bucket := greatest(oldest_bucket, first_bucket);
                condition := (
                    SELECT string_agg(quote_literal(k.key), ' | ') FROM (
                        SELECT ':' || b AS key FROM generate_series(greatest(first_bucket, first_small), last_bucket) AS b
                        UNION ALL
                        SELECT '::' || b FROM generate_series(first_bucket >> 4, (first_small >> 4) - 1) AS b
                        WHERE first_small > first_bucket
                    ) AS k
                )::tsquery;
                IF NOT compares_rows THEN
                    condition := matching && condition;
                END IF;
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
            searched := searched + last_bucket + 1 - first_bucket;
            last_bucket := first_bucket - 1;
            wanted := (max_matches - cardinality(ids)) * searched * 11 / (10 * greatest(cardinality(ids), 1));
            wanted := greatest(least(wanted, searched * 10), searched / 4) + 1;
        END LOOP;
        RETURN NEXT;
    END LOOP;
END
$$;
INSERT INTO schema_compatibility (version, oldest_version) VALUES (22, 15);

-- Adds the removals of all sessions that a statement deletes together. Before, the last position was read for each session, which took most
-- of the time of erasing a user with many sessions.
DROP TRIGGER remove_session_from_index ON sessions;
DROP FUNCTION remove_session_from_index();
CREATE FUNCTION remove_sessions_from_index() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO search_removals (tenant_id, session_id, first_seq, last_seq, position)
    SELECT r.tenant_id, r.session_id, 1, r.last_seq, p.position
    FROM (SELECT DISTINCT tenant_id FROM removed) AS t
        CROSS JOIN LATERAL (
            SELECT greatest((SELECT max(id) FROM search_recent WHERE tenant_id = t.tenant_id),
                (SELECT max(position) FROM search_segments WHERE tenant_id = t.tenant_id)) AS position OFFSET 0
        ) AS p
        JOIN removed AS r ON r.tenant_id = t.tenant_id
    WHERE p.position IS NOT NULL AND r.last_seq > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER remove_sessions_from_index AFTER DELETE ON sessions REFERENCING OLD TABLE AS removed
    FOR EACH STATEMENT EXECUTE FUNCTION remove_sessions_from_index();

-- Merges and removals replace whole segments. By default, a fifth of the table would be dead before its space is used again.
ALTER TABLE search_pages SET
    (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

INSERT INTO schema_compatibility (version, oldest_version) VALUES (24, 23);

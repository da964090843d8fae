-- The entries of `search_recent` are lists of session, user, last `seq`, time, and a text with the terms of messages of the session, which the
-- service encodes: see `domain::search::recent`. Before, each message was an entry.
UPDATE search_recent SET entries = (
    SELECT json_group_array(json_array(e.value ->> 0, e.value ->> 1, e.value ->> 2, e.value ->> 3, '0  ' || (e.value ->> 4)) ORDER BY e.key)
    FROM json_each(entries) AS e
);

-- The previous release cannot search, redact or index messages with this schema, so its /readyz fails.
INSERT INTO schema_compatibility (version, oldest_version) VALUES (25, 25);

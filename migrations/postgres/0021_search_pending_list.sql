-- An exchange that exceeds this size of the pending list flushes it, and all others wait: 25 ms, four times a second under load. The
-- index worker flushes it before that, beside the exchanges, so the limit (in kB) applies only if no worker runs.
ALTER INDEX search_by_lexeme SET (gin_pending_list_limit = 32768);
INSERT INTO schema_compatibility (version, oldest_version) VALUES (21, 15);

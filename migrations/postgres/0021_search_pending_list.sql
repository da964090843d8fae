-- An exchange that exceeds the limit of the pending list (in kB) flushes it, and all others wait: with 4 MB, 25 ms, four times a second
-- under load. The index worker flushes the list earlier, beside the exchanges, except after an error.
ALTER INDEX search_by_lexeme SET (gin_pending_list_limit = 32768);
INSERT INTO schema_compatibility (version, oldest_version) VALUES (21, 15);

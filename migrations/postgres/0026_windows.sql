-- The window of the latest context request of a session, and the tokens of its list without summary and history. NULL without a window.
ALTER TABLE sessions ADD COLUMN window_tokens bigint, ADD COLUMN window_fixed bigint;
INSERT INTO schema_compatibility (version, oldest_version) VALUES (26, 25);

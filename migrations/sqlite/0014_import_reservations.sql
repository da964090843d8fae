-- A large import is written in several transactions, so that other writers do not wait for it. Until the last one, the row of
-- the session is a reservation with `last_seq` 0, so its messages are not part of a history.
ALTER TABLE sessions ADD COLUMN import_token BLOB;
-- The import renews this time while it runs. A reservation with an earlier time was left by a process that has died.
ALTER TABLE sessions ADD COLUMN import_until INTEGER;
-- 1 if the session was bound to its user before.
ALTER TABLE sessions ADD COLUMN import_bound INTEGER;
CREATE INDEX sessions_by_import ON sessions (import_until) WHERE import_until IS NOT NULL;

CREATE TRIGGER sessions_reject_importing BEFORE UPDATE OF last_seq, user_id, metadata ON sessions
WHEN OLD.import_token IS NOT NULL AND NEW.import_token IS OLD.import_token
BEGIN
    SELECT RAISE(ABORT, 'session-importing');
END;

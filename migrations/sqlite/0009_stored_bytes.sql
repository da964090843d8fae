-- Stored bytes: the size of the messages of a session as JSON, and their sum for a tenant.
--
-- An exchange adds to `stored_bytes` of its session only. The part of it that is counted for the tenant is `settled_bytes`. A
-- background worker settles sessions, and from the hour `settled_hour` on, sessions may have more or less than that, and are read
-- one by one.
ALTER TABLE sessions ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN settled_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenants ADD COLUMN settled_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenants ADD COLUMN settled_hour INTEGER NOT NULL DEFAULT 0;

UPDATE sessions SET stored_bytes = (
    SELECT coalesce(sum(octet_length(message)), 0) FROM messages AS m
    WHERE m.tenant_id = sessions.tenant_id AND m.session_id = sessions.session_id
);
UPDATE sessions SET settled_bytes = stored_bytes;
UPDATE tenants SET settled_hour = unixepoch('now') / 3600 - 1,
    settled_bytes = (SELECT coalesce(sum(stored_bytes), 0) FROM sessions AS s WHERE s.tenant_id = tenants.tenant_id);

CREATE TRIGGER sessions_settle_insert AFTER INSERT ON sessions WHEN NEW.settled_bytes <> 0
BEGIN
    UPDATE tenants SET settled_bytes = settled_bytes + NEW.settled_bytes WHERE tenant_id = NEW.tenant_id;
END;
CREATE TRIGGER sessions_settle_update AFTER UPDATE OF settled_bytes ON sessions
WHEN NEW.settled_bytes <> OLD.settled_bytes
BEGIN
    UPDATE tenants SET settled_bytes = settled_bytes + NEW.settled_bytes - OLD.settled_bytes
    WHERE tenant_id = NEW.tenant_id;
END;
CREATE TRIGGER sessions_settle_delete AFTER DELETE ON sessions WHEN OLD.settled_bytes <> 0
BEGIN
    UPDATE tenants SET settled_bytes = settled_bytes - OLD.settled_bytes WHERE tenant_id = OLD.tenant_id;
END;

-- A message changes its size only by a redaction. The session may not have been active for long, so the change is settled.
CREATE TRIGGER messages_record_change AFTER UPDATE OF message ON messages
WHEN octet_length(NEW.message) <> octet_length(OLD.message)
BEGIN
    UPDATE sessions SET stored_bytes = stored_bytes + octet_length(NEW.message) - octet_length(OLD.message),
        settled_bytes = settled_bytes + octet_length(NEW.message) - octet_length(OLD.message)
    WHERE tenant_id = NEW.tenant_id AND session_id = NEW.session_id AND last_seq >= NEW.seq;
END;

-- Identifies a session beyond its id: a session that is erased and created again has another incarnation. Stored messages
-- of one incarnation never change, so the process may keep them.
ALTER TABLE sessions ADD COLUMN incarnation BLOB;
ALTER TABLE memories ADD COLUMN incarnation BLOB;
UPDATE sessions SET incarnation = randomblob(16);
UPDATE memories SET incarnation = randomblob(16);

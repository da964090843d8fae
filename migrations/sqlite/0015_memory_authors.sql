-- Records by which way each version of a memory document was written. It is NULL for earlier versions, and for those that replicas of
-- the previous release write during an update.
ALTER TABLE memory_revisions ADD COLUMN author TEXT;

-- Lists of the forks of a session, most recent activity first.

-- The index also finds all forks of a session, as before. It contains the hour of the activity for the same reason as the
-- other indexes of lists: most exchanges do not change it.
DROP INDEX sessions_by_origin;
CREATE INDEX sessions_by_origin ON sessions (tenant_id, forked_from, activity_hour DESC) WHERE forked_from IS NOT NULL;

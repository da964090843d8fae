-- Forks and rewinds.

-- The session and the message that a session was forked from. `rewind` marks the branch that a rewind of `forked_from` has
-- removed from that session; `forked_through` is then the last message that both have in common.
ALTER TABLE sessions ADD COLUMN forked_from text COLLATE "C";
ALTER TABLE sessions ADD COLUMN forked_through bigint;
ALTER TABLE sessions ADD COLUMN fork_kind text CHECK (fork_kind IN ('fork', 'rewind'));
CREATE INDEX sessions_by_origin ON sessions (tenant_id, forked_from) WHERE forked_from IS NOT NULL;

-- A session keeps the branches that rewinds removed from it: they are erased with it. A fork is independent, and only forgets
-- the id of the erased session. Each statement sees the branches of a rewind that the erasure has waited for.
CREATE FUNCTION release_forks() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    DELETE FROM sessions
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id AND fork_kind = 'rewind';
    UPDATE sessions SET forked_from = NULL, forked_through = NULL, fork_kind = NULL
        WHERE tenant_id = OLD.tenant_id AND forked_from = OLD.session_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER release_forks AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION release_forks();

-- Messages after the `last_seq` of their session are not part of its history, and revisions after its `revision` are not part
-- of its revisions. A rewind lowers these numbers after it has copied the session, and then deletes the rows.
-- A condition of its own for DELETE, because OLD has no columns in the trigger of TRUNCATE.
CREATE OR REPLACE FUNCTION reject_history_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND last_seq >= OLD.seq
        ) THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;

-- A function of its own, because the name of the table does not tell it apart: a partition has another name.
CREATE FUNCTION reject_revision_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF NOT EXISTS (
            SELECT FROM sessions
            WHERE tenant_id = OLD.tenant_id AND session_id = OLD.session_id AND revision >= OLD.revision
        ) THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION '% is append-only: only the erasure or the rewind of a session removes from it', TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;
DROP TRIGGER append_only ON revisions;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON revisions
    FOR EACH ROW EXECUTE FUNCTION reject_revision_change();

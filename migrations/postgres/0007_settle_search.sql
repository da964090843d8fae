-- New lexemes wait in a list, which whoever fills it puts into the index: that takes longer than to store the message. So the
-- service does it behind the back of those who store, once a second; the limit is for who stores much at once, and for
-- where no service runs. A search reads the list whole.
ALTER INDEX search_by_lexeme SET (gin_pending_list_limit = 4096);

-- `settle_search()` puts the list into the index, and returns how many pages of it there were. Only the owner of an index may:
-- the role of a service need not be that. Where somebody else is at it, it gives up: nobody waits in line with a
-- connection in hand. The name of the index is written into it with its schema, so that no other one can be meant.
DO $make$
BEGIN
    EXECUTE format(
        'CREATE FUNCTION settle_search() RETURNS bigint LANGUAGE sql SECURITY DEFINER
            SET search_path = pg_catalog, pg_temp SET lock_timeout = ''100ms''
            AS $$ SELECT gin_clean_pending_list(%L::regclass) $$',
        quote_ident(current_schema()) || '.search_by_lexeme'
    );
END
$make$;

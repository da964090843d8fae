-- New lexemes wait in a list, which whoever fills it puts into the index: that takes longer than to store the message. So the
-- service does it behind the back of those who store, once a second; the limit is for who stores much at once, and for
-- where no service runs. A search reads the list whole.
ALTER INDEX search_by_lexeme SET (gin_pending_list_limit = 4096);

-- Puts the list into the index, and returns how many pages of it there were. Only the owner of an index may: the role of a service
-- need not be that.
CREATE FUNCTION settle_search() RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT pg_catalog.gin_clean_pending_list('search_by_lexeme'::pg_catalog.regclass)
$$;

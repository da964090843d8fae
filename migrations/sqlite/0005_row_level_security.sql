-- SQLite has no roles and no row-level security: this number is Postgres' alone.
SELECT 1;

-- On SQLite whoever writes puts rows into the index, 256 at a time: this number is Postgres' alone.
SELECT 1;

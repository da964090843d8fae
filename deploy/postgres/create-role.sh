#!/bin/sh
# Creates the database of precis and a role of its own, because row-level security does not apply to superusers. Needs the
# password of the role in PRECIS_PASSWORD, and a superuser in POSTGRES_USER (or psql's own variables).
set -eu
psql --no-psqlrc --quiet --set=ON_ERROR_STOP=1 --set=password="$PRECIS_PASSWORD" \
    --username="${POSTGRES_USER:-${PGUSER:-postgres}}" --dbname=postgres <<'SQL'
CREATE ROLE precis LOGIN PASSWORD :'password';
CREATE DATABASE precis OWNER precis;
SQL

"""The systems that scripts/bench measures: precis on both stores, pgbench, SQLite alone, and axum alone."""

import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

ROLE = "precis_bench"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
INDEX_TIMEOUT = 300  # seconds
START_TIMEOUT = 60  # seconds


def percentile(sorted_values, percent):
    """Returns a percentile; 0 without values."""
    return sorted_values[len(sorted_values) * percent // 100] if sorted_values else 0.0


def binary(name):
    return Path(os.environ["PRECIS_BENCH_BINARIES"]) / name


def cpu_seconds(pid, with_ended_children=False):
    """Returns the CPU time of a process; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The fields after the name, which is in parentheses, begin with the third: utime, stime, cutime and cstime follow.
    fields = stat.rpartition(")")[2].split()
    ticks = map(int, fields[11 : 15 if with_ended_children else 13])
    return sum(ticks) / TICKS_PER_SECOND


class Server:
    """A process that serves HTTP on a free port."""

    def __init__(self, name, command, ready_path):
        self.name, self.command, self.ready_path, self.process = name, command, ready_path, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, *arguments):
        """Starts the process and returns the time until it is ready, in milliseconds."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PRECIS")}
        environment.pop("DATABASE_URL", None)
        with open(f"{self.name}.log", "ab") as log:
            started_at = time.monotonic()
            command = [*self.command(self.address), *arguments]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while time.monotonic() < started_at + START_TIMEOUT:
            try:
                if self.request("GET", self.ready_path)[0] < 500:
                    return (time.monotonic() - started_at) * 1e3
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.002)
        sys.exit(f"{self.name} did not start: {Path(f'{self.name}.log').read_text(encoding='utf-8')[-2000:]}")

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def restart(self, *arguments):
        self.stop()
        return self.start(*arguments)

    def connect(self):
        return http.client.HTTPConnection(self.address, timeout=120)

    def request(self, method, path, body=None, connection=None):
        """Returns status and text of the response."""
        own = connection or self.connect()
        try:
            body = body and json.dumps(body)
            own.request(method, path, body, {"content-type": "application/json"} if body else {})
            response = own.getresponse()
            return response.status, response.read().decode()
        finally:
            if not connection:
                own.close()

    def cpu_seconds(self):
        return cpu_seconds(self.process.pid)


class AxumServer(Server):
    """axum with one prepared response."""

    def __init__(self):
        super().__init__("axum", lambda address: [binary("examples/axum_reference"), address], "/")


class Service(Server):
    """A running precis."""

    def __init__(self, name, url):
        def command(address):
            return [binary("precis"), "--bind", address, "--database-url", url]

        super().__init__(name, command, "/readyz")

    def keep_warnings(self, folder):
        """Copies the warnings of the log to a folder, because the log is deleted at the end."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(f"{self.name}.log", encoding="utf-8") as log, open(folder / f"{self.name}.log", "w") as kept:
            kept.writelines(line for line in log if '"WARN"' in line or '"ERROR"' in line)

    def post(self, path, body=None, connection=None):
        return self.send("POST", path, body, connection)

    def put(self, path, body):
        return self.send("PUT", path, body)

    def send(self, method, path, body=None, connection=None):
        """Returns the decoded response of a request that must succeed."""
        status, text = self.request(method, path, body, connection)
        if status not in (200, 201):
            sys.exit(f"{self.name}: {method} {path} returned {status}: {text[:500]}")
        return json.loads(text)

    def statuses(self):
        """Returns the number of responses per status so far."""
        counts = {}
        for line in self.request("GET", "/metrics")[1].splitlines():
            if line.startswith("precis_http_requests_total{"):
                status = line.split('status="')[1].split('"')[0]
                counts[status] = counts.get(status, 0) + int(float(line.split()[-1]))
        return counts

    def memory_mib(self, field="VmRSS"):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) / 1024

    def copy_rows(self, table, rows, **values):
        """Inserts a row for each row of `rows`, a FROM clause. Columns without a new value are copied from `source`."""
        columns = self.columns(table)
        expressions = ", ".join(values.get(column, f"source.{column}") for column in columns)
        self.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {expressions} FROM {rows}")


# An exchange as SQLite stores it, without the search index. The order of the parameters: session, time, user message, reply.
SQLITE_APPEND = (
    """INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    VALUES ('default', ?1, 'default', '{}', 2, 150, ?2, ?2, ?2 / 3600000000, randomblob(16))
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET last_seq = s.last_seq + 2, tokens = s.tokens + 150,
        updated_at = excluded.updated_at, activity_hour = excluded.activity_hour
    RETURNING last_seq""",
    """INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    VALUES ('default', ?1, ?3 - 1, 'user', 75, ?4, ?2), ('default', ?1, ?3, 'assistant', 75, ?5, ?2)""",
)


class SqliteService(Service):
    new_incarnation = "randomblob(16)"

    def __init__(self):
        self.file = Path("precis.db").resolve()
        super().__init__("sqlite", f"sqlite://{self.file}")

    def connect_to_database(self):
        """Returns a connection with the settings of precis."""
        connection = sqlite3.connect(self.file, timeout=60, isolation_level=None)
        for pragma in ("synchronous = full", "foreign_keys = on", "temp_store = memory", "secure_delete = on"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def query(self, sql):
        connection = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True)
        try:
            return connection.execute(sql).fetchone()[0]
        finally:
            connection.close()

    def execute(self, sql):
        connection = self.connect_to_database()
        connection.execute(sql)
        connection.close()

    def columns(self, table):
        return self.query(f"SELECT group_concat(name) FROM pragma_table_info('{table}')").split(",")

    def optimise(self):
        self.execute("PRAGMA wal_checkpoint(truncate)")

    def wait_for_index(self):
        end = time.monotonic() + INDEX_TIMEOUT
        while self.query("SELECT count(*) FROM sessions WHERE indexed_seq IS NOT NULL") > 0 and time.monotonic() < end:
            time.sleep(0.1)

    def database_bytes(self):
        return self.query("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")

    def append_one_by_one(self, name, session, seconds):
        """Appends exchanges to the sessions that `session` returns, a transaction each, on one connection.

        The statements are prepared once, because Python's module caches them.
        """
        messages = [json.dumps({"role": role, "content": "x" * 300}) for role in ("user", "assistant")]
        database = self.connect_to_database()
        latencies, cpu, start = [], time.thread_time(), time.perf_counter()
        end = start + seconds
        before = start
        while before < end:
            session_id, now = session(), time.time_ns() // 1000
            database.execute("BEGIN IMMEDIATE")
            last_seq = database.execute(SQLITE_APPEND[0], (session_id, now)).fetchall()[0][0]
            database.execute(SQLITE_APPEND[1], (session_id, now, last_seq, *messages))
            database.execute("COMMIT")
            after = time.perf_counter()
            latencies.append((after - before) * 1e3)
            before = after
        count, cpu = len(latencies), time.thread_time() - cpu
        database.close()
        latencies.sort()
        return {
            "system": "sqlite-alone", "workload": name, "connections": 1, "rate": count / (before - start),
            "p50_ms": percentile(latencies, 50), "p99_ms": percentile(latencies, 99), "cpu_database_us": cpu / count * 1e6,
        }  # fmt: skip


class PostgresService(Service):
    """precis on Postgres, with a role that row-level security applies to."""

    new_incarnation = "gen_random_uuid()"

    def __init__(self):
        self.folder = os.environ["PRECIS_TEST_POSTGRES_FOLDER"]
        self.binaries = Path(os.environ["PRECIS_BENCH_POSTGRES_BIN"])
        self.psql("postgres", f"CREATE ROLE {ROLE} LOGIN")
        self.psql("postgres", f"CREATE DATABASE {ROLE} OWNER {ROLE}")
        self.postmaster = Path(self.folder, "data/postmaster.pid").read_text().split()[0]
        super().__init__("postgres", f"postgres://{ROLE}@localhost/{ROLE}?host={self.folder}&port=5432&sslmode=disable")

    def environment(self, user):
        return {"PGHOST": self.folder, "PGPORT": "5432", "PGUSER": user, "PATH": os.environ["PATH"]}

    def psql(self, database, sql):
        """Runs a statement as superuser and returns its output."""
        command = [self.binaries / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql, database]
        result = subprocess.run(command, env=self.environment("postgres"), check=True, stdout=subprocess.PIPE, text=True)
        return result.stdout.strip()

    def execute(self, sql):
        self.psql(ROLE, sql)

    def columns(self, table):
        return self.psql(ROLE, f"""SELECT string_agg(attname, ',' ORDER BY attnum) FROM pg_attribute
            WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''""").split(",")  # fmt: skip

    def optimise(self):
        self.execute("VACUUM ANALYZE")
        self.execute("CHECKPOINT")

    def wait_for_index(self):
        # The loop is in the database because a new connection for each look would be part of the measured CPU time.
        self.psql(ROLE, f"""DO $$ BEGIN FOR n IN 1 .. {INDEX_TIMEOUT * 10} LOOP
            EXIT WHEN NOT EXISTS (SELECT FROM unindexed_tenants() WHERE messages > 0); COMMIT; PERFORM pg_sleep(0.1);
        END LOOP; END $$""")  # fmt: skip

    def database_bytes(self):
        return int(self.psql(ROLE, f"SELECT pg_database_size('{ROLE}')"))

    def server_cpu_seconds(self):
        """Returns the CPU time of all processes of the server, including those that have ended."""
        children = Path(f"/proc/{self.postmaster}/task/{self.postmaster}/children").read_text().split()
        return cpu_seconds(self.postmaster, True) + sum(cpu_seconds(child, True) for child in children)

    def pgbench(self, workload, clients, seconds):
        environment = self.environment(ROLE)
        environment["PGOPTIONS"] = "-c precis.tenant=default -c plan_cache_mode=force_generic_plan"
        command = [self.binaries / "pgbench", "--no-vacuum", "--protocol=prepared", f"--file={workload.script}",
            f"--client={clients}", f"--jobs={min(clients, 2)}", f"--time={seconds}", "--log",
            "--log-prefix=pgbench", "--sampling-rate=0.1", ROLE]  # fmt: skip
        before = self.server_cpu_seconds()
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        cpu = self.server_cpu_seconds() - before
        if result.returncode != 0:
            sys.exit(f"pgbench failed: {result.stderr}")
        latencies = []
        for log in Path().glob("pgbench.*"):
            with open(log, encoding="ascii") as lines:
                latencies.extend(int(line.split()[2]) / 1e3 for line in lines)
            log.unlink()
        latencies.sort()
        rate = float(result.stdout.split("tps = ")[1].split()[0])
        transactions = int(result.stdout.split("actually processed: ")[1].split()[0])
        return {
            "system": "pgbench", "workload": workload.name, "connections": clients, "rate": rate,
            "p50_ms": percentile(latencies, 50), "p99_ms": percentile(latencies, 99),
            "cpu_database_us": cpu / max(transactions, 1) * 1e6,
        }  # fmt: skip

"""Measures precis and pgbench. Run it with scripts/bench, which builds precis and starts Postgres.

Each round runs every workload on both stores with each number of connections, and pgbench's counterpart of the workload
directly after it, so that a noisy period affects both. The results are in target/bench/results.json; bench_report.py
makes the pages from them.
"""

import argparse
import http.client
import json
import os
import platform
import random
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import bench_report

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/bench"
SESSIONS = 1000
CONNECTIONS = [1, 16, 64, 256]
PGBENCH_CLIENTS = [16, 64]
MESSAGE_CHARACTERS = 300
ROLE = "precis_bench"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
INDEX_TIMEOUT = 300  # seconds


def make_text(seed, characters=MESSAGE_CHARACTERS):
    """Returns a text of pseudo-words. Common words are more frequent than rare ones, as in real text."""
    choices = random.Random(seed)
    words = []
    while sum(map(len, words)) + len(words) <= characters:
        rank = int(choices.paretovariate(1.0)) % 20_000
        word = random.Random(rank)
        words.append("".join(word.choices("aeioulnrstmd", k=word.randint(2, 9))))
    return " ".join(words)[:characters]


# One prepared statement for the head of a session and its newest messages.
PGBENCH_READ = """\
\\set session random(1, {sessions})
SELECT s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens, s.revision, s.updated_at, s.summary, m.seq, m.message
FROM sessions AS s CROSS JOIN LATERAL (
    SELECT seq, message FROM messages
    WHERE tenant_id = 'default' AND session_id = s.session_id ORDER BY seq DESC LIMIT {tail}
) AS m
WHERE s.tenant_id = 'default' AND s.session_id = 'c{tail}-' || :session::text;
"""

# One prepared statement for an exchange: the row of the session and two messages.
PGBENCH_APPEND = """\
\\set session random(1, {sessions})
WITH session AS (
    INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    VALUES ('default', 'p{sessions}-' || :session::text, 'default', '{{}}', 2, 150, now(), now(),
        floor(extract(epoch FROM now()) / 3600))
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET last_seq = s.last_seq + 2, tokens = s.tokens + 150,
        updated_at = excluded.updated_at, activity_hour = excluded.activity_hour
    RETURNING session_id, last_seq
)
INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
SELECT 'default', session_id, last_seq - 1, 'user', 75, '{user}', now() FROM session
UNION ALL SELECT 'default', session_id, last_seq, 'assistant', 75, '{assistant}', now() FROM session;
"""


@dataclass
class Workload:
    """A kind of request, the sessions that it chooses from, and the script of pgbench's counterpart."""

    name: str
    requests: list
    pgbench: str | None
    writes: bool = False
    connections: tuple = tuple(CONNECTIONS)

    @property
    def file(self):
        return Path(f"{self.name}.tsv")

    @property
    def script(self):
        return Path(f"{self.name}.sql")

    def write_files(self):
        lines = (f"{path}\t{json.dumps(body)}\n" for path, body in self.requests)
        self.file.write_text("".join(lines), encoding="utf-8")
        if self.pgbench:
            self.script.write_text(self.pgbench, encoding="utf-8")


def workloads():
    context = {"system_prompt": "You are a helpful assistant.", "user_message": "And now?"}

    def read(tail):
        requests = [(f"/sessions/c{tail}-{n}/context", context) for n in range(1, SESSIONS + 1)]
        return Workload(f"context-{tail}", requests, PGBENCH_READ.format(sessions=SESSIONS, tail=tail))

    def append(name, sessions):
        def body(n):
            return {"user_message": make_text(f"user {n}"), "assistant_reply": make_text(f"assistant {n}")}

        requests = [(f"/sessions/e{sessions}-{n % sessions}/exchanges", body(n)) for n in range(SESSIONS)]
        message = {role: json.dumps({"role": role, "content": make_text(role)}) for role in ("user", "assistant")}
        return Workload(name, requests, PGBENCH_APPEND.format(sessions=sessions, **message), writes=True)

    def history(name):
        return Workload(f"history-{name}", [(f"/sessions/{name}/context", context)], None, connections=(1,))

    return [
        read(20), read(100), append("exchange", SESSIONS), append("hot-session", 1), history("short"), history("long"),
    ]  # fmt: skip


def percentile(sorted_microseconds, percent):
    """Returns a percentile in milliseconds; 0 without values."""
    return sorted_microseconds[len(sorted_microseconds) * percent // 100] / 1e3 if sorted_microseconds else 0.0


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


class Service:
    """A running precis."""

    def __init__(self, name, url):
        self.name, self.url, self.process = name, url, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self):
        """Starts precis and returns the time until it is ready, in milliseconds."""
        program = Path(os.environ["PRECIS_BENCH_BINARIES"]) / "precis"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PRECIS")}
        environment.pop("DATABASE_URL", None)
        with open(f"{self.name}.log", "ab") as log:
            started_at = time.monotonic()
            self.process = subprocess.Popen(
                [program, "--bind", self.address, "--database-url", self.url],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        while time.monotonic() < started_at + 60:
            try:
                if self.request("GET", "/readyz")[0] == 200:
                    return (time.monotonic() - started_at) * 1e3
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.002)
        sys.exit(f"precis did not start: {Path(f'{self.name}.log').read_text(encoding='utf-8')[-2000:]}")

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def keep_warnings(self):
        """Copies the warnings of the log to target/bench, because the log is deleted at the end."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        with open(f"{self.name}.log", encoding="utf-8") as log, open(FOLDER / f"{self.name}.log", "w") as kept:
            kept.writelines(line for line in log if '"WARN"' in line or '"ERROR"' in line)

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

    def post(self, path, body=None, connection=None):
        status, text = self.request("POST", path, body, connection)
        if status not in (200, 201):
            sys.exit(f"{self.name}: POST {path} returned {status}: {text[:500]}")

    def statuses(self):
        """Returns the number of responses per status so far."""
        counts = {}
        for line in self.request("GET", "/metrics")[1].splitlines():
            if line.startswith("precis_http_requests_total{"):
                status = line.split('status="')[1].split('"')[0]
                counts[status] = counts.get(status, 0) + int(float(line.split()[-1]))
        return counts

    def cpu_seconds(self):
        return cpu_seconds(self.process.pid)

    def memory_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


class SqliteService(Service):
    def __init__(self):
        self.file = Path("precis.db").resolve()
        super().__init__("sqlite", f"sqlite://{self.file}")

    def query(self, sql):
        connection = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True)
        try:
            return connection.execute(sql).fetchone()[0]
        finally:
            connection.close()

    def wait_for_index(self):
        end = time.monotonic() + INDEX_TIMEOUT
        while self.query("SELECT count(*) FROM search_pending") > 0 and time.monotonic() < end:
            time.sleep(0.1)

    def database_bytes(self):
        return self.query("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")


class PostgresService(Service):
    """precis on Postgres, with a role that row-level security applies to."""

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

    def wait_for_index(self):
        # The loop is in the database because a new connection for each look would be part of the measured CPU time.
        self.psql(ROLE, f"""DO $$ BEGIN FOR n IN 1 .. {INDEX_TIMEOUT * 10} LOOP
            EXIT WHEN NOT EXISTS (SELECT FROM search_pending); COMMIT; PERFORM pg_sleep(0.1);
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
                latencies.extend(int(line.split()[2]) for line in lines)
            log.unlink()
        latencies.sort()
        rate = float(result.stdout.split("tps = ")[1].split()[0])
        transactions = int(result.stdout.split("actually processed: ")[1].split()[0])
        return {
            "system": "pgbench", "workload": workload.name, "connections": clients, "rate": rate,
            "p50_ms": percentile(latencies, 50), "p99_ms": percentile(latencies, 99),
            "cpu_database_us": cpu / max(transactions, 1) * 1e6,
        }  # fmt: skip


def seed(service, history):
    """Creates the sessions of the contexts. No tail is longer than `consolidation.threshold`, which is 100."""

    def messages(name, first, last):
        roles = ["assistant", "user"]
        return {"messages": [
            {"role": roles[n % 2], "content": make_text(f"{name} {n}")} for n in range(first, last + 1)
        ]}  # fmt: skip

    def create(part):
        connection = service.connect()
        for n in part:
            for tail in (20, 100):
                name = f"c{tail}-{n}"
                service.post(f"/sessions/{name}/exchanges", messages(n, 1, tail), connection)
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, [range(first, SESSIONS + 1, 8) for first in range(1, 9)]))
    service.post("/sessions/short/exchanges", messages("short", 1, 100))
    for first in range(1, history - 80, 500):
        last = min(first + 499, history - 80)
        service.post("/sessions/long/exchanges", messages("long", first, last))
    # Summarises all except the newest 20 messages; with 80 more, the tail has 100.
    service.post("/sessions/long/consolidations")
    service.post("/sessions/long/exchanges", messages("long", history - 79, history))
    service.wait_for_index()


def run_wrk(service, postgres, workload, connections, seconds):
    """Runs wrk and returns its figures, with the CPU time until the search index has caught up."""
    command = ["wrk", f"--threads={min(connections, 2)}", f"--connections={connections}", f"--duration={seconds}s",
        "--timeout=10s", f"--script={ROOT / 'scripts/bench.lua'}", f"http://{service.address}", "--", workload.file]  # fmt: skip
    statuses = service.statuses()
    cpu, database_cpu = service.cpu_seconds(), postgres.server_cpu_seconds()
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    ended_at = time.monotonic()
    if workload.writes:
        service.wait_for_index()
    index_seconds = time.monotonic() - ended_at
    cpu, database_cpu = service.cpu_seconds() - cpu, postgres.server_cpu_seconds() - database_cpu
    report = json.loads(result.stdout.splitlines()[-1])
    counts = {status: count - statuses.get(status, 0) for status, count in service.statuses().items()}
    rejected = {status: count for status, count in counts.items() if status >= "4" and count}
    accepted = report["requests"] - report["rejected"]
    run = {
        "system": service.name, "workload": workload.name, "connections": connections,
        "rate": accepted / report["seconds"], "p50_ms": report["p50_ms"], "p99_ms": report["p99_ms"],
        "rejected": rejected, "broken": report["broken"], "index_seconds": index_seconds,
        "cpu_precis_us": cpu / max(accepted, 1) * 1e6,
    }  # fmt: skip
    if service is postgres:
        run["cpu_database_us"] = database_cpu / max(accepted, 1) * 1e6
    return run


def run_open_loop(service, workload, load, capacity, seconds):
    """Sends a multiple of the capacity, and returns the outcomes, the memory and the time to recover."""
    program = Path(os.environ["PRECIS_BENCH_BINARIES"]) / "examples/open_loop"
    memory, ended = [], threading.Event()

    def sample():
        while not ended.wait(0.5):
            memory.append(service.memory_mib())

    alone = recovery_latency(service, workload)
    sampler = threading.Thread(target=sample)
    sampler.start()
    command = [program, service.address, workload.file, str(load * capacity), str(seconds)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    recovered = time_to_recover(service, workload, alone)
    ended.set()
    sampler.join()
    outcome = json.loads(result.stdout)
    outcome.update(system=service.name, load=load, capacity=capacity, seconds=seconds)
    outcome.update(recovery_seconds=recovered, memory_mib=memory)
    return outcome


def probe(service, workload, connection):
    """Returns status and duration of one request."""
    path, body = workload.requests[0]
    started_at = time.monotonic()
    status, _ = service.request("POST", path, body, connection)
    return status, time.monotonic() - started_at


def recovery_latency(service, workload):
    """Returns the 99th percentile of one client alone."""
    connection = service.connect()
    latencies = sorted(probe(service, workload, connection)[1] for _ in range(500))
    connection.close()
    return latencies[495]


def time_to_recover(service, workload, alone):
    """Returns the time until one client is served without rejections and slow responses. Looks for three seconds."""
    connection = service.connect()
    start, recovered = time.monotonic(), 0.0
    while time.monotonic() < start + 3:
        before = time.monotonic() - start
        status, latency = probe(service, workload, connection)
        # A single slow response may be caused by the machine and is ignored.
        if (status != 200 or latency > 2 * alone) and before - recovered < 0.3:
            recovered = time.monotonic() - start
        time.sleep(0.002)
    connection.close()
    return recovered


def machine(postgres):
    cpu = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if "model name" in line),
        platform.machine(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return {
        "cores": os.cpu_count(), "cpu": cpu, "load": os.getloadavg()[0], "kernel": platform.release(),
        "postgres": postgres.psql("postgres", "SHOW server_version").split()[0],
        "fsync": postgres.psql("postgres", "SHOW fsync"), "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
    }  # fmt: skip


def measure(options):
    postgres, sqlite = PostgresService(), SqliteService()
    services = [sqlite, postgres]
    results = {"machine": machine(postgres), "options": vars(options), "runs": [], "open_loop": [], "services": {}}
    if results["machine"]["load"] > 0.5:
        print(f"The load of this machine is {results['machine']['load']:.1f}: the figures mean little.", file=sys.stderr)
    try:
        for service in services:
            service.start()  # migrates the database
            starts = []
            for _ in range(options.rounds):
                service.stop()
                starts.append(service.start())
            time.sleep(1)
            results["services"][service.name] = {"start_ms": starts, "memory_at_rest_mib": service.memory_mib()}
        all_workloads = workloads()
        for workload in all_workloads:
            workload.write_files()
        for service in services:
            empty = service.database_bytes()
            seed(service, options.history)
            messages = SESSIONS * 120 + 100 + options.history
            results["services"][service.name]["bytes_per_message"] = (service.database_bytes() - empty) / messages
        postgres.psql(ROLE, "VACUUM ANALYZE")
        for service in services:
            run_wrk(service, postgres, all_workloads[0], 16, options.seconds)  # fills caches
        for number in range(options.rounds):
            order = services if number % 2 == 0 else services[::-1]
            for workload in all_workloads:
                runs = [
                    run_wrk(service, postgres, workload, connections, options.seconds)
                    for connections in workload.connections
                    for service in order
                ]
                if workload.pgbench:
                    runs += [postgres.pgbench(workload, clients, options.seconds) for clients in PGBENCH_CLIENTS]
                for run in runs:
                    results["runs"].append({"round": number, **run})
                    print(bench_report.progress(number, run), file=sys.stderr, flush=True)
        for service in services:
            workload = all_workloads[0]
            results["services"][service.name]["memory_after_mib"] = service.memory_mib()
            rates = {}
            for run in results["runs"]:
                if (run["system"], run["workload"]) == (service.name, workload.name):
                    rates.setdefault(run["connections"], []).append(run["rate"])
            capacity = max(map(statistics.median, rates.values()))
            for load in (0.7, 4.0):
                outcome = run_open_loop(service, workload, load, capacity, options.open_loop_seconds)
                results["open_loop"].append(outcome)
    finally:
        for service in services:
            service.stop()
            service.keep_warnings()
    return results


def parse_options():
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures precis and pgbench.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="for each workload, store and number of connections")
    parser.add_argument("--open-loop-seconds", type=int, default=60, help="for each store and arrival rate")
    parser.add_argument("--quick", action="store_true", help="one round of one second; writes to target/bench only")
    parser.add_argument("--output", type=Path, help="folder of the pages; default: docs")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measures nothing, and writes the pages from results.json")
    options = parser.parse_args()
    options.history = 20_000
    if options.quick:
        options.rounds, options.seconds, options.open_loop_seconds, options.history = 1, 1, 2, 2_000
    return options


def main():
    options = parse_options()
    output = (options.output or (FOLDER if options.quick else ROOT / "docs")).resolve()
    report = options.report and options.report.resolve()
    options.output, options.report = None, None
    if report:
        results = json.loads(report.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="precis-bench.", dir=os.environ["PRECIS_BENCH_FOLDER"]) as work:
            os.chdir(work)
            results = measure(options)
            os.chdir(ROOT)
        (FOLDER / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    bench_report.write(results, ROOT / "docs", output)
    problems = bench_report.violations(results)
    for problem in problems:
        print(f"scripts/bench: {problem}", file=sys.stderr)
    return 1 if problems and not results["options"]["quick"] else 0


if __name__ == "__main__":
    sys.exit(main())

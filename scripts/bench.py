"""Measures precis and what it is compared with. Run it with scripts/bench, which builds the programs and starts Postgres.

Each round measures all systems one directly after another, so that a noisy period affects all of them. The results are in
target/bench/results.json; bench_report.py makes the page from them.
"""

import http.client
import json
import os
import platform
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from bench_report import CONNECTIONS, STORES, WORKLOADS, Figures, replace_section, report, violations

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/bench"
BINARIES = Path(os.environ["PRECIS_BENCH_BINARIES"])
POSTGRES_BINARIES = Path(os.environ["PRECIS_BENCH_POSTGRES_BIN"])
POSTGRES_FOLDER = os.environ["PRECIS_TEST_POSTGRES_FOLDER"]
ROLE = "precis_bench"  # not a superuser, so row-level security applies
SESSIONS = 1000
CONTEXT = {"system_prompt": "You are a helpful assistant.", "user_message": "And now?", "recall": False}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

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
    VALUES ('default', 'p-' || :session::text, 'default', '{{}}', 2, 150, now(), now(),
        floor(extract(epoch FROM now()) / 3600))
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET last_seq = s.last_seq + 2, tokens = s.tokens + 150,
        updated_at = excluded.updated_at, activity_hour = excluded.activity_hour
    RETURNING session_id, last_seq
)
INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
SELECT 'default', session_id, last_seq - 1, 'user', 75, '{user}', now() FROM session
UNION ALL SELECT 'default', session_id, last_seq, 'assistant', 75, '{assistant}', now() FROM session;
"""

# An exchange as SQLite stores it, without the search index. The parameters: session, time, last seq, user message, reply.
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

# The sessions of the contexts for examples/axum_sqlx.rs, as large as those of precis.
AXUM_SESSIONS = f"""
INSERT INTO sessions SELECT 'c' || tail || '-' || n, tail FROM generate_series(1, {SESSIONS}) n, unnest(ARRAY[20, 100]) tail;
INSERT INTO messages SELECT session_id, seq, CASE seq % 2 WHEN 1 THEN 'user' ELSE 'assistant' END,
    left(repeat(md5(session_id || seq), 10), 300) FROM sessions, generate_series(1, last_seq) seq;
"""


@cache
def make_word(rank):
    choices = random.Random(rank)
    return "".join(choices.choices("aeioulnrstmd", k=choices.randint(2, 9)))


@cache
def make_text(seed):
    """Returns 300 characters of pseudo-words. Common words are more frequent than rare ones, as in real text."""
    choices, text = random.Random(seed), ""
    while len(text) < 300:
        text += make_word(int(choices.paretovariate(1.0)) % 20_000) + " "
    return text[:300]


def write_workloads():
    """Writes the requests of each workload, and the script of its counterpart for pgbench."""
    for tail in (20, 100):
        requests = [(f"/sessions/c{tail}-{n}/context", CONTEXT) for n in range(1, SESSIONS + 1)]
        write_workload(f"context-{tail}", requests, PGBENCH_READ.format(sessions=SESSIONS, tail=tail))
    bodies = [{"user_message": make_text(f"u{n}"), "assistant_reply": make_text(f"a{n}")} for n in range(SESSIONS)]
    requests = [(f"/sessions/e-{n}/exchanges", body) for n, body in enumerate(bodies)]
    messages = {role: json.dumps({"role": role, "content": make_text(role)}) for role in ("user", "assistant")}
    write_workload("exchange", requests, PGBENCH_APPEND.format(sessions=SESSIONS, **messages))


def write_workload(name, requests, script):
    Path(f"{name}.tsv").write_text("".join(f"{path}\t{json.dumps(body)}\n" for path, body in requests), encoding="utf-8")
    Path(f"{name}.sql").write_text(script, encoding="utf-8")


def cpu_seconds(pid, with_ended_children=False):
    """Returns the CPU time of a process; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The fields after the name, which is in parentheses, begin with the third: utime, stime, cutime and cstime follow.
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_ended_children else 13])) / TICKS_PER_SECOND


def postgres_cpu_seconds():
    """Returns the CPU time of all processes of the database server, including those that have ended."""
    postmaster = Path(POSTGRES_FOLDER, "data/postmaster.pid").read_text().split()[0]
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return sum(cpu_seconds(pid, with_ended_children=True) for pid in (postmaster, *children))


def postgres_environment(user):
    return {"PGHOST": POSTGRES_FOLDER, "PGPORT": "5432", "PGUSER": user, "PATH": os.environ["PATH"]}


def psql(database, *statements):
    """Runs statements as superuser and returns their output."""
    command = [POSTGRES_BINARIES / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", database]
    command += [argument for statement in statements for argument in ("-c", statement)]
    result = subprocess.run(command, env=postgres_environment("postgres"), check=True, stdout=subprocess.PIPE, text=True)
    return result.stdout.strip()


def create_postgres(database):
    psql("postgres", f"CREATE DATABASE {database} OWNER {ROLE}")
    return f"postgres://{ROLE}@localhost/{database}?host={POSTGRES_FOLDER}&port=5432&sslmode=disable"


class Server:
    """A process that serves HTTP on a free port."""

    def __init__(self, system, store, command, ready_path="/"):
        self.system, self.store, self.ready_path, self.process = system, store, ready_path, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.command = command(self.address)

    def start(self):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PRECIS")}
        environment.pop("DATABASE_URL", None)
        with open(f"{self.system}.log", "ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)
        for _ in range(6000):
            try:
                if self.request("GET", self.ready_path) < 500:
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.01)
        sys.exit(f"{self.system} did not start: {Path(f'{self.system}.log').read_text(encoding='utf-8')[-2000:]}")

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def request(self, method, path, body=None, connection=None):
        """Returns the status of the response."""
        connection = connection or http.client.HTTPConnection(self.address, timeout=60)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status

    def cpu_seconds(self):
        return cpu_seconds(self.process.pid) + (postgres_cpu_seconds() if self.store == "postgres" else 0)

    def wait_until_idle(self):
        """Waits for the work that follows exchanges, such as segments of the search index. The limit is for autovacuum."""
        before = self.cpu_seconds()
        for _ in range(6):
            time.sleep(0.5)
            after = self.cpu_seconds()
            if after - before < 0.03:
                return
            before = after

    def memory_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def precis(system, store, url, *arguments):
    def command(address):
        return [BINARIES / "precis", "--bind", address, "--database-url", url, *arguments]

    return Server(system, store, command, "/readyz")


def wrk(server, workload, connections, seconds):
    """Runs clients in a closed loop and waits for the work that follows. One thread of wrk is faster than the servers."""
    command = ["wrk", "--threads=1", f"--connections={connections}", f"--duration={seconds}s", "--timeout=10s",
        f"--script={ROOT / 'scripts/bench.lua'}", f"http://{server.address}", "--", f"{workload}.tsv"]  # fmt: skip
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    outcome = json.loads(result.stdout.splitlines()[-1])
    if outcome["rejected"] or outcome["broken"]:
        print(f"scripts/bench: {server.system}, {workload}: not all requests succeeded: {outcome}", file=sys.stderr)
    if workload == "exchange":
        server.wait_until_idle()
    accepted = outcome["requests"] - outcome["rejected"]
    return {**outcome, "accepted": accepted, "rate": accepted / outcome["seconds"]}


def pgbench(workload, clients, seconds):
    environment = postgres_environment(ROLE)
    environment["PGOPTIONS"] = "-c precis.tenant=default -c plan_cache_mode=force_generic_plan"
    command = [POSTGRES_BINARIES / "pgbench", "--no-vacuum", "--protocol=prepared", f"--file={workload}.sql",
        f"--client={clients}", f"--jobs={min(clients, 2)}", f"--time={seconds}", "--log", "--log-prefix=pgbench",
        "--sampling-rate=0.1", ROLE]  # fmt: skip
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"pgbench failed: {result.stderr}")
    latencies = []
    for log in Path().glob("pgbench.*"):
        latencies += [int(line.split()[2]) / 1e3 for line in log.read_text(encoding="ascii").splitlines()]
        log.unlink()
    percentiles = statistics.quantiles(latencies, n=100)
    rate = float(result.stdout.split("tps = ")[1].split()[0])
    return {"rate": rate, "p50": percentiles[49], "p99": percentiles[98]}


def append_one_by_one(file, seconds):
    """Appends exchanges with Python's sqlite3 and the settings of precis, a transaction each."""
    database = sqlite3.connect(file, timeout=60, isolation_level=None)
    for pragma in ("synchronous = full", "foreign_keys = on", "temp_store = memory", "secure_delete = on"):
        database.execute(f"PRAGMA {pragma}")
    messages = [json.dumps({"role": role, "content": "x" * 300}) for role in ("user", "assistant")]
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        session, now = f"s-{random.randrange(SESSIONS)}", time.time_ns() // 1000
        database.execute("BEGIN IMMEDIATE")
        last_seq = database.execute(SQLITE_APPEND[0], (session, now)).fetchall()[0][0]
        database.execute(SQLITE_APPEND[1], (session, now, last_seq, *messages))
        database.execute("COMMIT")
        count += 1
    rate = count / (time.perf_counter() - start)
    database.close()
    return {"rate": rate}


class Benchmark:
    """A complete run."""

    def __init__(self, is_quick):
        self.rounds, self.seconds = (1, 1) if is_quick else (5, 2)
        self.open_loop_seconds, self.overload_seconds = (2, 2) if is_quick else (10, 60)
        self.started_at = time.monotonic()
        psql("postgres", f"CREATE ROLE {ROLE} LOGIN")
        axum_url, self.file = create_postgres("axum_sqlx"), Path("precis.db").resolve()
        self.services = [
            precis("postgres", "postgres", create_postgres(ROLE)),
            precis("sqlite", "sqlite", f"sqlite://{self.file}"),
        ]
        self.axum = Server("axum", "postgres", lambda address: [BINARIES / "examples/axum_sqlx", address, axum_url])
        self.servers = [*self.services, self.axum]
        self.results = {
            "machine": machine(), "rounds": self.rounds, "runs": [], "open_loop": [], "memory_mib": {},
            "search_cost": {store: [] for store in STORES},
        }  # fmt: skip

    def progress(self, text):
        print(f"{time.monotonic() - self.started_at:6.0f} s  {text}", file=sys.stderr, flush=True)

    def run(self):
        try:
            self.prepare()
            for number in range(self.rounds):
                self.compare(is_reversed=number % 2 == 1)
            self.measure_open_loop()
            self.measure_memory()
            self.measure_search()
        finally:
            for server in self.servers:
                server.stop()
        self.results["minutes"] = (time.monotonic() - self.started_at) / 60
        return self.results

    def prepare(self):
        """Creates the sessions of the contexts and fills the caches. No consolidation becomes due."""
        write_workloads()
        for server in self.servers:
            server.start()
        for service in self.services:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda first: create_sessions(service, range(first, SESSIONS + 1, 8)), range(1, 9)))
        psql("axum_sqlx", AXUM_SESSIONS)
        for database in (ROLE, "axum_sqlx"):
            psql(database, "VACUUM ANALYZE", "CHECKPOINT")
        for server in self.servers:
            for workload in WORKLOADS:
                wrk(server, workload, 16, 1)
        self.progress("created the sessions")

    def compare(self, is_reversed):
        """Runs all workloads on all systems once."""
        systems = [*((server.system, partial(wrk, server)) for server in self.servers), ("pgbench", pgbench)]
        for workload in WORKLOADS:
            for connections in CONNECTIONS:
                for system, run in systems[:: -1 if is_reversed else 1]:
                    self.record(system, workload, connections, run(workload, connections, self.seconds))
        self.record("sqlite-alone", "exchange", 1, append_one_by_one(self.file, self.seconds))

    def record(self, system, workload, connections, run):
        self.results["runs"].append({"system": system, "workload": workload, "connections": connections, **run})
        self.progress(f"{workload:12} {system:12} {connections:3} {run['rate']:8.0f}/s")

    def measure_open_loop(self):
        """Measures fixed arrival rates. The capacity is what is accepted if requests arrive at the highest rate of wrk."""
        figures = Figures(self.results)
        for service in self.services:
            for workload in ("context-20", "exchange"):
                highest = max(figures.median(service.system, workload, connections) for connections in CONNECTIONS)
                slow = max(0.01, 2 * figures.median(service.system, workload, 1, field="p99") / 1e3)
                outcome = run_open_loop(service, workload, highest, self.open_loop_seconds, slow)
                capacity = outcome["accepted"] / outcome["seconds"]
                overload_seconds = self.overload_seconds if workload == "context-20" else self.open_loop_seconds
                for load, seconds in ((0.7, self.open_loop_seconds), (4.0, overload_seconds)):
                    outcome = run_open_loop(service, workload, load * capacity, seconds, slow)
                    self.results["open_loop"].append({**outcome, "load": load})
                    self.progress(f"{workload:12} {service.system:12} at {load:.0%} of {capacity:.0f}/s")

    def measure_memory(self):
        """Measures the resident size of a new process after one exchange."""
        for service in self.services:
            service.stop()
            service.start()
            service.request("POST", "/sessions/first/exchanges", {"user_message": "Hello", "assistant_reply": "Hi"})
            time.sleep(1)
            self.results["memory_mib"][service.system] = service.memory_mib()

    def measure_search(self):
        """Compares the CPU time of exchanges in new databases, of precis and of the database server."""
        Path("search.toml").write_text("[search]\nenabled = false\n", encoding="utf-8")
        for store in STORES:
            pair = []
            for name, arguments in (("search", ()), ("no_search", ("--config", "search.toml"))):
                url = create_postgres(name) if store == "postgres" else f"sqlite://{Path(f'{name}.db').resolve()}"
                pair.append(precis(f"{store}_{name}", store, url, *arguments))
                self.servers.append(pair[-1])
                pair[-1].start()
                wrk(pair[-1], "exchange", 16, self.seconds)  # creates the sessions
            for number in range(self.rounds):
                costs = {server: cost_of_exchange(server, self.seconds) for server in pair[:: -1 if number % 2 else 1]}
                self.results["search_cost"][store].append(costs[pair[0]] / costs[pair[1]])
                self.progress(f"exchange     {store:12} with search {self.results['search_cost'][store][-1]:.2f} times the CPU")


def machine():
    cpu = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if "model name" in line),
        platform.machine(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return {
        "cores": os.cpu_count(), "cpu": cpu, "load": os.getloadavg()[0], "kernel": platform.release(),
        "postgres": psql("postgres", "SHOW server_version").split()[0], "fsync": psql("postgres", "SHOW fsync"),
        "date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(),
    }  # fmt: skip


def create_sessions(service, numbers):
    connection = http.client.HTTPConnection(service.address, timeout=60)
    for number in numbers:
        for tail in (20, 100):
            name = f"c{tail}-{number}"
            roles = ("user", "assistant")
            messages = [{"role": roles[n % 2], "content": make_text(f"{name} {n}")} for n in range(tail)]
            status = service.request("POST", f"/sessions/{name}/exchanges", {"messages": messages}, connection)
            if status != 201:
                sys.exit(f"{service.system}: the exchange of {name} returned {status}")
    connection.close()


def run_open_loop(service, workload, rate, seconds, slow):
    """Sends requests at a rate, and returns the outcomes, the memory meanwhile and the time to recover."""
    command = [BINARIES / "examples/open_loop", service.address, f"{workload}.tsv", str(rate), str(seconds)]
    process, memory = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), []
    while process.returncode is None:
        memory.append(service.memory_mib())
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
    if process.returncode != 0:
        sys.exit(f"open_loop failed with {process.returncode}")
    outcome = json.loads(process.stdout.read())
    outcome.update(system=service.system, workload=workload, seconds=seconds, memory_mib=memory)
    return {**outcome, "recovery_seconds": time_to_recover(service, workload, slow)}


def time_to_recover(service, workload, slow):
    """Returns the time until one client is served without rejections and slow responses. Looks for three seconds."""
    path, body = Path(f"{workload}.tsv").read_text(encoding="utf-8").splitlines()[0].split("\t")
    connection = http.client.HTTPConnection(service.address, timeout=60)
    start = now = time.monotonic()
    recovered = 0.0
    while now < start + 3:
        before = now
        status = service.request("POST", path, json.loads(body), connection)
        now = time.monotonic()
        # A single slow response later may be caused by the machine and is ignored.
        if (status not in (200, 201) or now - before > slow) and before - start - recovered < 0.3:
            recovered = now - start
        time.sleep(0.002)
    connection.close()
    return recovered


def cost_of_exchange(server, seconds):
    """Returns the CPU time of an exchange, including that of the search index."""
    before = server.cpu_seconds()
    outcome = wrk(server, "exchange", 16, seconds)
    return (server.cpu_seconds() - before) / outcome["accepted"]


def main():
    is_quick = sys.argv[1:] == ["--quick"]
    if sys.argv[1:] and not is_quick:
        sys.exit("usage: scripts/bench [--quick]")
    if os.getloadavg()[0] > 0.5:
        print(f"The load of this machine is {os.getloadavg()[0]:.1f}: the figures mean little.", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers and removes their databases
    with tempfile.TemporaryDirectory(prefix="precis-bench.", dir=os.environ["PRECIS_BENCH_FOLDER"]) as work:
        os.chdir(work)
        try:
            results = Benchmark(is_quick).run()
        finally:
            os.chdir(ROOT)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    text, page = report(results), ROOT / "docs/benchmarks.md"
    output = FOLDER / "benchmarks.md" if is_quick else page
    output.write_text(replace_section(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(f"{text}\nWritten to {output}")
    problems = violations(results)
    for problem in problems:
        print(f"scripts/bench: {problem}", file=sys.stderr)
    return 1 if problems and not is_quick else 0


if __name__ == "__main__":
    sys.exit(main())

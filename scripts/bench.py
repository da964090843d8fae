"""Measures precis and pgbench. Run it with scripts/bench, which builds precis and starts Postgres.

Each round runs every workload on both stores with each number of connections, and its counterparts directly after it, so
that a noisy period affects all of them. Then follow the runs that need another database or other settings. The results are
in target/bench/results.json; bench_report.py makes the pages from them.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_goals
import bench_load
import bench_report
import bench_workloads
from bench_systems import AxumServer, PostgresService, SqliteService

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/bench"
PGBENCH_CLIENTS = (16, 64)
REFERENCE_CONNECTIONS = (16, 64, 256, 512)
STARTS = 10


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


class Run:
    """A complete run of the script."""

    def __init__(self, options):
        self.options = options
        self.postgres, self.sqlite, self.axum = PostgresService(), SqliteService(), AxumServer()
        self.services = [self.sqlite, self.postgres]
        self.started_at = time.monotonic()
        self.results = {
            "machine": machine(self.postgres), "options": vars(options), "runs": [], "open_loop": [], "open_loop_capacity": [],
            "services": {service.name: {} for service in self.services},
        }  # fmt: skip

    def progress(self, text):
        print(f"{time.monotonic() - self.started_at:6.0f} s  {text}", file=sys.stderr, flush=True)

    def record(self, number, run):
        self.results["runs"].append({"round": number, **run})
        self.progress(bench_report.progress(number, run))

    def rounds(self):
        """Returns the number of each round, and both stores in alternating order."""
        for number in range(self.options.rounds):
            yield number, self.services if number % 2 == 0 else self.services[::-1]

    def measure(self):
        if self.results["machine"]["load"] > 0.5:
            load = self.results["machine"]["load"]
            print(f"The load of this machine is {load:.1f}: the figures mean little.", file=sys.stderr)
        try:
            self.axum.start()
            self.prepare()
            self.compare()
            self.measure_overload()
            self.measure_history()
            self.measure_memory()
            self.measure_search()
        finally:
            self.axum.stop()
            for service in self.services:
                service.stop()
                service.keep_warnings(FOLDER)
            self.results["minutes"] = (time.monotonic() - self.started_at) / 60
            (FOLDER / "results.json").write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        return self.results

    def prepare(self):
        """Creates the sessions, and measures starts on the databases with these sessions."""
        for service in self.services:
            service.start()  # migrates the database
            empty = service.database_bytes()
            bench_workloads.seed(service)
            bytes_per_message = (service.database_bytes() - empty) / (bench_workloads.SESSIONS * 120)
            bench_workloads.seed_full(service)
            service.optimise()
            starts = [service.restart() for _ in range(STARTS)]
            self.results["services"][service.name].update(bytes_per_message=bytes_per_message, start_ms=starts)
            self.progress(f"{service.name}: created the sessions; ready after {statistics.median(starts):.0f} ms")

    def compare(self):
        """Runs the workloads that have a counterpart, and the references."""
        seconds = self.options.seconds
        workloads, references = bench_workloads.compared_workloads(), bench_workloads.reference_workloads()
        full = bench_workloads.full_context_workload()
        for workload in [*workloads, full, *references]:
            workload.write_files()
        for service in self.services:
            for workload in (full, workloads[0]):
                bench_load.wrk(service.address, workload, 16, seconds)  # fills the cache
        for number, order in self.rounds():
            for workload in workloads:
                for connections in self.options.connections:
                    for service in order:
                        run = bench_load.run_precis(service, self.postgres, workload, connections, seconds)
                        self.record(number, run)
                for clients in PGBENCH_CLIENTS:
                    self.record(number, self.postgres.pgbench(workload, clients, seconds))
                if workload.sessions:
                    run = self.sqlite.append_one_by_one(workload.name, workload.random_session, seconds)
                    self.record(number, run)
            for service in order:
                self.record(number, bench_load.run_precis(service, self.postgres, full, 16, seconds))
            for server, workload in zip((self.axum, self.postgres), references, strict=True):
                for connections in REFERENCE_CONNECTIONS:
                    self.record(number, bench_load.run_reference(server, workload, connections, seconds))

    def measure_overload(self):
        """Measures latencies at fixed arrival rates, below and above the highest rate that the open loop reaches.

        The generator of the open loop takes more time of the cores than wrk, so it reaches less than the closed loops.
        """
        figures = bench_report.Figures(self.results)
        context, exchange = bench_workloads.read(20), bench_workloads.append("exchange", bench_workloads.SESSIONS)
        seconds, overload_seconds = self.options.open_loop_seconds, self.options.overload_seconds
        for service in self.services:
            exchange_capacity = self.open_loop_capacity(figures, service, exchange)
            capacity = self.open_loop_capacity(figures, service, context)
            self.results["open_loop"] += [
                # Directly one after the other, because the speed of a shared machine changes within minutes.
                bench_load.run_open_loop(service, context, 0.7, capacity, seconds),
                bench_load.run_while_sessions_consolidate(service, context, 0.7, capacity, seconds),
                bench_load.run_open_loop(service, context, 4.0, capacity, overload_seconds),
                bench_load.run_open_loop(service, exchange, 4.0, exchange_capacity, seconds),
            ]
            self.progress(f"{service.name}: measured latencies at fixed arrival rates")

    def open_loop_capacity(self, figures, service, workload):
        """Returns the rate of accepted requests if they arrive at the highest rate of the closed loops."""
        rate, _ = figures.capacity(service.name, workload.name)
        outcome = bench_load.run_open_loop(service, workload, 1.0, rate, self.options.open_loop_seconds)
        capacity = outcome["accepted"] / outcome["seconds"]
        self.results["open_loop_capacity"].append(
            {"system": service.name, "workload": workload.name, "rate": capacity, "closed_loop_rate": rate}
        )
        return capacity

    def measure_history(self):
        """Compares a long session with short ones."""
        seconds = min(self.options.seconds, 2)  # one connection needs no long run
        pairs = bench_workloads.history_workloads()
        for service in self.services:
            bench_workloads.seed_history(service, self.options.history)
            self.progress(f"{service.name}: created a session of {self.options.history:,} messages")
        for short, long in pairs:
            for workload in (short, long):
                workload.write_files()
                for service in self.services:
                    for path, body in workload.requests[:100]:  # fills the caches
                        service.post(path, body)
            for number, order in self.rounds():
                for service in order:
                    for workload in (short, long) if number % 2 == 0 else (long, short):
                        run = bench_load.run_precis(service, self.postgres, workload, 1, seconds)
                        self.record(number, run)

    def measure_memory(self):
        workload = bench_workloads.memory_workload(self.options.sessions)
        workload.write_files()
        for service in self.services:
            bench_workloads.seed_memory(service, self.options.sessions)
            memory = bench_load.measure_memory(service, workload, self.options.requests, self.options.seconds)
            self.results["services"][service.name]["memory"] = memory
            self.progress(f"{service.name}: sent {memory['requests']:,} requests; {memory['after_mib']:.0f} MiB")

    def measure_search(self):
        """Compares the CPU time of exchanges with the search index and without it."""
        exchange = bench_workloads.append("exchange", bench_workloads.SESSIONS)
        exchange.write_files()
        settings = Path("search.toml")
        settings.write_text("[search]\nenabled = false\n", encoding="utf-8")
        for number, order in self.rounds():
            for service in order:
                for is_indexed in (True, False) if number % 2 == 0 else (False, True):
                    service.restart(*([] if is_indexed else ["--config", settings]))
                    if is_indexed:
                        service.wait_for_index()
                    run = bench_load.run_precis(service, self.postgres, exchange, 16, self.options.seconds, is_indexed)
                    self.record(number, {**run, "workload": f"{exchange.name}-{'' if is_indexed else 'not-'}indexed"})


def parse_options():
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures precis and pgbench.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="for each workload, store and number of connections")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64, 256, 512], metavar="N")
    parser.add_argument("--open-loop-seconds", type=int, default=20, help="for each arrival rate below the capacity")
    parser.add_argument("--overload-seconds", type=int, default=60, help="for contexts above the capacity")
    parser.add_argument("--history", type=int, default=1_000_000, help="messages of the long session")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests before memory is measured")
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions of these requests, in thousands")
    parser.add_argument("--quick", action="store_true", help="one short round; writes to target/bench only")
    parser.add_argument("--output", type=Path, help="folder of the pages; default: docs")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measures nothing, and writes the pages from results.json")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.open_loop_seconds, options.overload_seconds = 1, 1, 2, 2
        options.history, options.requests, options.sessions, options.connections = 20_000, 20_000, 2_000, [1, 16, 64]
    return options


def main():
    options = parse_options()
    output = (options.output or (FOLDER if options.quick else ROOT / "docs")).resolve()
    report = options.report and options.report.resolve()
    options.output, options.report = None, None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the services and removes their databases
    if report:
        results = json.loads(report.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="precis-bench.", dir=os.environ["PRECIS_BENCH_FOLDER"]) as work:
            os.chdir(work)
            results = Run(options).measure()
            os.chdir(ROOT)
    bench_report.write(results, ROOT / "docs", output)
    problems = bench_goals.violations(results)
    for problem in problems:
        print(f"scripts/bench: {problem}", file=sys.stderr)
    return 1 if problems and not results["options"]["quick"] else 0


if __name__ == "__main__":
    sys.exit(main())

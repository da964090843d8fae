"""The goals of the performance of precis, compared with the results of scripts/bench."""

import statistics
from dataclasses import dataclass

STORES = {"sqlite": "SQLite", "postgres": "Postgres"}
PERMITTED_WAIT_MS = 1000  # the default of limits.queue_timeout
CLOSED_LOOP = ("context-20", "context-100", "exchange", "hot-session")


@dataclass
class Goal:
    """A bound, and the value that was measured."""

    subject: str
    store: str
    bound: float
    value: float
    is_minimum: bool
    unit: str = ""
    digits: int = 2

    @property
    def is_reached(self):
        return self.value >= self.bound if self.is_minimum else self.value <= self.bound

    def row(self):
        required = f"{'≥' if self.is_minimum else '≤'} {self.bound:,.{self.digits}f}{self.unit}"
        measured = f"{self.value:,.{self.digits}f}{self.unit}"
        # Rounding must not hide that a bound is missed.
        if not self.is_reached and measured == f"{self.bound:,.{self.digits}f}{self.unit}":
            measured = f"{self.value:,.{self.digits + 2}f}{self.unit}"
        return [self.subject, STORES.get(self.store, self.store), required, measured, "yes" if self.is_reached else "**no**"]


def at_least(subject, store, bound, value, unit=" ×", digits=2):
    return Goal(subject, store, bound, value, True, unit, digits)


def at_most(subject, store, bound, value, unit=" ×", digits=2):
    return Goal(subject, store, bound, value, False, unit, digits)


def throughput(figures):
    """Returns the goals relative to pgbench with as many connections, on Postgres."""
    for workload, subject, bounds in (
        ("context-20", "contexts, tail of 20", {16: 1.0, 64: 1.5}),
        ("context-100", "contexts, tail of 100", {16: 2.0, 64: 4.0}),
        ("exchange", "exchanges, random sessions", {16: 1.0, 64: 1.5}),
        ("hot-session", "exchanges, one session", {16: 2.0, 64: 2.0}),
    ):
        for connections, bound in bounds.items():
            ratio = statistics.median(figures.ratios("postgres", workload, connections))
            yield at_least(f"{subject}, {connections} connections, relative to pgbench", "postgres", bound, ratio)


def sqlite(figures):
    for tail in (20, 100):
        for connections in (16, 64):
            key = (f"context-{tail}", connections, "rate")
            ratio = figures.median("sqlite", *key) / figures.median("postgres", *key)
            subject = f"contexts, tail of {tail}, {connections} connections, relative to Postgres"
            yield at_least(subject, "sqlite", 1.5, ratio)
    slower = figures.median("sqlite", "context-20", 16, "rate") / figures.median("sqlite", "context-100", 16, "rate")
    yield at_most("time of a context, tail of 100 relative to 20, 16 connections", "sqlite", 2, slower)
    alone = statistics.median(figures.ratios("sqlite", "exchange", 16, "sqlite-alone", 1))
    yield at_least("exchanges, 16 connections, relative to one transaction each", "sqlite", 2, alone)


def latency_of_one_client(figures):
    for store, bound in (("sqlite", 0.4), ("postgres", 0.7)):
        value = figures.median(store, "context-20", 1, "p50_ms")
        yield at_most("p50 of contexts, tail of 20, one client", store, bound, value, " ms")


def describe(outcome):
    """Returns the name of an open loop."""
    consolidations = ", 50 sessions consolidate" if "consolidations" in outcome else ""
    return f"{outcome['workload']}, arrivals at {outcome['load'] * 100:.0f} % of capacity{consolidations}"


def overload(figures):
    for store in STORES:
        rejected = sum(
            sum(run["rejected"].values()) + run["broken"]
            for (system, workload, _), runs in figures.runs.items()
            if system == store and workload in CLOSED_LOOP
            for run in runs
        )
        yield at_most("rejected requests in closed loops", store, 0, rejected, "", 0)
        for workload in CLOSED_LOOP:
            relative = figures.relative_to_best(store, workload)
            lowest = min(relative.values())
            subject = f"{workload}: throughput with {min(relative)} to {max(relative)} connections, relative to the best"
            yield at_least(subject, store, 0.9, lowest, "")
    for outcome in figures.results["open_loop"]:
        store = outcome["system"]
        if outcome["load"] > 1:
            served = outcome["accepted"] / outcome["seconds"] / outcome["capacity"]
            arrivals = describe(outcome)
            yield at_least(f"{arrivals}: throughput relative to capacity", store, 0.9, served, "")
            p99 = outcome["accepted_ms"]["p99"] or float("inf")
            yield at_most(f"{arrivals}: p99 of accepted requests", store, PERMITTED_WAIT_MS, p99, " ms", 0)
            p50 = outcome["rejected_ms"]["p50"] or 0
            yield at_most(f"{arrivals}: p50 of rejected requests", store, 50, p50, " ms", 0)


def long_sessions(figures):
    for store in STORES:
        for kind, subject in (("context", "contexts"), ("append", "exchanges")):
            ratio = statistics.median(figures.long_to_short(store, kind))
            yield at_most(f"p50 of {subject}, long session relative to short", store, 1.2, ratio)
    for outcome in figures.results["open_loop"]:
        if outcome["load"] < 1:
            latency = outcome["accepted_ms"]
            ratio = latency["p99"] / latency["p50"] if latency["p50"] else float("inf")
            subject = describe(outcome)
            yield at_most(f"{subject}: p99 relative to p50", outcome["system"], 5, ratio)
            rejected = outcome["rejected_429"] + outcome["rejected_503"]
            yield at_most(f"{subject}: rejected requests", outcome["system"], 0, rejected, "", 0)


def search_index(figures):
    for store in STORES:
        ratio = statistics.median(figures.indexed_to_not_indexed(store))
        yield at_most("CPU time of an exchange, 16 connections, relative to one without search", store, 1.15, ratio)


def memory_and_start(figures):
    for store in STORES:
        service = figures.results["services"][store]
        memory = service["memory"]
        yield at_most("memory at rest, tokenizer in use", store, 64, memory["at_rest_mib"], " MiB", 0)
        subject = f"memory after {memory['requests']:,} requests over {memory['sessions']:,} sessions"
        yield at_most(subject, store, 128, memory["after_mib"], " MiB", 0)
        yield at_most("start to ready", store, 100, statistics.median(service["start_ms"]), " ms", 0)


GROUPS = (
    ("Throughput", throughput), ("SQLite", sqlite), ("One client", latency_of_one_client), ("Admission", overload),
    ("Long sessions and tails of latency", long_sessions), ("Search", search_index),
    ("Memory and start", memory_and_start),
)  # fmt: skip


def rows(figures):
    """Returns the rows of the table of goals."""
    return [[title, *goal.row()] for title, group in GROUPS for goal in group(figures)]


def violations(results):
    """Returns the guarantees of docs/guarantees.md about overload that the run did not fulfil."""
    problems = []
    for outcome in results["open_loop"]:
        name = f"{STORES[outcome['system']]}, {describe(outcome)}"
        memory = outcome["memory_mib"]
        growth = max(memory[len(memory) * 5 // 6 :]) / memory[len(memory) // 6]
        checks = [
            ((outcome["rejected_ms"]["p50"] or 0) >= 50, "the median rejection took 50 ms or more"),
            (outcome["failed"] + outcome["broken"] > 0, "some requests failed or got no response"),
            # Segments of the search index are made and merged after exchanges, which delays the next ones.
            (outcome["recovery_seconds"] >= 1 and outcome["workload"] != "exchange", "it did not recover within one second"),
            (growth > 1.25, f"memory grew by the factor {growth:.2f}"),
        ]
        problems += [f"{name}: {problem}" for failed, problem in checks if failed]
    return problems

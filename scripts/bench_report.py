"""Makes docs/benchmarks.md from the results of scripts/bench.py, and checks the guarantees under overload."""

import statistics

WORKLOADS = {"context-20": "context (20)", "context-100": "context (100)", "exchange": "exchange"}
SYSTEMS = {"postgres": "precis, Postgres", "sqlite": "precis, SQLite", "axum": "axum and sqlx", "pgbench": "pgbench"}
STORES = ("postgres", "sqlite")
CONNECTIONS = (1, 16, 64)
BEGIN, END = "<!-- begin: written by scripts/bench -->", "<!-- end: written by scripts/bench -->"


class Figures:
    """The runs of all rounds, by system, workload and number of connections."""

    def __init__(self, results):
        self.runs = {}
        for run in results["runs"]:
            self.runs.setdefault((run["system"], run["workload"], run["connections"]), []).append(run)

    def values(self, *key, field="rate"):
        """Returns a value for each round."""
        return [run[field] for run in self.runs[key]]

    def median(self, *key, field="rate"):
        return statistics.median(self.values(*key, field=field))

    def ratios(self, workload, system, other, connections=16):
        """Returns the ratio of the rates of two systems in each round."""
        rates = self.values(system, workload, 16), self.values(other, workload, connections)
        return [a / b for a, b in zip(*rates, strict=True)]


def spread(values):
    """Formats the median and, of several values, the range."""
    text = f"{statistics.median(values):.3g}"
    return text if len(values) < 2 else f"{text} ({min(values):.3g}–{max(values):.3g})"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def floor(subject, sign, bound, values):
    measured = statistics.median(values)
    is_reached = measured >= bound if sign == "≥" else measured <= bound
    return [subject, f"{sign} {bound}", spread(values), "yes" if is_reached else "**no**"]


def floors(results, figures):
    """Returns the rows of the table of floors."""
    rows = []
    for workload, bound in (("context-20", 0.6), ("context-100", 1.2), ("exchange", 0.5)):
        ratios = figures.ratios(workload, "postgres", "pgbench")
        rows.append(floor(f"{WORKLOADS[workload]}, Postgres relative to pgbench", "≥", bound, ratios))
    for workload in ("context-20", "context-100"):
        ratios = figures.ratios(workload, "sqlite", "postgres")
        rows.append(floor(f"{WORKLOADS[workload]}, SQLite relative to Postgres", "≥", 1.0, ratios))
    ratios = figures.ratios("exchange", "sqlite", "sqlite-alone", connections=1)
    rows.append(floor("exchange, SQLite relative to one transaction each", "≥", 1.0, ratios))
    for store in STORES:
        latencies = figures.values(store, "context-20", 1, field="p50")
        rows.append(floor(f"{SYSTEMS[store]}: p50 of a context for one client, ms", "≤", 1, latencies))
        rows.append(floor(f"{SYSTEMS[store]}: memory at rest, MiB", "≤", 64, [results["memory_mib"][store]]))
        costs = results["search_cost"][store]
        rows.append(floor(f"{SYSTEMS[store]}: CPU time of an exchange relative to one without search", "≤", 1.7, costs))
    return rows


def comparison(figures):
    """Returns the rows of the table of rates and latencies."""
    rows = []
    for workload, title in WORKLOADS.items():
        for system in SYSTEMS:
            ratio = "" if system in STORES else f"{statistics.median(figures.ratios(workload, 'postgres', system)):.2f}"
            latencies = [
                "/".join(f"{figures.median(system, workload, connections, field=field):.2f}" for field in ("p50", "p99"))
                for connections in CONNECTIONS
            ]
            rows.append([title, SYSTEMS[system], f"{figures.median(system, workload, 16):,.0f}", ratio, *latencies])
    return rows


def open_loop(results):
    """Returns the rows of the table of fixed arrival rates."""
    rows = []
    for outcome in results["open_loop"]:
        p50, p99 = (outcome["accepted_ms"][field] or 0 for field in ("p50", "p99"))
        rejected = outcome["rejected_429"] + outcome["rejected_503"]
        rows.append([
            SYSTEMS[outcome["system"]], WORKLOADS[outcome["workload"]], f"{outcome['load'] * 100:.0f} %",
            f"{outcome['accepted'] / outcome['seconds']:,.0f}", f"{p50:.2f}/{p99:.2f}", f"{rejected:,}",
            f"{outcome['unsent']:,}", f"{outcome['recovery_seconds']:.1f}", f"{max(outcome['memory_mib']):.0f}",
        ])  # fmt: skip
    return rows


def violations(results):
    """Returns the guarantees of docs/guarantees.md about overload that the run did not fulfil."""
    problems = []
    for outcome in results["open_loop"]:
        name = f"{SYSTEMS[outcome['system']]}, {outcome['workload']} at {outcome['load']:.0%} of the capacity"
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


def report(results):
    """Returns the measured part of docs/benchmarks.md."""
    machine, figures = results["machine"], Figures(results)
    floor_rows = floors(results, figures)
    reached = sum(row[-1] == "yes" for row in floor_rows)
    columns = ["", "", "per second, 16 conn.", "Postgres relative to it"]
    latencies = [f"p50/p99, {connections} conn." for connections in CONNECTIONS]
    open_loop_columns = ["", "", "load", "accepted/s", "p50/p99", "rejected", "not sent", "recovery, s", "memory, MiB"]
    return "\n".join([
        f"Measured on {machine['date']} at commit {machine['commit']} in {results['minutes']:.0f} minutes: {machine['cores']} "
        f"cores ({machine['cpu']}), Linux {machine['kernel']}, Postgres {machine['postgres']} with fsync {machine['fsync']}, "
        f"{results['rounds']} rounds; load of the machine before the run {machine['load']:.1f}.\n",
        f"### Floors\n\n{reached} of {len(floor_rows)} reached.\n\n"
        + table(["floor", "required", "measured", "reached"], floor_rows),
        "### Rates, and latencies in milliseconds\n\n" + table(columns + latencies, comparison(figures)),
        "### Fixed arrival rates\n\n" + table(open_loop_columns, open_loop(results)),
    ])  # fmt: skip


def replace_section(page, text):
    """Replaces the text between the two marks of a page."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"

"""Makes the tables and the plot of docs/benchmarks.md and docs/capacity.md from the results of scripts/bench."""

import math
import statistics

import bench_goals

TITLES = {
    "context-20": "Context, tail of 20 messages",
    "context-100": "Context, tail of 100 messages",
    "exchange": "Exchange, random sessions",
    "hot-session": "Exchange, one session",
}
NAMES = {
    "sqlite": "SQLite", "postgres": "Postgres", "pgbench": "pgbench", "sqlite-alone": "SQLite, one transaction each",
}  # fmt: skip
COLOURS = {"sqlite": "#8a6d1d", "postgres": "#1f5fa8", "pgbench": "#777777"}

# Assumptions of docs/capacity.md.
TURNS_PER_SESSION = 10
PEAK_FACTOR = 3
UTILISATION = 0.7
MESSAGES_PER_TURN = 2


def progress(number, run):
    rejected = sum(run.get("rejected", {}).values())
    rate = f"{run['rate']:8.0f}/s  p50 {run['p50_ms']:.2f} ms  p99 {run['p99_ms']:.2f} ms"
    name = f"round {number + 1}  {run['workload']:12} {run['system']:8} {run['connections']:4}"
    return f"{name} {rate}" + (f"  rejected {rejected}" if rejected else "")


class Figures:
    """The runs of all rounds, by system, workload and number of connections."""

    def __init__(self, results):
        self.results = results
        self.runs = {}
        for run in results["runs"]:
            self.runs.setdefault((run["system"], run["workload"], run["connections"]), []).append(run)

    def connections(self, system, workload):
        return sorted(key[2] for key in self.runs if key[:2] == (system, workload))

    def values(self, system, workload, connections, field):
        return [run[field] for run in self.runs[system, workload, connections] if field in run]

    def median(self, *key):
        return statistics.median(self.values(*key))

    def capacity(self, system, workload):
        """Returns the highest median rate, and its number of connections."""
        return max((self.median(system, workload, n, "rate"), n) for n in self.connections(system, workload))

    def ratios(self, system, workload, connections, reference="pgbench", reference_connections=None):
        """Returns the rate in each round relative to another system, with as many connections by default."""
        others = self.runs[reference, workload, reference_connections or connections]
        rates = {run["round"]: run["rate"] for run in others}
        return [run["rate"] / rates[run["round"]] for run in self.runs[system, workload, connections]]

    def ratios_to_best(self, system, workload, connections):
        """Returns the rate in each round relative to the faster run of pgbench in the same round."""
        ratios = [self.ratios(system, workload, connections, "pgbench", n) for n in self.connections("pgbench", workload)]
        return [min(of_round) for of_round in zip(*ratios, strict=True)]

    def relative_to_best(self, system, workload):
        """Returns the median rates of 16 and more connections relative to the highest."""
        rates = {n: self.median(system, workload, n, "rate") for n in self.connections(system, workload) if n >= 16}
        return {n: rate / max(rates.values()) for n, rate in rates.items()}

    def long_to_short(self, system, kind):
        """Returns the p50 of a long session relative to short ones in each round."""
        short, long = (self.values(system, f"{kind}-{length}", 1, "p50_ms") for length in ("short", "long"))
        return [b / a for a, b in zip(short, long, strict=True)]

    def indexed_to_not_indexed(self, system):
        """Returns the CPU time of an exchange with the search index relative to one without it in each round."""

        def cpu(workload):
            runs = sorted(self.runs[system, workload, 16], key=lambda run: run["round"])
            return [run["cpu_precis_us"] + run.get("cpu_database_us", 0) for run in runs]

        return [b / a for a, b in zip(cpu("exchange-not-indexed"), cpu("exchange-indexed"), strict=True)]


def spread(values, digits=0):
    """Formats the median and, of several values, the range."""
    text = f"{statistics.median(values):,.{digits}f}"
    return text if len(values) < 2 else f"{text} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def workload_table(figures, workload):
    rows = []
    for system in NAMES:
        for connections in figures.connections(system, workload):
            key = (system, workload, connections)
            ratio = best = rejected = ""
            if system in bench_goals.STORES:
                counts = {}
                for run in figures.runs[key]:
                    for status, count in {**run["rejected"], "broken": run["broken"]}.items():
                        counts[status] = counts.get(status, 0) + count
                rejected = ", ".join(f"{count} × {status}" for status, count in counts.items() if count) or "0"
                best = spread(figures.ratios_to_best(*key), 2)
                if connections in figures.connections("pgbench", workload):
                    ratio = spread(figures.ratios(*key), 2)
            rows.append([
                NAMES[system], connections, spread(figures.values(*key, "rate")), ratio, best,
                f"{figures.median(*key, 'p50_ms'):.2f} ms", f"{figures.median(*key, 'p99_ms'):.2f} ms", rejected,
            ])  # fmt: skip
    header = ["", "connections", "per second", "ratio to pgbench", "ratio to its faster run", "p50", "p99", "not accepted"]
    return f"### {TITLES[workload]}\n\n{table(header, rows)}"


REFERENCES = (
    ("axum, prepared response of 6 KB", "axum", "prepared"), ("precis, `/livez`", "postgres", "livez"),
)  # fmt: skip


def connections_table(figures):
    """Returns the throughput with each number of connections relative to the best."""
    rows, header = [], []
    services = [(title, NAMES[system], system, workload) for workload, title in TITLES.items() for system in bench_goals.STORES]
    for title, name, system, workload in services + [(title, "", *key) for title, *key in REFERENCES]:
        relative = figures.relative_to_best(system, workload)
        header = [f"{n} connections" for n in relative]
        rows.append([title, name, *(f"{value:.2f}" for value in relative.values())])
    return table(["", "", *header], rows)


def reference_table(figures):
    rows = []
    for name, system, workload in REFERENCES:
        for connections in figures.connections(system, workload):
            key = (system, workload, connections)
            p50, p99 = (figures.median(*key, field) for field in ("p50_ms", "p99_ms"))
            rows.append([name, connections, spread(figures.values(*key, "rate")), f"{p50:.2f} ms", f"{p99:.2f} ms"])
    return table(["", "connections", "per second", "p50", "p99"], rows)


def cpu_table(figures):
    rows = []
    for workload, title in TITLES.items():
        def cpu(system, field, workload=workload):
            return spread(figures.values(system, workload, 64, field))

        rows.append([
            title, cpu("sqlite", "cpu_precis_us"), cpu("postgres", "cpu_precis_us"), cpu("postgres", "cpu_database_us"),
            cpu("pgbench", "cpu_database_us"),
        ])  # fmt: skip
    return table(["µs per request", "SQLite: precis", "Postgres: precis", "Postgres: server", "pgbench: server"], rows)


def full_table(figures):
    """Returns the figures of contexts with all parts of the system message, next to those without."""
    rows = []
    for system in bench_goals.STORES:
        for workload, title in (("context-20", "a system prompt of 28 characters"), ("context-full", "all parts")):
            key = (system, workload, 16)
            rate, cpu = (spread(figures.values(*key, field)) for field in ("rate", "cpu_precis_us"))
            rows.append([NAMES[system], title, rate, f"{figures.median(*key, 'p50_ms'):.2f} ms", f"{cpu} µs"])
    return table(["16 connections", "system message", "per second", "p50", "CPU time of precis"], rows)


def history_table(figures):
    rows = []
    for kind, title in (("context", "Context"), ("append", "Exchange")):
        for system in bench_goals.STORES:
            short, long = (figures.values(system, f"{kind}-{length}", 1, "p50_ms") for length in ("short", "long"))
            ratios = spread(figures.long_to_short(system, kind), 2)
            rows.append([title, NAMES[system], f"{spread(short, 2)} ms", f"{spread(long, 2)} ms", ratios])
    history = f"{figures.results['options']['history']:,}"
    return table(["p50, one connection", "", "sessions of 100 messages", f"a session of {history} messages", "ratio"], rows)


def open_loop_capacity(figures):
    """Returns a sentence with the capacities to which the shares of the open loops refer."""
    rates = [
        f"{NAMES[found['system']]} {found['workload']} {found['rate']:,.0f} ({found['rate'] / found['closed_loop_rate']:.0%})"
        for found in figures.results["open_loop_capacity"]
    ]
    return f"Capacity in requests per second, and its share of the highest rate of wrk: {', '.join(rates)}."


def open_loop_table(figures):
    rows = []
    for outcome in figures.results["open_loop"]:
        def latency(name, outcome=outcome):
            p50, p99 = outcome[name]["p50"], outcome[name]["p99"]
            return "–" if p50 is None else f"{p50:.2f} / {p99:.2f} ms"

        def rate(count, outcome=outcome):
            return f"{count / outcome['seconds']:,.0f}"

        load = f"{outcome['workload']}, {outcome['load'] * 100:.0f} %"
        if consolidations := outcome.get("consolidations"):
            load += ", with " + ", ".join(f"{count} × {name}" for name, count in sorted(consolidations.items()))
        rows.append([
            NAMES[outcome["system"]], load, rate(outcome["sent"] + outcome["unsent"]), rate(outcome["accepted"]),
            latency("accepted_ms"), outcome["rejected_429"], outcome["rejected_503"], latency("rejected_ms"),
            outcome["failed"] + outcome["broken"], outcome["unsent"], latency("delay_ms"),
            f"{outcome['recovery_seconds']:.2f} s", f"{max(outcome['memory_mib']):.0f} MiB",
        ])  # fmt: skip
    header = ["", "share of capacity", "arrivals/s", "accepted/s", "accepted p50 / p99", "429", "503", "rejected p50 / p99",
        "failed", "not sent", "delay of the generator", "recovery", "peak memory"]  # fmt: skip
    return table(header, rows)


def service_table(figures):
    rows = []
    for system in bench_goals.STORES:
        service = figures.results["services"][system]
        memory = service["memory"]
        index = [run["index_seconds"] for run in figures.results["runs"]
            if run["system"] == system and run["workload"] == "exchange"]  # fmt: skip
        rows.append([
            NAMES[system], f"{spread(service['start_ms'])} ms", f"{memory['at_rest_mib']:.0f} MiB",
            f"{memory['after_mib']:.0f} MiB", f"{memory['peak_mib']:.0f} MiB", f"{memory['requests']:,}",
            f"{memory['rate']:,.0f}", f"{spread(index, 1)} s", f"{service['bytes_per_message']:,.0f}",
        ])  # fmt: skip
    header = ["", "start to ready", "memory at rest", "after the requests", "peak", "requests", "requests per second",
        "index complete after exchanges", "bytes in the database per message"]  # fmt: skip
    return table(header, rows)


def benchmarks(figures):
    machine, options = figures.results["machine"], figures.results["options"]
    goals = bench_goals.rows(figures)
    reached = sum(goal[-1] == "yes" for goal in goals)
    parts = [
        f"Measured on {machine['date']} at commit {machine['commit']} in {figures.results['minutes']:.0f} minutes: "
        f"{machine['cores']} cores ({machine['cpu']}), Linux {machine['kernel']}, Postgres {machine['postgres']} with fsync "
        f"{machine['fsync']}; {options['rounds']} rounds, {options['seconds']} s for each figure; load of the machine before "
        f"the run {machine['load']:.1f}.\n",
        "![Requests per second by number of connections](benchmarks.svg)\n",
        f"### Goals\n\n{reached} of {len(goals)} reached.\n\n"
        + table(["", "goal", "store", "required", "measured", "reached"], goals),
        *(workload_table(figures, workload) for workload in TITLES),
        f"### Throughput relative to the best number of connections\n\n{connections_table(figures)}",
        f"### Limits of this machine\n\n{reference_table(figures)}",
        f"### CPU time at 64 connections\n\n{cpu_table(figures)}",
        f"### Parts of the system message\n\n{full_table(figures)}",
        f"### Length of the history\n\n{history_table(figures)}",
        f"### Fixed arrival rate\n\n{open_loop_capacity(figures)}\n\n{open_loop_table(figures)}",
        f"### Start, memory, index and size\n\n{service_table(figures)}",
    ]
    return "\n".join(parts)


def capacity(figures):
    """Returns the figures of docs/capacity.md. A turn is one context with a tail of 20 messages and one exchange."""
    rows = []
    turns = {}
    for system in ("sqlite", "postgres"):
        (context, at_context), (exchange, at_exchange) = (
            figures.capacity(system, workload) for workload in ("context-20", "exchange")
        )
        turns[system] = 1 / (1 / context + 1 / exchange)
        database = [
            figures.median(system, workload, connections, "cpu_database_us")
            for workload, connections in (("context-20", at_context), ("exchange", at_exchange))
            if system == "postgres"
        ]
        per_core = f"{1e6 / sum(database):,.0f}" if database else ""
        rows.append([NAMES[system], f"{context:,.0f}", f"{exchange:,.0f}", f"{turns[system]:,.0f}", per_core])
    header = ["", "contexts/s", "exchanges/s", "turns/s", "turns/s per core of the database server"]
    message_bytes = figures.results["services"]["postgres"]["bytes_per_message"]
    return f"{table(header, rows)}\n{load_table(turns['postgres'], message_bytes)}"


def load_table(turns_per_second, message_bytes):
    """Returns the arithmetic for numbers of sessions per day, on Postgres."""
    rows = []
    for sessions in (1_000, 100_000, 10_000_000):
        turns = sessions * TURNS_PER_SESSION
        peak = turns / 86_400 * PEAK_FACTOR
        replicas = max(1, math.ceil(peak / (turns_per_second * UTILISATION)))
        gigabytes = turns * MESSAGES_PER_TURN * message_bytes / 1e9
        rows.append([
            f"{sessions:,}", f"{turns:,}", f"{peak:,.{0 if peak >= 10 else 1}f}", replicas,
            f"{gigabytes:,.{0 if gigabytes >= 10 else 2}f} GB", f"{gigabytes * 365 / 1000:,.{0 if gigabytes >= 100 else 2}f} TB",
        ])  # fmt: skip
    header = ["sessions per day", "turns per day", "turns/s at the peak", "replicas", "storage per day", "per year"]
    basis = (
        f"The arithmetic uses {turns_per_second:,.0f} turns per second and replica at {UTILISATION:.0%} of its capacity, and "
        f"{message_bytes:,.0f} bytes per message. The number of replicas assumes that the database keeps up with them."
    ).replace("%", " %")
    return f"{basis}\n\n{table(header, rows)}"


def plot(figures):
    """Returns an SVG with a panel per workload: median and range of the rate by number of connections."""
    width, height, left, top = 400, 270, 56, 52
    plot_width, plot_height = width - left - 20, height - top - 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {2 * height + 30}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (workload, title) in enumerate(TITLES.items()):
        x0, y0 = index % 2 * width + left, index // 2 * height + top
        all_connections = figures.connections("sqlite", workload)
        rates = [run["rate"] for run in figures.results["runs"] if run["workload"] == workload]
        step = 10 ** math.floor(math.log10(max(rates)))
        step = next(s for s in (step / 5, step / 2, step, step * 2) if max(rates) / s <= 6)
        highest = math.ceil(max(rates) / step) * step

        def x(connections, x0=x0, all_connections=all_connections):
            place = math.log(connections / all_connections[0]) / math.log(all_connections[-1] / all_connections[0])
            return x0 + 12 + place * (plot_width - 24)

        def y(rate, y0=y0, highest=highest):
            return y0 + plot_height * (1 - rate / highest)

        parts.append(f'<text x="{x0}" y="{y0 - 14}" font-weight="bold">{title}</text>')
        for n in range(round(highest / step) + 1):
            at = y(n * step)
            parts.append(f'<path d="M{x0} {at:.1f}h{plot_width}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">{n * step:,.0f}</text>')
        for connections in all_connections:
            at = x(connections)
            parts.append(f'<text x="{at:.1f}" y="{y0 + plot_height + 17}" text-anchor="middle">{connections}</text>')
        for system, colour in COLOURS.items():
            points = []
            for connections in figures.connections(system, workload):
                values = figures.values(system, workload, connections, "rate")
                at, middle = x(connections), y(statistics.median(values))
                points.append(f"{at:.1f},{middle:.1f}")
                low, high = y(min(values)), y(max(values))
                parts.append(f'<path d="M{at:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="4" opacity=".35"/>')
                parts.append(f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="3" fill="{colour}"/>')
            dashes = ' stroke-dasharray="4 3"' if system == "pgbench" else ""
            parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')
    for index, (system, colour) in enumerate(COLOURS.items()):
        at, bottom = left + index * 110, 2 * height + 14
        parts.append(f'<circle cx="{at}" cy="{bottom - 4}" r="4" fill="{colour}"/>')
        name = "pgbench" if system == "pgbench" else f"precis, {NAMES[system]}"
        parts.append(f'<text x="{at + 10}" y="{bottom}">{name}</text>')
    parts.append(f'<text x="{2 * width - 20}" y="{2 * height + 14}" text-anchor="end">per second, by connections</text></svg>')
    return "\n".join(parts) + "\n"


BEGIN, END = "<!-- begin: written by scripts/bench -->", "<!-- end: written by scripts/bench -->"


def replace_section(page, text, begin=BEGIN, end=END):
    """Replaces the text between the two marks of a page."""
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no section between {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def write(results, pages, output):
    """Prints the tables, and writes the pages and the plot to the folder `output`."""
    figures = Figures(results)
    output.mkdir(parents=True, exist_ok=True)
    texts = {"benchmarks.md": benchmarks(figures), "capacity.md": capacity(figures)}
    for name, text in texts.items():
        page = (pages / name).read_text(encoding="utf-8")
        (output / name).write_text(replace_section(page, text), encoding="utf-8")
    (output / "benchmarks.svg").write_text(plot(figures), encoding="utf-8")
    print(texts["benchmarks.md"])
    print(f"Written to {output}: {', '.join(texts)}, benchmarks.svg")

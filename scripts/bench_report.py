"""Makes the tables and the plot of docs/benchmarks.md and docs/capacity.md from the results of scripts/bench."""

import math
import statistics

TITLES = {
    "context-20": "Context, tail of 20 messages",
    "context-100": "Context, tail of 100 messages",
    "exchange": "Exchange, random sessions",
    "hot-session": "Exchange, one session",
}
NAMES = {"sqlite": "SQLite", "postgres": "Postgres", "pgbench": "pgbench"}
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

    def ratios(self, system, workload, connections):
        """Returns the rate in each round relative to the faster run of pgbench in the same round."""
        best = {}
        for clients in self.connections("pgbench", workload):
            for run in self.runs["pgbench", workload, clients]:
                best[run["round"]] = max(best.get(run["round"], 0), run["rate"])
        runs = self.runs[system, workload, connections]
        return [run["rate"] / best[run["round"]] for run in runs if run["round"] in best]


def spread(values, digits=0):
    """Formats the median and, of several values, the range."""
    text = f"{statistics.median(values):,.{digits}f}"
    return text if len(values) < 2 else f"{text} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def workload_table(figures, workload):
    rows = []
    for system in ("sqlite", "postgres", "pgbench"):
        for connections in figures.connections(system, workload):
            key = (system, workload, connections)
            runs = figures.runs[key]
            rejected = {}
            for run in runs:
                for status, count in {**run.get("rejected", {}), "broken": run.get("broken", 0)}.items():
                    rejected[status] = rejected.get(status, 0) + count
            rejected = ", ".join(f"{count} × {status}" for status, count in rejected.items() if count) or "0"
            ratios = [] if system == "pgbench" else figures.ratios(*key)
            rows.append([
                NAMES[system], connections, spread(figures.values(*key, "rate")),
                spread(ratios, 2) if ratios else "", f"{figures.median(*key, 'p50_ms'):.2f} ms",
                f"{figures.median(*key, 'p99_ms'):.2f} ms", "" if system == "pgbench" else rejected,
            ])  # fmt: skip
    header = ["", "connections", "per second", "ratio to pgbench", "p50", "p99", "not accepted"]
    return f"### {TITLES[workload]}\n\n{table(header, rows)}"


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


def history_table(figures):
    rows = []
    for system in ("sqlite", "postgres"):
        short, long = (figures.values(system, f"history-{name}", 1, "p50_ms") for name in ("short", "long"))
        ratios = [b / a for a, b in zip(short, long, strict=True)]
        rows.append([NAMES[system], f"{spread(short, 2)} ms", f"{spread(long, 2)} ms", spread(ratios, 2)])
    history = f"{figures.results['options']['history']:,}"
    return table(["p50 of a context", "history of 100 messages", f"history of {history} messages", "ratio"], rows)


def open_loop_table(figures):
    rows = []
    for outcome in figures.results["open_loop"]:
        def latency(name, outcome=outcome):
            p50, p99 = outcome[name]["p50"], outcome[name]["p99"]
            return "–" if p50 is None else f"{p50:.2f} / {p99:.2f} ms"

        def rate(count, outcome=outcome):
            return f"{count / outcome['seconds']:,.0f}"

        rows.append([
            NAMES[outcome["system"]], f"{outcome['load']:.0%}".replace("%", " %"),
            rate(outcome["sent"] + outcome["unsent"]), rate(outcome["accepted"]), latency("accepted_ms"),
            outcome["rejected_429"], outcome["rejected_503"], latency("rejected_ms"),
            outcome["failed"] + outcome["broken"], outcome["unsent"], latency("delay_ms"),
            f"{outcome['recovery_seconds']:.2f} s", f"{max(outcome['memory_mib']):.0f} MiB",
        ])  # fmt: skip
    header = ["", "of capacity", "arrivals/s", "accepted/s", "accepted p50 / p99", "429", "503", "rejected p50 / p99",
        "failed", "not sent", "delay of the generator", "recovery", "peak memory"]  # fmt: skip
    return table(header, rows)


def service_table(figures):
    rows = []
    for system in ("sqlite", "postgres"):
        service = figures.results["services"][system]
        index = [run["index_seconds"] for run in figures.results["runs"]
            if run["system"] == system and run["workload"] == "exchange"]  # fmt: skip
        rows.append([
            NAMES[system], f"{spread(service['start_ms'])} ms", f"{service['memory_at_rest_mib']:.0f} MiB",
            f"{service['memory_after_mib']:.0f} MiB", f"{spread(index, 1)} s", f"{service['bytes_per_message']:,.0f}",
        ])  # fmt: skip
    header = ["", "start to ready", "memory at rest", "memory after the runs", "index complete after exchanges",
        "bytes in the database per message"]  # fmt: skip
    return table(header, rows)


def benchmarks(figures):
    machine, options = figures.results["machine"], figures.results["options"]
    parts = [
        f"Measured on {machine['date']} at commit {machine['commit']}: {machine['cores']} cores ({machine['cpu']}), Linux "
        f"{machine['kernel']}, Postgres {machine['postgres']} with fsync {machine['fsync']}; {options['rounds']} rounds, "
        f"{options['seconds']} s for each figure; load of the machine before the run {machine['load']:.1f}.\n",
        "![Requests per second by number of connections](benchmarks.svg)\n",
        *(workload_table(figures, workload) for workload in TITLES),
        f"### CPU time at 64 connections\n\n{cpu_table(figures)}",
        f"### Length of the history\n\n{history_table(figures)}",
        f"### Fixed arrival rate\n\n{open_loop_table(figures)}",
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


def replace_section(page, text):
    """Replaces the text between the two marks of a page."""
    begin, end = "<!-- begin: written by scripts/bench -->", "<!-- end: written by scripts/bench -->"
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


def violations(results):
    """Returns the guarantees of docs/guarantees.md about overload that the run did not fulfil."""
    problems = []
    for outcome in results["open_loop"]:
        name = f"{NAMES[outcome['system']]} at {outcome['load']:.0%} of its capacity"
        memory = outcome["memory_mib"]
        growth = max(memory[len(memory) * 5 // 6 :]) / memory[len(memory) // 6]
        checks = [
            ((outcome["rejected_ms"]["p50"] or 0) >= 50, "the median rejection took 50 ms or more"),
            (outcome["failed"] + outcome["broken"] > 0, "some requests failed or got no response"),
            (outcome["recovery_seconds"] >= 1, "it did not recover within one second"),
            (growth > 1.25, f"memory grew by the factor {growth:.2f}"),
        ]
        problems += [f"{name}: {problem}" for failed, problem in checks if failed]
    return problems

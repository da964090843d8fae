"""Samples precis under load. Run it with scripts/profile, which builds precis and starts Postgres.

Each sample is a stack. Frames that the compiler inlined are restored from the debug information. A sample belongs to the
category of its innermost frame that has one: a copy of bytes belongs to the code that copies.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import bench_load
import bench_report
import bench_workloads
from bench_systems import PostgresService, binary

ROOT = Path(__file__).resolve().parent.parent
CONNECTIONS = 64
SAMPLES_PER_SECOND = 1999  # not a divisor of the frequency of timers
LONGEST_NAME = 70
# Frames below this part of the samples are not drawn. They would make the files large.
SMALLEST_FRAME_PERCENT = 0.35

# The first category with a matching expression applies to a frame of the kernel.
KERNEL = (
    ("kernel: connections of clients", r"^(tcp|inet6?|ip|__ip|sock_sendmsg|__tcp|net_rx|__netif|loopback|nf_|skb_copy_datagram)_?"),
    ("kernel: connection to Postgres", r"^(unix_|__unix)"),
    ("kernel: files", r"^(ext4|vfs_fsync|jbd2|blk|submit_bio)"),
    ("kernel: wake-ups and waiting", r"^(futex|__futex|do_futex|ep_|do_epoll|__x64_sys_epoll|eventfd|schedule|__schedule|try_to_wake)"),
    ("kernel: memory", r"^(asm_exc_page_fault|exc_page_fault|do_user_addr_fault|__x64_sys_madvise|__x64_sys_munmap)"),
)  # fmt: skip
# The same for a function of a process. A crate without an expression has no category, and its caller decides.
CATEGORIES = (
    ("allocator", r"^(_?mi_|mimalloc|malloc|free$|calloc|realloc)"),
    ("tokenizer", r"^(tiktoken|fancy_regex|regex|rustc_hash|bstr|bpe|precis::domain::tokens)"),
    ("search: analysis of words", r"^(frostem|unicode_segmentation|unicode_normalization|precis::domain::search|precis::service::indexer)"),
    ("JSON", r"^(serde|itoa|ryu|zmij|precis::http::json|memchr)"),
    ("metrics and log", r"^(metrics|tracing|log::|quanta|precis::telemetry|precis::http::middleware::metrics)"),
    ("driver of Postgres", r"^(sqlx|precis::storage::statement)"),
    ("HTTP protocol", r"^(hyper|httparse|http::|http_body|httpdate|h2::|tokio_io_timeout|socket2|mio::net)"),
    ("routes and middleware", r"^(axum|tower|matchit|governor|precis::http)"),
    ("own code: storage", r"^precis::storage"),
    ("own code: service and rules", r"^(precis::|quick_cache)"),
    ("tasks and waiting", r"^(tokio|mio|parking_lot|futures_util::(future|stream)::futures_unordered|epoll_wait)"),
)  # fmt: skip
OTHER = "other"
BEGIN, END = "<!-- begin: written by scripts/profile -->", "<!-- end: written by scripts/profile -->"


# Characters that Rust's symbols cannot contain.
ESCAPES = {"$LT$": "<", "$GT$": ">", "$RF$": "&", "$BP$": "*", "$C$": ",", "$LP$": "(", "$RP$": ")", "..": "::"}


def simple_name(symbol):
    """Returns a function's path without types in angle brackets, hashes and closures: `<T as Trait>::f` becomes `T::f`."""
    symbol = re.sub(r"::h[0-9a-f]{16}$|\.llvm\.\d+$|\[[0-9a-f]{16}\]", "", symbol)
    for escape, character in ESCAPES.items():
        symbol = symbol.replace(escape, character)
    symbol = re.sub(r"\$u([0-9a-f]{2})\$", lambda escape: chr(int(escape[1], 16)), symbol)
    symbol = re.sub(r"(^|::)_(?=[<{])", r"\1", symbol).replace("::{{closure}}", "").replace("::{closure#0}", "")
    implementation = re.search(r"<impl (?:.* for )?&?(?:mut )?([\w:]+).*>::(\w+)$", symbol)
    if implementation:
        symbol = f"{implementation[1]}::{implementation[2]}"
    elif symbol.startswith("<"):
        depth = 0
        for end, character in enumerate(symbol):
            depth += (character == "<") - (character == ">" and symbol[end - 1] != "-")
            if depth == 0:
                kind = strip_generics(symbol[1:end]).split(" as ")[0].strip("&*() ")
                symbol = kind.removeprefix("mut ").removeprefix("dyn ") + symbol[end + 1 :]
                break
    return strip_generics(symbol).replace(";", ",")


def strip_generics(name):
    text, depth = [], 0
    for place, character in enumerate(name):
        if character == "<":
            depth += 1
        elif character == ">" and name[place - 1 : place] != "-":
            depth -= 1
        elif depth == 0:
            text.append(character)
    return re.sub(r"::::+", "::", "".join(text)).removesuffix("::")


class Symbols:
    """The functions of a binary by address, including inlined ones."""

    def __init__(self, program):
        self.program = program
        self.functions = {}
        headers = subprocess.run(["readelf", "--program-headers", "--wide", program], check=True, stdout=subprocess.PIPE, text=True)
        fields = [line.split() for line in headers.stdout.splitlines() if line.strip().startswith("LOAD")]
        # perf prints places in the file, debug information has virtual addresses.
        self.segments = [tuple(int(field, 16) for field in (f[1], f[2], f[4])) for f in fields]

    def virtual_address(self, place):
        return next((address + place - start for start, address, size in self.segments if start <= place < start + size), place)

    def load(self, places):
        """Looks up all addresses at once."""
        addresses = "\n".join(f"{self.virtual_address(place):#x}" for place in places)
        command = ["llvm-symbolizer", f"--obj={self.program}", "--inlines", "--demangle", "--functions=linkage"]
        result = subprocess.run(command, input=addresses, check=True, stdout=subprocess.PIPE, text=True)
        for place, block in zip(places, result.stdout.split("\n\n"), strict=False):
            self.functions[place] = [simple_name(line) for line in block.splitlines()[::2]]


def read_stacks(data, program):
    """Returns the stacks of a recording with their numbers. A stack is a tuple of frames, the innermost first."""
    command = ["perf", "script", "--no-inline", "-F", "ip,sym,dso", "-i", data]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    stacks = []
    for block in text.split("\n\n"):
        stack = []
        for line in block.splitlines():
            if frame := re.fullmatch(r"\s*([0-9a-f]+) (.*) \((.*)\)", line):
                stack.append((int(frame[1], 16), frame[2], frame[3]))
        if stack:
            stacks.append(stack)
    symbols = Symbols(program)
    # A return address is the place after the call.
    place = lambda index, address: address - (index > 0)  # noqa: E731
    places = {
        place(index, frame[0]) for stack in stacks for index, frame in enumerate(stack) if frame[2] == str(program)
    }  # fmt: skip
    symbols.load(sorted(places))
    counts = Counter()
    for stack in stacks:
        frames = []
        for index, (address, symbol, library) in enumerate(stack):
            if library == str(program):
                frames += symbols.functions.get(place(index, address)) or [simple_name(symbol)]
            elif symbol != "[unknown]":
                frames.append(f"{symbol.partition('+')[0]}{'_[k]' if 'kernel' in library else ''}")
        counts[tuple(frames)] += 1
    return counts


def category(stack):
    """Returns the category of a stack, whose innermost frame is the first."""
    kernel = [frame.removesuffix("_[k]") for frame in stack if frame.endswith("_[k]")]
    if kernel:
        for name, expression in KERNEL:
            if any(re.search(expression, frame) for frame in kernel):
                return name
        return "kernel: other"
    for frame in stack:
        for name, expression in CATEGORIES:
            if re.search(expression, frame):
                return name
    return OTHER


def is_scaffolding(frame):
    """Returns `true` for functions that only call another one, which make a flame graph higher and explain nothing."""
    return bool(re.match(r"(core|std|alloc|futures_util|futures_core|tower|tower_service)::|__rust|_?_?clone|start_thread|main$", frame))


def write_flame_graph(stacks, title, file):
    """Draws stacks with the outermost frame at the bottom."""
    folded = Counter()
    for stack, count in stacks.items():
        frames = [frame[:LONGEST_NAME] for frame in stack if not is_scaffolding(frame)]
        frames = [frame for frame, next_frame in zip(frames, [*frames[1:], None], strict=True) if frame != next_frame]
        folded[";".join(reversed(frames)) or OTHER] += count
    lines = "".join(f"{frames} {count}\n" for frames, count in sorted(folded.items()))
    command = ["inferno-flamegraph", "--title", title, "--countname", "samples", "--hash", "--fontsize", "11",
        "--minwidth", str(SMALLEST_FRAME_PERCENT)]  # fmt: skip
    with open(file, "w", encoding="utf-8") as output:
        subprocess.run(command, input=lines, check=True, stdout=output, stderr=subprocess.DEVNULL, text=True)


def record(service, postgres, workload, seconds):
    """Samples precis during a run, and returns the stacks and the run."""
    data = Path(f"{workload.name}.perf").resolve()
    command = ["perf", "record", "--event=cpu-clock", f"--freq={SAMPLES_PER_SECOND}", "--call-graph=fp", "--quiet",
        f"--pid={service.process.pid}", f"--output={data}", "--", "sleep", str(seconds)]  # fmt: skip
    perf = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    run = bench_load.run_precis(service, postgres, workload, CONNECTIONS, seconds)
    perf.wait()
    return read_stacks(data, binary("precis").resolve()), run


def measure(options):
    postgres = PostgresService()
    settings = ["--config", options.settings] if options.settings else []
    profiles = {}
    try:
        postgres.start(*settings)
        bench_workloads.seed(postgres)
        postgres.optimise()
        for workload in (bench_workloads.read(20), bench_workloads.append("exchange", bench_workloads.SESSIONS)):
            workload.write_files()
            bench_load.wrk(postgres.address, workload, CONNECTIONS, 3)
            stacks, run = record(postgres, postgres, workload, options.seconds)
            rejected = sum(run["rejected"].values())
            print(f"{workload.name}: {run['rate']:.0f}/s, {stacks.total()} samples, {rejected} rejected", file=sys.stderr)
            profiles[workload.name] = (stacks, run)
    finally:
        postgres.stop()
    return profiles


def table(profiles):
    """Returns the time of each category in microseconds per request."""
    times = {
        path: {kind: count * run["cpu_precis_us"] / stacks.total() for kind, count in by_category(stacks).items()}
        for path, (stacks, run) in profiles.items()
    }
    order = [name for name, _ in KERNEL] + ["kernel: other"] + [name for name, _ in CATEGORIES] + [OTHER]
    rows = [
        [name, *(f"{of_path.get(name, 0):.1f}" for of_path in times.values())]
        for name in order
        if any(of_path.get(name, 0) >= 0.05 for of_path in times.values())
    ]
    runs = [run for _, run in profiles.values()]
    rows.append(["**all**", *(f"**{run['cpu_precis_us']:.0f}**" for run in runs)])
    rows.append(["requests per second", *(f"{run['rate']:,.0f}" for run in runs)])
    return bench_report.table(["µs of CPU time per request", *(bench_report.TITLES[path] for path in profiles)], rows)


def by_category(stacks):
    counts = Counter()
    for stack, count in stacks.items():
        counts[category(stack)] += count
    return counts


def deciding_frame(stack):
    """Returns the function that decided the category of a stack."""
    expressions = [expression for _, expression in CATEGORIES]
    return next((frame for frame in stack if any(re.search(e, frame) for e in expressions)), stack[0] if stack else OTHER)


def functions(stacks, run, number):
    """Returns the most frequent functions of each category, with microseconds per request."""
    counts = {}
    for stack, count in stacks.items():
        is_kernel = any(frame.endswith("_[k]") for frame in stack)
        frame = stack[0] if is_kernel else deciding_frame(stack)
        counts.setdefault(category(stack), Counter())[frame] += count
    lines = []
    for name, frames in sorted(counts.items(), key=lambda item: -item[1].total()):
        lines.append(name)
        for frame, count in frames.most_common(number):
            lines.append(f"  {count * run['cpu_precis_us'] / stacks.total():6.2f}  {frame}")
    return "\n".join(lines)


def parse_options():
    parser = argparse.ArgumentParser(prog="scripts/profile", description="Shows where precis spends its CPU time.")
    parser.add_argument("--seconds", type=int, default=15, help="for each path")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the page and the flame graphs")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="prints N functions of each category")
    parser.add_argument("--settings", type=Path, help="a file of settings for precis")
    parser.add_argument("--build", default="", help="name of another build; writes its flame graphs, but not the page")
    options = parser.parse_args()
    options.output, options.settings = options.output.resolve(), options.settings and options.settings.resolve()
    return options


def main():
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="precis-profile.", dir=os.environ["PRECIS_BENCH_FOLDER"]) as work:
        os.chdir(work)
        profiles = measure(options)
        os.chdir(ROOT)
    options.output.mkdir(parents=True, exist_ok=True)
    for path, (stacks, run) in profiles.items():
        file = options.output / "-".join(filter(None, ["flame", path, options.build]))
        file = file.with_suffix(".svg")
        title = f"precis on Postgres: {bench_report.TITLES[path]}"
        write_flame_graph(stacks, f"{title} ({options.build})" if options.build else title, file)
        print(f"{file}: {file.stat().st_size // 1024} KiB", file=sys.stderr)
        if options.functions:
            print(f"\n{bench_report.TITLES[path]}, µs\n\n{functions(stacks, run, options.functions)}\n")
    text = table(profiles)
    print(text)
    if not options.build:
        page = ROOT / "docs/performance.md"
        updated = bench_report.replace_section(page.read_text(encoding="utf-8"), text, BEGIN, END)
        (options.output / page.name).write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()

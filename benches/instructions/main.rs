//! Instruction counts of the hot functions of the domain, as a check against slower code: `scripts/instructions`, which
//! builds this program with the options that the committed counts belong to.
//!
//! Times on a shared machine vary by more than most regressions. The number of executed instructions hardly varies, and
//! valgrind's callgrind counts it. The program runs itself in callgrind and compares the counts with `counts.toml`. Counts
//! that are lower than committed fail, too: otherwise a later regression of the same size would stay unnoticed.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that cannot continue ends")]

use src::domain;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

// Compiled as a part of this program, so that it can be optimised without compiling the rest of precis again.
#[expect(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::struct_field_names,
    reason = "part of the library"
)]
#[path = "../../src"]
mod src {
    pub mod domain;
}
mod work;

/// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Largest accepted difference, in percent. Repeated runs differ by 0.2 %, and seldom by 0.8 %.
const TOLERANCE: f64 = 3.0;
/// Calls before the counted ones: they load the tokenizer, and fill caches and the allocator.
const WARMUP_CALLS: usize = 3;
/// Counted calls, of which the mean is taken: hash maps have random seeds, so that single calls differ a little.
const CALLS: u64 = 10;

/// Instructions per call, in the order of the calls of [`run`].
type Counts = Vec<(String, u64)>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["run"] => {
            work::run_all();
            ExitCode::SUCCESS
        }
        ["compare"] => compare(&count()),
        ["write"] => {
            write(&count());
            ExitCode::SUCCESS
        }
        _ => {
            println!("Run scripts/instructions: the committed counts belong to its options of the compiler.");
            ExitCode::FAILURE
        }
    }
}

/// Prints a name and calls its function. This is the part of the program that runs in callgrind.
fn run(name: &str, mut function: impl FnMut()) {
    println!("{name}");
    for _ in 0..WARMUP_CALLS {
        function();
    }
    count_instructions_of(&mut function);
}

/// Callgrind counts only inside this function, and writes a file when it returns.
#[inline(never)]
fn count_instructions_of(function: &mut dyn FnMut()) {
    for _ in 0..CALLS {
        function();
    }
}

/// Runs this program in callgrind.
fn count() -> Counts {
    let folder = profiles();
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("the old profiles can be removed");
    }
    std::fs::create_dir_all(&folder).expect("a folder for the profiles");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .args(["--toggle-collect=*::count_instructions_of", "--dump-after=*::count_instructions_of"])
        .arg(format!("--callgrind-out-file={}", folder.join("profile").display()))
        .arg(std::env::current_exe().expect("the path of this program"))
        .arg("run")
        // The environment is on the stack, and its size moves addresses.
        .env_clear()
        // Otherwise glibc copies with `rep movsb`, which callgrind counts as one instruction per byte.
        .env("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-ERMS")
        // Otherwise the allocator returns unused memory after a time.
        .env("MIMALLOC_PURGE_DELAY", "-1")
        .stderr(Stdio::inherit())
        .output()
        .expect("valgrind is installed");
    assert!(output.status.success(), "the counted functions failed in valgrind: {}", output.status);
    let names = String::from_utf8(output.stdout).expect("names");
    let count = |(index, name): (usize, &str)| {
        let profile = folder.join(format!("{name}.out"));
        std::fs::rename(folder.join(format!("profile.{index}")), &profile).expect("a profile per name");
        (name.to_owned(), total(&profile) / CALLS)
    };
    (1..).zip(names.lines()).map(count).collect()
}

/// Returns the folder of the profiles. Each has the name of its function.
fn profiles() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("instructions")
}

/// Returns the number of instructions in a profile, without those of the allocator and of the C library: both depend on the
/// C compiler and the distribution of the machine.
fn total(profile: &Path) -> u64 {
    let text = std::fs::read_to_string(profile).expect("a profile");
    // Names are numbered, and only the first occurrence of a number has the name: "fn=(7) name", later "fn=(7)".
    let (mut objects, mut functions) = (HashMap::new(), HashMap::new());
    let (mut is_own_object, mut is_own_function, mut total) = (true, true, 0);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some((kind, value)) = line.split_once('=') {
            let (number, name) = value.split_once(' ').unwrap_or((value, ""));
            match kind {
                "ob" => is_own_object = !objects.entry(number).or_insert(name).contains("/libc.so"),
                "fn" => {
                    let name = functions.entry(number).or_insert(name);
                    is_own_function = !name.starts_with("mi_") && !name.starts_with("_mi_");
                }
                "cob" => _ = objects.entry(number).or_insert(name),
                "cfn" => _ = functions.entry(number).or_insert(name),
                // The next line has the instructions of the called function, which are counted there.
                "calls" => _ = lines.next(),
                _ => {}
            }
        } else if is_own_object && is_own_function {
            let is_cost = line.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '*'));
            let cost = line.split(' ').nth(1).filter(|_| is_cost);
            total += cost.map_or(0, |cost| cost.parse::<u64>().expect("a number"));
        }
    }
    total
}

fn committed_counts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions/counts.toml")
}

/// Prints each count with its difference to the committed one. Fails if a difference is larger than the tolerance.
fn compare(counts: &Counts) -> ExitCode {
    let text = std::fs::read_to_string(committed_counts()).expect("the committed counts");
    let mut committed: BTreeMap<String, u64> = toml::from_str(&text).expect("names and counts");
    println!("{:36} {:>10} {:>10}", "instructions of a call", "committed", "now");
    let mut changes = Vec::new();
    for (name, count) in counts {
        let Some(old) = committed.remove(name) else {
            println!("{name:36} {:>10} {count:>10}", "none");
            changes.push(format!("{name}: {count} instructions, and no count is committed"));
            continue;
        };
        let percent = (as_float(*count) / as_float(old) - 1.0) * 100.0;
        println!("{name:36} {old:>10} {count:>10} {percent:+8.2} %");
        if percent.abs() > TOLERANCE {
            let verdict = if percent > 0.0 { "slower" } else { "faster" };
            changes
                .push(format!("{name}: {verdict}, {count} instructions instead of {old} ({percent:+.1} %)"));
        }
    }
    changes.extend(committed.keys().map(|name| format!("{name}: not counted any more")));
    if changes.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!(
        "\nCounts differ from benches/instructions/counts.toml by more than {TOLERANCE} %:\n    {}\n\
         Find the reason with callgrind_annotate --inclusive=yes {}/NAME.out\n\
         If the change is intended, or is an improvement, write the new counts and commit them:\n    \
         scripts/instructions --write",
        changes.join("\n    "),
        profiles().display()
    );
    ExitCode::FAILURE
}

fn as_float(count: u64) -> f64 {
    f64::from(u32::try_from(count).expect("less than four billion instructions"))
}

/// Replaces the committed counts.
fn write(counts: &Counts) {
    let mut text =
        "# Instructions per call on x86_64, without the allocator and the C library; written by scripts/instructions --write.\n".to_owned();
    for (name, count) in counts {
        writeln!(text, "{name} = {count}").expect("a string");
    }
    std::fs::write(committed_counts(), text).expect("the counts can be written");
}

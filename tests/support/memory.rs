//! The memory of a process.

/// Returns the largest memory that a process has had, in KiB.
pub(crate) fn peak_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("running, on Linux");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    peak.split_whitespace().next().expect("a number").parse().expect("a number")
}

//! Texts without words, which a tokenizer that merges tokens pair by pair would count in quadratic time.

use precis::domain::tokens;
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::time::Duration;

/// Returns the shortest CPU time of several counts. Other attacks run meanwhile, so the time on the clock says little.
fn time_to_count(part: &str, bytes: usize) -> Duration {
    let text = part.repeat(bytes / part.len());
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a time since the start");
    let time = |_| {
        let start = now();
        black_box(tokens::count(black_box(&text)));
        now().saturating_sub(start)
    };
    (0..10).map(time).min().expect("several times")
}

#[test]
#[ignore = "measures"]
fn time_to_count_tokens_is_proportional_to_the_size() {
    tokens::count("loads the tokenizer");
    for part in
        ["!", " ", "a", "😀", "7", "\n", "=", "\t", "é", "Aa", "'s", "\u{1}", "茶", "\\", "QUJDREVGR0h"]
    {
        let (short, long) = (time_to_count(part, 8_000), time_to_count(part, 64_000));
        println!("{part:?}: {short:?} for 8 KB, {long:?} for 64 KB");
        // The text is 8 times as long, so a quadratic count would take 64 times as long. Texts of up to 4 KB take less time.
        assert!(long < 40 * short, "{part:?}: {short:?} for 8 KB, {long:?} for 64 KB");
    }
}

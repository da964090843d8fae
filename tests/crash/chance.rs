//! Chance that can be repeated: everything random in a run comes from one seed.
//!
//! A seed repeats the choices, not the moments: which statement a kill meets is up to the machine.

use std::ops::Range;
use std::time::Duration;

/// `SplitMix64` by Steele, Lea and Flood: small, and good enough to pick faults.
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed of this run: that of `PRECIS_CRASH_SEED`, or a new one. It is printed, so that a failed run can be
    /// repeated.
    pub(crate) fn of_run(name: &str) -> Self {
        let seed = std::env::var("PRECIS_CRASH_SEED").map_or_else(
            |_| u64::from_le_bytes(uuid::Uuid::new_v4().as_bytes()[..8].try_into().expect("8 bytes")),
            |seed| seed.parse().expect("PRECIS_CRASH_SEED is a number"),
        );
        println!("{name}: PRECIS_CRASH_SEED={seed} repeats this run");
        Self::new(seed)
    }

    /// Another source, independent of this one.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(end.max(1)).expect("small")).expect("small")
    }

    pub(crate) fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(range.start + self.next() % (range.end - range.start))
    }
}

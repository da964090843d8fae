//! The length of tests with random cases and of measurements.
#![cfg(test)]

/// Returns how many times the usual number of cases, faults or seconds a test takes: 1, or as `PRECIS_TEST_FACTOR` says for a longer
/// search. If it is more than 1, tests that usually run on one store run on both.
pub(crate) fn test_factor() -> u32 {
    std::env::var("PRECIS_TEST_FACTOR")
        .map_or(1, |factor| factor.parse().expect("PRECIS_TEST_FACTOR is a number"))
}

//! Queries of the search index, as operations on the numbers of the messages of a segment.

use super::index_terms::{TermPattern, TermQuery};
use super::segment::KeyRange;
use foldhash::HashMap;

/// Queries for the messages that pass a filter.
#[derive(Clone, Debug, Default)]
pub struct IndexQuery {
    /// All ranges of keys that a segment is asked for.
    ranges: Vec<KeyRange>,
    /// The places of the ranges with one term.
    exact: HashMap<Vec<u8>, usize>,
    /// The places of the others.
    prefixes: Vec<usize>,
    /// A message has a term of each of these ranges.
    required: Vec<usize>,
    /// A message has no term of these ranges.
    excluded: Vec<usize>,
    /// For each query, groups of ranges. A message has a term of each group.
    queries: Vec<Vec<Vec<usize>>>,
}

impl IndexQuery {
    /// Prepares queries. A message passes the filter if it has a term of each required range, and no excluded term.
    #[must_use]
    pub fn new(required: Vec<KeyRange>, excluded: &[String], queries: &[TermQuery]) -> Self {
        let mut query = Self::default();
        query.required = required.into_iter().map(|range| query.place_of(range)).collect();
        query.excluded = excluded.iter().map(|term| query.place_of(KeyRange::exact(term))).collect();
        for TermQuery(groups) in queries {
            let mut of_groups = Vec::new();
            for group in groups {
                let range = |TermPattern { term, is_prefix }: &TermPattern| {
                    if *is_prefix { KeyRange::prefix(term) } else { KeyRange::exact(term) }
                };
                of_groups.push(group.iter().map(|pattern| query.place_of(range(pattern))).collect());
            }
            query.queries.push(of_groups);
        }
        query
    }

    fn place_of(&mut self, range: KeyRange) -> usize {
        self.ranges.iter().position(|known| *known == range).unwrap_or_else(|| {
            let place = self.ranges.len();
            if range.is_exact() {
                self.exact.insert(range.first.clone(), place);
            } else {
                self.prefixes.push(place);
            }
            self.ranges.push(range);
            place
        })
    }

    #[must_use]
    pub fn ranges(&self) -> &[KeyRange] {
        &self.ranges
    }

    /// Adds the number of a message, which is not less than those before, to the ranges that contain a term of it.
    pub fn add_number(&self, term: &[u8], number: u32, found: &mut [Vec<u32>]) {
        let is_prefix = |place: &&usize| self.ranges.get(**place).is_some_and(|range| range.contains(term));
        for place in self.exact.get(term).into_iter().chain(self.prefixes.iter().filter(is_prefix)) {
            if let Some(numbers) = found.get_mut(*place).filter(|numbers| numbers.last() != Some(&number)) {
                numbers.push(number);
            }
        }
    }

    /// Returns the ascending numbers of the messages that match each query, among `messages` messages. `found` are the ascending
    /// numbers of the messages with a term of each range.
    #[must_use]
    pub fn evaluate(&self, messages: u32, found: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let of_range = |place: &usize| found.get(*place).map_or(&[][..], Vec::as_slice);
        let mut passing: Option<Vec<u32>> = None;
        for range in &self.required {
            let numbers = of_range(range);
            passing = Some(passing.map_or_else(|| numbers.to_vec(), |passing| intersect(&passing, numbers)));
        }
        let excluded = union(self.excluded.iter().map(of_range));
        let matches = |groups: &Vec<Vec<usize>>| {
            let mut matching = passing.clone();
            for group in groups {
                let of_group = union(group.iter().map(of_range));
                matching = Some(match matching {
                    Some(matching) => intersect(&matching, &of_group),
                    None => of_group,
                });
            }
            let mut matching = matching.unwrap_or_else(|| (0..messages).collect());
            if !excluded.is_empty() {
                matching.retain(|number| excluded.binary_search(number).is_err());
            }
            matching
        };
        self.queries.iter().map(matches).collect()
    }
}

/// Returns the numbers that are in a list, in order.
fn union<'n>(mut lists: impl Iterator<Item = &'n [u32]>) -> Vec<u32> {
    let mut all = lists.next().unwrap_or_default().to_vec();
    let mut is_sorted = true;
    for list in lists.filter(|list| !list.is_empty()) {
        is_sorted &= all.is_empty();
        all.extend_from_slice(list);
    }
    if !is_sorted {
        all.sort_unstable();
        all.dedup();
    }
    all
}

/// Returns the numbers that are in both lists, in order.
fn intersect(one: &[u32], other: &[u32]) -> Vec<u32> {
    let (short, mut long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    let mut both = Vec::with_capacity(short.len());
    for number in short {
        // The next number is near the beginning of the rest, or the rest is much longer than the short list.
        let skipped = if long.len() / 16 > short.len() {
            long.partition_point(|other| other < number)
        } else {
            long.iter().take_while(|other| *other < number).count()
        };
        long = long.get(skipped..).unwrap_or_default();
        if long.first() == Some(number) {
            both.push(*number);
        }
    }
    both
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn numbers() -> impl Strategy<Value = BTreeSet<u32>> {
        prop_oneof![
            proptest::collection::btree_set(0..1000_u32, 0..8),
            proptest::collection::btree_set(0..1000_u32, 0..300)
        ]
    }

    proptest! {
        #[test]
        fn evaluation_equals_that_of_sets(a in numbers(), b in numbers(), c in numbers(), d in numbers(), filtered: bool) {
            let exact = TermPattern::exact;
            let queries = [
                TermQuery(vec![vec![exact("a"), exact("b")], vec![exact("c")]]),
                TermQuery(vec![vec![exact("a")]]),
                TermQuery::default(),
            ];
            let required = if filtered { vec![KeyRange::exact("d"), KeyRange::exact("b")] } else { Vec::new() };
            let query = IndexQuery::new(required, &["c".to_owned()], &queries[1..]);
            let sets = |term: &KeyRange| match &*term.first { b"a" => &a, b"b" => &b, b"c" => &c, _ => &d };
            let found = |query: &IndexQuery| -> Vec<Vec<u32>> {
                query.ranges().iter().map(|range| sets(range).iter().copied().collect()).collect()
            };
            let passes = |number: &u32| !c.contains(number) && (!filtered || (d.contains(number) && b.contains(number)));
            let all: Vec<u32> = (0..1000).filter(passes).collect();
            let of_a: Vec<u32> = a.iter().copied().filter(passes).collect();
            prop_assert_eq!(query.evaluate(1000, &found(&query)), vec![of_a, all]);
            let query = IndexQuery::new(Vec::new(), &[], &queries[..1]);
            let expected: Vec<u32> = a.union(&b).copied().filter(|number| c.contains(number)).collect();
            prop_assert_eq!(query.evaluate(1000, &found(&query)), vec![expected]);
        }
    }

    #[test]
    fn number_is_added_once_to_each_range_with_a_term() {
        let patterns = [TermPattern { term: "fer".to_owned(), is_prefix: true }, TermPattern::exact("ferri")];
        let query = IndexQuery::new(Vec::new(), &[], &[TermQuery(vec![patterns.to_vec()])]);
        let mut found = vec![Vec::new(); 2];
        for (number, term) in [(0, "ferri"), (0, "fern"), (1, "fe"), (2, "fer"), (3, "fes")] {
            query.add_number(term.as_bytes(), number, &mut found);
        }
        assert_eq!(found, [vec![0, 2], vec![0]]);
    }
}

//! Segments of the search index: an immutable inverted index of some messages of one tenant.
//!
//! A segment is a sorted list of entries, cut into pages, which a store keeps as rows with their first key. An entry is a term with
//! the numbers of the messages that contain it, or a part of the list of messages. So a lookup reads one page for each term, and new
//! messages change no page: they become a segment of their own, and segments of about the same size are merged later.
//!
//! Messages are numbered from 0 in the order in which they were indexed, so that a higher number means a later message. The numbers of
//! a term are stored as differences, and keys without the part that they share with the key before.

use super::MessageRef;
use crate::domain::id::SessionId;
use foldhash::HashMap;
use integer_encoding::VarInt;
use std::cmp::Ordering;
use std::mem;

/// Number of messages in a part of the list of messages.
const CHUNK_MESSAGES: u32 = 128;
/// A page ends after this size, so that it has a row of its own in a page of the database. The numbers of one term are never divided.
const PAGE_BYTES: usize = 1536;
/// The first byte of the key of a part of the list of messages. Terms contain no such byte.
const CHUNK_KEY: u8 = 0;

/// A part of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub first_key: Vec<u8>,
    pub bytes: Vec<u8>,
}

/// The error for a page that can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page of the search index is damaged")]
pub struct DamagedPage;

/// An inclusive range of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyRange {
    pub first: Vec<u8>,
    pub last: Vec<u8>,
}

impl KeyRange {
    #[must_use]
    pub fn exact(term: &str) -> Self {
        Self { first: term.into(), last: term.into() }
    }

    /// Returns the range of all terms that begin with a prefix.
    #[must_use]
    pub fn prefix(prefix: &str) -> Self {
        // No text contains this byte.
        Self { first: prefix.into(), last: [prefix.as_bytes(), &[0xff]].concat() }
    }

    /// Returns the range with the part of the list of messages that contains a number.
    #[must_use]
    pub fn of_message(number: u32) -> Self {
        let key = chunk_key(number / CHUNK_MESSAGES).to_vec();
        Self { first: key.clone(), last: key }
    }

    /// Returns the range with the list of messages.
    #[must_use]
    pub fn all_messages() -> Self {
        Self { first: chunk_key(0).into(), last: chunk_key(u32::MAX).into() }
    }

    #[must_use]
    pub fn contains(&self, key: &[u8]) -> bool {
        *self.first <= *key && *key <= *self.last
    }

    /// Returns `true` if the range contains one key.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.first == self.last
    }
}

/// A new segment, to which messages are added.
#[derive(Debug, Default)]
pub struct SegmentBuilder {
    messages: Vec<MessageRef>,
    /// The place of the last posting of each term.
    terms: HashMap<Box<[u8]>, u32>,
    /// The postings of all terms, so that a term needs no list of its own.
    postings: Vec<Posting>,
}

/// A message that contains a term.
#[derive(Debug)]
struct Posting {
    number: u32,
    /// The place of the posting of the same term before this one, or its own place if there is none.
    before: u32,
}

impl SegmentBuilder {
    #[must_use]
    pub fn len(&self) -> u32 {
        to_number(self.messages.len())
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a message with its terms, which may be repeated.
    pub fn add<'t>(&mut self, message: MessageRef, terms: impl IntoIterator<Item = &'t [u8]>) {
        let number = self.len();
        self.messages.push(message);
        let is_in_message = |last: Option<&Posting>| last.is_some_and(|last| last.number == number);
        for term in terms {
            let place = to_number(self.postings.len());
            let before = match self.terms.get_mut(term) {
                Some(last) if is_in_message(self.postings.get(*last as usize)) => continue,
                Some(last) => mem::replace(last, place),
                None => *self.terms.entry(term.into()).or_insert(place),
            };
            self.postings.push(Posting { number, before });
        }
    }

    /// Returns the pages, in order.
    #[must_use]
    pub fn finish(self) -> Vec<Page> {
        let mut pages = PageWriter::of_messages(&self.messages);
        // Most terms differ in their first bytes, which are faster to compare as a number.
        let mut terms: Vec<_> =
            self.terms.iter().map(|(term, last)| (first_bytes(term), term, *last)).collect();
        terms.sort_unstable_by(|(a, first, _), (b, second, _)| a.cmp(b).then_with(|| first.cmp(second)));
        let (mut numbers, mut encoded) = (Vec::new(), EncodedNumbers::default());
        for (_, term, last) in terms {
            numbers.clear();
            let mut next = Some(last);
            while let Some(place) = next
                && let Some(Posting { number, before }) = self.postings.get(place as usize)
            {
                numbers.push(*number);
                next = (*before != place).then_some(*before);
            }
            encoded.clear();
            for number in numbers.iter().rev() {
                encoded.add(*number);
            }
            pages.add(term, &encoded.bytes);
        }
        pages.finish()
    }
}

/// Merges the messages of segments that pass a condition, in the order of the segments. A segment is given as all of its pages, in
/// order. Returns the number of messages, and the pages of the new segment.
///
/// # Errors
/// A page is damaged.
pub fn merge(
    segments: &[Vec<Vec<u8>>],
    mut is_kept: impl FnMut(&MessageRef) -> bool,
) -> Result<(u32, Vec<Page>), DamagedPage> {
    let mut messages = Vec::new();
    let mut sources = Vec::with_capacity(segments.len());
    for pages in segments {
        let mut source =
            Source { pages, entries: Entries::of(&[]), value: None, order: 0, numbers: Vec::new() };
        source.advance()?;
        // The list of messages is before the terms.
        while let Some(value) = source.value.filter(|_| source.entries.key.first() == Some(&CHUNK_KEY)) {
            for message in decode_messages(value, |_| true)? {
                let is_kept = is_kept(&message);
                source.numbers.push(is_kept.then_some(to_number(messages.len())));
                messages.extend(is_kept.then_some(message));
            }
            source.advance()?;
        }
        sources.push(source);
    }
    let mut pages = PageWriter::of_messages(&messages);
    let (mut term, mut encoded) = (Vec::new(), EncodedNumbers::default());
    while let Some(first) = sources.iter().filter(|source| source.value.is_some()).min_by(|a, b| a.compare(b))
    {
        if first.entries.key <= term {
            return Err(DamagedPage);
        }
        term.clone_from(&first.entries.key);
        encoded.clear();
        for source in &mut sources {
            if let Some(value) = source.value.filter(|_| source.entries.key == term) {
                for number in decode_numbers(value) {
                    if let Some(number) = source.numbers.get(number? as usize).ok_or(DamagedPage)? {
                        encoded.add(*number);
                    }
                }
                source.advance()?;
            }
        }
        if !encoded.bytes.is_empty() {
            pages.add(&term, &encoded.bytes);
        }
    }
    Ok((to_number(messages.len()), pages.finish()))
}

/// A segment that is being merged.
struct Source<'p> {
    /// The pages after the one that is being read.
    pages: &'p [Vec<u8>],
    entries: Entries<'p>,
    /// The value of the present entry; `None` after the last one.
    value: Option<&'p [u8]>,
    /// The first bytes of its key.
    order: u64,
    /// The new number of each message that is kept.
    numbers: Vec<Option<u32>>,
}

impl Source<'_> {
    fn advance(&mut self) -> Result<(), DamagedPage> {
        self.value = self.entries.next()?;
        while let (None, [page, rest @ ..]) = (self.value, self.pages) {
            self.pages = rest;
            self.entries = Entries::of(page);
            self.value = self.entries.next()?;
        }
        self.order = first_bytes(&self.entries.key);
        Ok(())
    }

    fn compare(&self, other: &Self) -> Ordering {
        self.order.cmp(&other.order).then_with(|| self.entries.key.cmp(&other.entries.key))
    }
}

/// Returns a length as a number. Segments have a size at which no length is too large.
fn to_number(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// Returns the numbers of the messages that contain a term of a range, in ascending order. `pages` are the pages of a segment that can
/// contain keys of the range, and `messages` is the number of messages in the segment.
///
/// # Errors
/// A page is damaged.
pub fn collect_numbers(pages: &[Vec<u8>], range: &KeyRange, messages: u32) -> Result<Vec<u32>, DamagedPage> {
    let mut numbers = Vec::new();
    if range.is_exact() {
        for page in pages {
            for_each_number(page, range, |number| numbers.push(number))?;
        }
        return Ok(numbers);
    }
    // A message can contain many terms of the range.
    let mut is_found = vec![false; messages as usize];
    for page in pages {
        for_each_number(page, range, |number| {
            if let Some(is_found) = is_found.get_mut(number as usize) {
                *is_found = true;
            }
        })?;
    }
    numbers.extend((0..).zip(is_found).filter(|(_, is_found)| *is_found).map(|(number, _)| number));
    Ok(numbers)
}

fn for_each_number(page: &[u8], range: &KeyRange, mut function: impl FnMut(u32)) -> Result<(), DamagedPage> {
    let mut entries = Entries::of(page);
    while let Some(value) = entries.next()? {
        if entries.key > range.last {
            break;
        }
        if entries.key >= range.first {
            for number in decode_numbers(value) {
                function(number?);
            }
        }
    }
    Ok(())
}

/// Adds the messages of the parts of the list of messages that a page contains, with their numbers.
///
/// # Errors
/// The page is damaged.
pub fn collect_messages(page: &[u8], messages: &mut Vec<(u32, MessageRef)>) -> Result<(), DamagedPage> {
    let mut entries = Entries::of(page);
    while let Some(value) = entries.next()? {
        if let [CHUNK_KEY, chunk @ ..] = &*entries.key {
            let chunk = u32::from_be_bytes(chunk.try_into().map_err(|_| DamagedPage)?);
            let first = chunk.checked_mul(CHUNK_MESSAGES).ok_or(DamagedPage)?;
            messages.extend((first..).zip(decode_messages(value, |_| true)?));
        }
    }
    Ok(())
}

/// Returns the message with a number, if the page contains that part of the list of messages.
///
/// # Errors
/// The page is damaged.
pub fn find_message(page: &[u8], number: u32) -> Result<Option<MessageRef>, DamagedPage> {
    let wanted = chunk_key(number / CHUNK_MESSAGES);
    let mut entries = Entries::of(page);
    while let Some(value) = entries.next()? {
        if *entries.key == wanted {
            return Ok(decode_messages(value, |place| place == number % CHUNK_MESSAGES)?.pop());
        }
    }
    Ok(None)
}

/// Returns the first eight bytes of a key as a number with the same order.
fn first_bytes(key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    for (byte, of_key) in bytes.iter_mut().zip(key) {
        *byte = *of_key;
    }
    u64::from_be_bytes(bytes)
}

fn chunk_key(chunk: u32) -> [u8; 5] {
    let [a, b, c, d] = chunk.to_be_bytes();
    [CHUNK_KEY, a, b, c, d]
}

/// Encodes a part of the list of messages: the sessions, and for each message the number of its session and the difference to the `seq` of the last
/// message of this session.
fn encode_messages(messages: &[MessageRef]) -> Vec<u8> {
    let mut places: HashMap<&SessionId, usize> = HashMap::default();
    let mut sessions: Vec<(&SessionId, i64)> = Vec::new();
    let mut of_messages = Vec::new();
    for MessageRef { session, seq } in messages {
        let place = *places.entry(session).or_insert_with(|| {
            sessions.push((session, 0));
            sessions.len() - 1
        });
        put_small(&mut of_messages, place as u64);
        if let Some((_, last)) = sessions.get_mut(place) {
            put(&mut of_messages, seq.wrapping_sub(*last));
            *last = *seq;
        }
    }
    let mut encoded = Vec::new();
    put_small(&mut encoded, sessions.len() as u64);
    for (session, _) in sessions {
        put_small(&mut encoded, session.as_str().len() as u64);
        encoded.extend_from_slice(session.as_str().as_bytes());
    }
    encoded.extend_from_slice(&of_messages);
    encoded
}

/// Returns the messages of a part of the list of messages whose place in it passes a condition.
fn decode_messages(
    mut bytes: &[u8],
    is_wanted: impl Fn(u32) -> bool,
) -> Result<Vec<MessageRef>, DamagedPage> {
    let mut sessions = Vec::new();
    for _ in 0..take_length(&mut bytes)? {
        sessions.push((std::str::from_utf8(take_bytes(&mut bytes)?).map_err(|_| DamagedPage)?, 0_i64));
    }
    let (mut messages, mut place) = (Vec::new(), 0);
    while !bytes.is_empty() {
        let (session, last) = sessions.get_mut(take_length(&mut bytes)?).ok_or(DamagedPage)?;
        *last = last.wrapping_add(take(&mut bytes)?);
        if is_wanted(place) {
            let session = SessionId::new(*session).map_err(|_| DamagedPage)?;
            messages.push(MessageRef { session, seq: *last });
        }
        place += 1;
    }
    Ok(messages)
}

/// Ascending numbers, encoded as differences.
#[derive(Default)]
struct EncodedNumbers {
    bytes: Vec<u8>,
    last: u32,
}

impl EncodedNumbers {
    fn clear(&mut self) {
        self.bytes.clear();
        self.last = 0;
    }

    fn add(&mut self, number: u32) {
        put_small(&mut self.bytes, u64::from(number - self.last));
        self.last = number;
    }
}

/// Decodes ascending numbers.
fn decode_numbers(mut bytes: &[u8]) -> impl Iterator<Item = Result<u32, DamagedPage>> {
    let mut before = 0_u32;
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let difference =
            take_small(&mut bytes).and_then(|difference| u32::try_from(difference).map_err(|_| DamagedPage));
        let number = difference.and_then(|difference| before.checked_add(difference).ok_or(DamagedPage));
        before = number.unwrap_or_default();
        Some(number)
    })
}

/// Cuts entries into pages.
#[derive(Default)]
struct PageWriter {
    pages: Vec<Page>,
    last_key: Vec<u8>,
}

impl PageWriter {
    /// Returns a writer with the list of messages.
    fn of_messages(messages: &[MessageRef]) -> Self {
        let mut writer = Self::default();
        for (chunk, messages) in (0..).zip(messages.chunks(CHUNK_MESSAGES as usize)) {
            writer.add(&chunk_key(chunk), &encode_messages(messages));
        }
        writer
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        let is_full = self.pages.last().is_none_or(|page| page.bytes.len() + value.len() > PAGE_BYTES);
        if is_full {
            self.pages.push(Page { first_key: key.to_vec(), bytes: Vec::new() });
            self.last_key.clear();
        }
        let Some(Page { bytes, .. }) = self.pages.last_mut() else { return };
        let shared = self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count();
        let rest = key.get(shared..).unwrap_or_default();
        put_small(bytes, shared as u64);
        put_small(bytes, rest.len() as u64);
        bytes.extend_from_slice(rest);
        put_small(bytes, value.len() as u64);
        bytes.extend_from_slice(value);
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
    }

    fn finish(self) -> Vec<Page> {
        self.pages
    }
}

/// Reads the entries of a page, in order.
struct Entries<'p> {
    page: &'p [u8],
    /// The key of the last entry.
    key: Vec<u8>,
}

impl<'p> Entries<'p> {
    fn of(page: &'p [u8]) -> Self {
        Self { page, key: Vec::new() }
    }

    /// Returns the value of the next entry.
    fn next(&mut self) -> Result<Option<&'p [u8]>, DamagedPage> {
        if self.page.is_empty() {
            return Ok(None);
        }
        let shared = take_length(&mut self.page)?;
        let rest = take_bytes(&mut self.page)?;
        if shared > self.key.len() {
            return Err(DamagedPage);
        }
        self.key.truncate(shared);
        self.key.extend_from_slice(rest);
        take_bytes(&mut self.page).map(Some)
    }
}

/// Adds a number. Most take one byte, which needs no loop.
#[inline]
fn put_small(out: &mut Vec<u8>, number: u64) {
    match u8::try_from(number) {
        Ok(byte @ ..0x80) => out.push(byte),
        _ => put(out, number),
    }
}

fn put(out: &mut Vec<u8>, number: impl VarInt) {
    // The longest number, of 64 bits, takes ten bytes.
    let mut encoded = [0; 10];
    let length = number.encode_var(&mut encoded);
    out.extend_from_slice(encoded.get(..length).unwrap_or_default());
}

/// Takes a number. Most take one byte, which needs no loop.
#[inline]
fn take_small(bytes: &mut &[u8]) -> Result<u64, DamagedPage> {
    match *bytes {
        [byte @ ..0x80, rest @ ..] => {
            *bytes = rest;
            Ok(u64::from(*byte))
        }
        _ => take(bytes),
    }
}

/// Takes a length or a place.
#[inline]
fn take_length(bytes: &mut &[u8]) -> Result<usize, DamagedPage> {
    usize::try_from(take_small(bytes)?).map_err(|_| DamagedPage)
}

fn take<N: VarInt>(bytes: &mut &[u8]) -> Result<N, DamagedPage> {
    let (number, length) = N::decode_var(bytes).ok_or(DamagedPage)?;
    *bytes = bytes.get(length..).ok_or(DamagedPage)?;
    Ok(number)
}

/// Takes a text with its length before it.
fn take_bytes<'b>(bytes: &mut &'b [u8]) -> Result<&'b [u8], DamagedPage> {
    let length = take_length(bytes)?;
    let (taken, rest) = bytes.split_at_checked(length).ok_or(DamagedPage)?;
    *bytes = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn message(session: &str, seq: i64) -> MessageRef {
        MessageRef { session: SessionId::new(session).expect("an id"), seq }
    }

    fn lookup(pages: &[Page], range: &KeyRange) -> Vec<u32> {
        // As a store does: from the last page that begins at or before the range.
        let first = pages.partition_point(|page| page.first_key <= range.first).saturating_sub(1);
        let wanted = pages.iter().skip(first).take_while(|page| page.first_key <= range.last);
        let wanted: Vec<_> = wanted.map(|page| page.bytes.clone()).collect();
        collect_numbers(&wanted, range, 100_000).expect("sound")
    }

    fn locate(pages: &[Page], number: u32) -> Option<MessageRef> {
        let range = KeyRange::of_message(number);
        let page = pages.iter().rfind(|page| page.first_key <= range.first)?;
        find_message(&page.bytes, number).expect("sound")
    }

    fn bytes(pages: Vec<Page>) -> Vec<Vec<u8>> {
        pages.into_iter().map(|page| page.bytes).collect()
    }

    proptest! {
        /// A segment, and one that is merged from parts without some messages, contain what was added.
        #[test]
        fn lookups_find_what_was_added(
            messages in proptest::collection::vec(
                ("[a-c]", 1..99_i64, proptest::collection::btree_set("[a-e]{1,3}|abcdefg[gh]{0,3}", 0..6)), 1..400),
            parts in 1..5_usize,
            removed in "[a-d]",
        ) {
            let size = messages.len().div_ceil(parts);
            let segments: Vec<Vec<Page>> = messages.chunks(size).map(|part| {
                let mut builder = SegmentBuilder::default();
                for (session, seq, terms) in part {
                    let repeated = terms.iter().chain(terms.iter().take(2));
                    builder.add(message(session, *seq), repeated.map(String::as_bytes));
                }
                builder.finish()
            }).collect();
            let segments: Vec<Vec<Vec<u8>>> = segments.into_iter().map(bytes).collect();
            let (merged, pages) = merge(&segments, |kept| kept.session.as_str() != removed).expect("sound");
            let kept: Vec<_> = messages.iter().filter(|(session, ..)| *session != removed).collect();
            prop_assert_eq!(merged as usize, kept.len());
            let mut expected: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
            for (number, (session, seq, terms)) in (0..).zip(&kept) {
                prop_assert_eq!(locate(&pages, number), Some(message(session, *seq)));
                for term in terms {
                    expected.entry(term).or_default().push(number);
                }
            }
            for (term, numbers) in &expected {
                prop_assert_eq!(&lookup(&pages, &KeyRange::exact(term)), numbers);
            }
            prop_assert_eq!(lookup(&pages, &KeyRange::exact("f")), Vec::<u32>::new());
            let mut all = Vec::new();
            for page in pages.iter().rev() {
                collect_messages(&page.bytes, &mut all).expect("sound");
            }
            all.sort_by_key(|(number, _)| *number);
            let of_kept: Vec<_> = (0..).zip(kept.iter().map(|(session, seq, _)| message(session, *seq))).collect();
            prop_assert_eq!(all, of_kept);
            let mut of_prefix: Vec<u32> =
                expected.iter().filter(|(term, _)| term.starts_with("ab")).flat_map(|(_, numbers)| numbers.clone()).collect();
            of_prefix.sort_unstable();
            of_prefix.dedup();
            prop_assert_eq!(lookup(&pages, &KeyRange::prefix("ab")), of_prefix);
        }

        /// Any bytes are a page or an error.
        #[test]
        fn damaged_pages_are_errors(page in proptest::collection::vec(any::<u8>(), 0..99)) {
            let _ = collect_numbers(std::slice::from_ref(&page), &KeyRange::prefix(""), 9);
            let _ = find_message(&page, 0);
            let _ = collect_messages(&page, &mut Vec::new());
            let _ = merge(&[vec![page]], |_| true);
        }
    }

    #[test]
    fn segments_without_messages_are_merged() {
        let mut builder = SegmentBuilder::default();
        builder.add(message("a", 1), [b"plum".as_slice()]);
        let segment = bytes(builder.finish());
        assert_eq!(merge(&[], |_| true), Ok((0, Vec::new())));
        assert_eq!(merge(&[Vec::new(), segment.clone()], |_| false), Ok((0, Vec::new())));
        let (messages, pages) =
            merge(&[Vec::new(), segment.clone(), vec![Vec::new()]], |_| true).expect("sound");
        assert_eq!((messages, bytes(pages)), (1, segment));
    }

    /// Otherwise one damaged key would move the terms after it, in all pages of the new segment.
    #[test]
    fn terms_in_another_order_are_damaged() {
        let page = |terms: &[&str]| {
            let mut writer = PageWriter::of_messages(&[message("a", 1)]);
            for term in terms {
                writer.add(term.as_bytes(), &[0]);
            }
            bytes(writer.finish())
        };
        let sound = page(&["a", "b", "c", "d"]);
        assert!(merge(&[page(&["a", "ab", "b"]), sound.clone()], |_| true).is_ok());
        for damaged in [["a", "z", "b"], ["a", "b", "b"], ["a", "\0\0\0\0\0", "b"]] {
            for segments in [[page(&damaged), sound.clone()], [sound.clone(), page(&damaged)]] {
                assert_eq!(merge(&segments, |_| true), Err(DamagedPage), "{damaged:?}");
            }
        }
    }

    #[test]
    fn pages_have_a_size() {
        let mut builder = SegmentBuilder::default();
        let terms: Vec<String> = (0..3000).map(|number| format!("term{number}")).collect();
        for seq in 1..2000 {
            let word = usize::try_from(seq).expect("small");
            let terms = terms.iter().skip(word).take(20).map(String::as_str);
            builder.add(message("a session with a long name", seq), terms.chain(["all"]).map(str::as_bytes));
        }
        let pages = builder.finish();
        let large: Vec<usize> =
            pages.iter().map(|page| page.bytes.len()).filter(|length| *length > PAGE_BYTES + 64).collect();
        assert_eq!(large.len(), 1, "only the term of all messages: {large:?}");
        assert!(pages.len() > 20);
        assert!(pages.is_sorted_by(|a, b| a.first_key < b.first_key));
    }

    /// Databases contain this format. If this test fails, existing indexes can't be read.
    #[test]
    fn format_of_pages_does_not_change() {
        let mut builder = SegmentBuilder::default();
        for (session, seq) in [("a", 300), ("b", 1), ("a", 299)] {
            builder.add(message(session, seq), [format!("plum{seq}").as_bytes(), b"plum"]);
        }
        let expected: &[u8] = b"\0\x05\0\0\0\0\0\x0c\x02\x01a\x01b\0\xd8\x04\x01\x02\0\x01\
            \0\x04plum\x03\0\x01\x01\x04\x011\x01\x01\x04\x03299\x01\x02\x04\x03300\x01\0";
        let pages = builder.finish();
        assert_eq!(pages, [Page { first_key: vec![0; 5], bytes: expected.to_vec() }]);
    }

    #[test]
    fn any_seq_is_encoded() {
        let messages = [i64::MAX, i64::MIN, -1, 0, 63, -64].map(|seq| message("a", seq));
        assert_eq!(decode_messages(&encode_messages(&messages), |_| true), Ok(messages.to_vec()));
    }
}

//! The texts of requests that become parts of the system message. An agent sends the same ones in each request, and to count the
//! tokens of a prompt of 2,000 characters takes as long as half of the rest of a context.
//!
//! A part depends only on its text, so the cache needs no invalidation. Each tenant has its own entries: otherwise the time of a
//! response would tell whether another tenant uses a prompt.

use crate::domain::context::SystemPart;
use crate::domain::id::TenantId;
use quick_cache::sync::Cache;
use quick_cache::{Equivalent, Weighter};
use std::sync::Arc;

/// Memory for the texts and their parts.
const MAX_BYTES: usize = 2 * 1024 * 1024;
/// A text of more than this size is prepared for each request.
const MAX_TEXT_BYTES: usize = 64 * 1024;
/// A hint for the initial size of the map; it grows as needed.
const EXPECTED_TEXTS: usize = 64;

/// A bounded cache of the parts by tenant and text.
#[derive(Debug)]
pub(super) struct PromptCache {
    parts: Cache<Key, Arc<SystemPart>, ByMemory>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    tenant: TenantId,
    text: Box<str>,
}

/// A key that need not be copied.
#[derive(Hash)]
struct KeyRef<'a> {
    tenant: &'a TenantId,
    text: &'a str,
}

impl Equivalent<Key> for KeyRef<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        *self.text == *key.text && *self.tenant == key.tenant
    }
}

#[derive(Clone, Debug)]
struct ByMemory;

impl Weighter<Key, Arc<SystemPart>> for ByMemory {
    fn weight(&self, key: &Key, part: &Arc<SystemPart>) -> u64 {
        let key_bytes = size_of::<Key>() + key.tenant.as_str().len() + key.text.len();
        (key_bytes + size_of::<SystemPart>() + part.heap_bytes()) as u64
    }
}

impl PromptCache {
    pub(super) fn new() -> Self {
        Self { parts: Cache::with_weighter(EXPECTED_TEXTS, MAX_BYTES as u64, ByMemory) }
    }

    /// Returns the part of a text; `None` if the text is empty.
    pub(super) fn part(&self, tenant: &TenantId, text: &str) -> Option<Arc<SystemPart>> {
        if text.is_empty() {
            return None;
        }
        if let Some(part) = self.parts.get(&KeyRef { tenant, text }) {
            return Some(part);
        }
        let part = Arc::new(SystemPart::new(text));
        if text.len() <= MAX_TEXT_BYTES {
            self.parts.insert(Key { tenant: tenant.clone(), text: text.into() }, Arc::clone(&part));
        }
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_kept_for_its_tenant_and_text() {
        let (cache, other) = (PromptCache::new(), TenantId::new("other").expect("an id"));
        let part = |tenant: &TenantId, text| cache.part(tenant, text).expect("a part");
        let tenant = TenantId::default();
        let first = part(&tenant, "Be kind.");
        assert!(Arc::ptr_eq(&first, &part(&tenant, "Be kind.")));
        assert!(!Arc::ptr_eq(&first, &part(&other, "Be kind.")), "another tenant");
        assert_ne!(*part(&tenant, "Be brief."), *first);
        assert!(cache.part(&tenant, "").is_none());
    }

    #[test]
    fn cache_has_a_limit_in_bytes() {
        let (cache, tenant) = (PromptCache::new(), TenantId::default());
        for n in 0..1000 {
            cache.part(&tenant, &format!("{n}{}", "x ".repeat(10_000)));
        }
        assert!(cache.parts.weight() <= MAX_BYTES as u64 && cache.parts.len() > 20, "{cache:?}");
        let large = "x ".repeat(MAX_TEXT_BYTES);
        let [first, again] = [(); 2].map(|()| cache.part(&tenant, &large).expect("a part"));
        assert!(!Arc::ptr_eq(&first, &again), "it would take the place of many others");
        assert_eq!(first, again);
    }
}

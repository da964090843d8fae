//! Parses and matches rows of the index that SQLite returns as one text.
//!
//! Transferring a row through the driver takes longer than finding it, so many rows are concatenated in SQL.

use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::lexemes::{self, TermQuery};
use crate::storage::StoreError;
use crate::storage::search::{MessageRef, SearchFilter};
use crate::storage::values::DbTime;

/// A row of the table `search`.
pub(super) struct Row<'a> {
    session: &'a str,
    pub(super) seq: i64,
    created_at: i64,
    pub(super) id: i64,
    /// Each lexeme is preceded and followed by a space.
    lexemes: &'a str,
}

impl Row<'_> {
    pub(super) fn message_ref(&self) -> Result<MessageRef, StoreError> {
        let session = SessionId::new(self.session).map_err(StoreError::corrupt("a session id"))?;
        Ok(MessageRef { created_at: DbTime::from_micros(self.created_at)?.0, seq: self.seq, session })
    }
}

/// Splits a text into rows and columns. Ids cannot contain the two separators.
pub(super) fn parse_rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    text.split('\u{1e}').filter_map(|row| {
        let mut columns = row.splitn(5, '\u{1f}');
        let session = columns.next()?;
        let mut number = || columns.next()?.parse().ok();
        let (seq, created_at, id) = (number()?, number()?, number()?);
        Some(Row { session, seq, created_at, id, lexemes: columns.next()? })
    })
}

/// A query that is evaluated on the lexemes of a row: one of each group, and none of the excluded ones.
pub(super) struct RowMatcher {
    groups: Vec<Vec<String>>,
    excluded: Vec<String>,
    session: Option<String>,
}

impl RowMatcher {
    pub(super) fn new(tenant: &TenantId, filter: &SearchFilter, query: &TermQuery) -> Self {
        let prefix = lexemes::tenant_prefix(tenant);
        let lexeme = |term: &str, is_prefix: bool| format!(" {term}{}", if is_prefix { "" } else { " " });
        let any_of = |group: &Vec<lexemes::TermPattern>| {
            group
                .iter()
                .map(|pattern| lexeme(&format!("{prefix}{}", pattern.term), pattern.is_prefix))
                .collect()
        };
        let required =
            filter.required_lexemes(&prefix).into_iter().map(|required| vec![lexeme(&required, false)]);
        Self {
            groups: query.0.iter().map(any_of).chain(required).collect(),
            excluded: filter
                .excluded_lexemes(&prefix)
                .iter()
                .map(|excluded| lexeme(excluded, false))
                .collect(),
            session: filter.session.as_ref().map(|session| session.as_str().to_owned()),
        }
    }

    pub(super) fn matches(&self, row: &Row<'_>) -> bool {
        let has = |lexeme: &String| row.lexemes.contains(lexeme);
        self.session.as_ref().is_none_or(|session| session == row.session)
            && self.groups.iter().all(|group| group.iter().any(has))
            && !self.excluded.iter().any(has)
    }
}

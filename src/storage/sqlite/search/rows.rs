//! Rows of the index that SQLite hands over as one text, and what is looked for in them here rather than there.
//!
//! Handing over a row takes the driver longer than SQLite takes to find it.

use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::lexemes::{self, TermQuery};
use crate::storage::StoreError;
use crate::storage::search::{MessageRef, SearchFilter};
use crate::storage::statement::DbTime;

/// A row of the index.
pub(super) struct Row<'a> {
    session: &'a str,
    pub(super) seq: i64,
    created_at: i64,
    pub(super) id: i64,
    /// With a space before and behind each.
    lexemes: &'a str,
}

impl Row<'_> {
    pub(super) fn place(&self) -> Result<MessageRef, StoreError> {
        let session = SessionId::new(self.session).map_err(StoreError::corrupt("a session id"))?;
        Ok(MessageRef { created_at: DbTime::from_micros(self.created_at)?.0, seq: self.seq, session })
    }
}

/// The rows of a text: parted by one character that no id may have, their columns by another.
pub(super) fn rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    text.split('\u{1e}').filter_map(|row| {
        let mut columns = row.splitn(5, '\u{1f}');
        let session = columns.next()?;
        let mut number = || columns.next()?.parse().ok();
        let (seq, created_at, id) = (number()?, number()?, number()?);
        Some(Row { session, seq, created_at, id, lexemes: columns.next()? })
    })
}

/// A probe as it is looked for in the lexemes of a row: of each group one, and none of those without.
pub(super) struct Sought {
    groups: Vec<Vec<String>>,
    without: Vec<String>,
    session: Option<String>,
}

impl Sought {
    pub(super) fn new(tenant: &TenantId, scope: &SearchFilter, probe: &TermQuery) -> Self {
        let tag = lexemes::tenant_prefix(tenant);
        let lexeme = |term: &str, is_prefix: bool| format!(" {term}{}", if is_prefix { "" } else { " " });
        let any = |group: &Vec<lexemes::TermPattern>| {
            group.iter().map(|sought| lexeme(&format!("{tag}{}", sought.term), sought.is_prefix)).collect()
        };
        let within = scope.all(&tag).into_iter().map(|all| vec![lexeme(&all, false)]);
        Self {
            groups: probe.0.iter().map(any).chain(within).collect(),
            without: scope.none(&tag).iter().map(|none| lexeme(none, false)).collect(),
            session: scope.session.as_ref().map(|session| session.as_str().to_owned()),
        }
    }

    pub(super) fn is_in(&self, row: &Row<'_>) -> bool {
        let has = |lexeme: &String| row.lexemes.contains(lexeme);
        self.session.as_ref().is_none_or(|session| session == row.session)
            && self.groups.iter().all(|group| group.iter().any(has))
            && !self.without.iter().any(has)
    }
}

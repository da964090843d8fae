//! The sources of a summary: see [`summary_sources`].

use super::{Error, MAX_PAGE_BYTES, MemoryService, decode_message};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::text::searchable_text;
use crate::domain::summary_sources::{self, SentenceSource, SourceMessage};
use crate::storage::{MessageQuery, StoreError};

/// Number of messages that a summary is compared with. Together, they also have at most [`MAX_PAGE_BYTES`].
const MAX_COMPARED_MESSAGES: i64 = 2000;

/// The sources of the summary of a revision.
#[derive(Clone, Debug)]
pub struct RevisionSources {
    /// The last message that the summary covers.
    pub cursor: i64,
    /// The first message that the summary was compared with; `None` if there is none. The last one is at the cursor.
    pub compared_from: Option<i64>,
    pub sentences: Vec<SentenceSource>,
    /// `false` if only the beginning of a long summary was compared, or if exact sentences can be missing.
    pub is_complete: bool,
}

impl MemoryService {
    /// Returns the source of each sentence of a summary among the newest messages that it covers. Redacted messages are none.
    pub async fn revision_sources(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<RevisionSources, Error> {
        let revision = self.revision(tenant, session, revision).await?;
        let (cursor, summary) = (revision.cursor, revision.summary.text);
        let newest = MessageQuery {
            after_seq: 0,
            before_seq: cursor.saturating_add(1),
            descending: true,
            limit: MAX_COMPARED_MESSAGES,
            max_bytes: MAX_PAGE_BYTES,
        };
        let messages = self.messages(tenant, session, newest).await?.messages;
        let compared_from = messages.last().map(|message| message.seq);
        // The language of the index is that of the messages; without an index, words are compared as in English.
        let analyzer = self.config.search.unwrap_or_default();
        let compare = move || {
            let texts = messages.into_iter().rev().filter(|message| message.redacted_at.is_none());
            let texts = texts.map(|message| {
                let text = searchable_text(&decode_message(&message.json)?).into_owned();
                Ok(SourceMessage { seq: message.seq, text })
            });
            let texts = texts.collect::<Result<Vec<_>, StoreError>>()?;
            Ok::<_, StoreError>(summary_sources::find(analyzer, &summary, &texts))
        };
        let (sentences, is_complete) = blocking::spawn_cpu(compare).await?;
        Ok(RevisionSources { cursor, compared_from, sentences, is_complete })
    }
}

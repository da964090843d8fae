//! The links of the document: values of a response that a following request takes. Schemathesis tests such sequences.

use utoipa::openapi::RefOr;
use utoipa::openapi::link::Link;
use utoipa::openapi::path::Operation;

/// Operation, its status, the following operation, and its parameters from the request and the response.
type LinkSpec = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);

const SESSION: (&str, &str) = ("path.session_id", "$request.path.session_id");
const USER: (&str, &str) = ("path.user_id", "$request.path.user_id");
const REVISION: (&str, &str) = ("path.revision", "$response.body#/revision");
const VERSION: (&str, &str) = ("header.If-Match", "$response.header.ETag");
const NEXT: (&str, &str) = ("query.cursor", "$response.body#/next");

const LINKS: &[LinkSpec] = &[
    ("record_exchange", "201", "record_exchange", &[SESSION]),
    ("record_exchange", "201", "build_context", &[SESSION]),
    ("record_exchange", "201", "get_session", &[SESSION]),
    ("record_exchange", "201", "list_messages", &[SESSION]),
    ("record_exchange", "201", "consolidate", &[SESSION]),
    ("record_exchange", "201", "export_session", &[SESSION]),
    ("sync_session", "201", "sync_session", &[SESSION]),
    ("sync_session", "201", "build_context", &[SESSION]),
    ("list_sessions", "200", "list_sessions", &[NEXT]),
    ("get_session", "200", "list_messages", &[SESSION]),
    ("get_session", "200", "export_session", &[SESSION]),
    ("get_session", "200", "read_memory", &[("path.user_id", "$response.body#/user_id")]),
    ("list_messages", "200", "list_messages", &[SESSION, NEXT]),
    ("build_context", "200", "record_exchange", &[SESSION]),
    ("build_context", "200", "list_revisions", &[SESSION]),
    ("consolidate", "201", "get_session", &[SESSION]),
    ("consolidate", "201", "get_revision", &[SESSION, REVISION]),
    ("consolidate", "201", "restore_revision", &[SESSION, REVISION]),
    ("restore_revision", "201", "list_revision_sources", &[SESSION, REVISION]),
    ("list_revisions", "200", "list_revisions", &[SESSION, NEXT]),
    ("edit_summary", "201", "get_revision", &[SESSION, REVISION]),
    ("edit_summary", "201", "build_context", &[SESSION]),
    ("restore_revision", "201", "get_revision", &[SESSION, REVISION]),
    ("restore_revision", "201", "get_session", &[SESSION]),
    ("restore_revision", "201", "build_context", &[SESSION]),
    ("fork_session", "201", "get_session", &[("path.session_id", "$response.body#/session_id")]),
    ("rewind_session", "200", "record_exchange", &[SESSION]),
    ("redact_message", "200", "list_redactions", &[SESSION]),
    ("redact_message", "200", "build_context", &[SESSION]),
    ("list_redactions", "200", "list_redactions", &[SESSION, NEXT]),
    ("import_session", "201", "export_session", &[SESSION]),
    ("read_memory", "200", "write_memory", &[USER, VERSION]),
    ("write_memory", "200", "write_memory", &[USER, VERSION]),
    ("write_memory", "200", "list_memory_revisions", &[USER]),
    ("list_memory_revisions", "200", "list_memory_revisions", &[USER, NEXT]),
];

pub(super) fn add(operation: &mut Operation) {
    let Some(id) = operation.operation_id.as_deref() else { return };
    for (_, status, target, parameters) in LINKS.iter().filter(|(from, ..)| *from == id) {
        if let Some(RefOr::T(response)) = operation.responses.responses.get_mut(*status) {
            let link = Link::builder().operation_id(*target);
            let link = parameters.iter().fold(link, |link, (name, value)| link.parameter(*name, *value));
            response.links.insert((*target).to_owned(), link.build().into());
        }
    }
}

//! The results and the errors of commands.

use std::error::Error;
use std::io::{self, Write as _};

/// The error of a command: a message for the user with an optional cause.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct CommandError {
    message: String,
    source: Option<Box<dyn Error>>,
}

/// Returns an error without a cause.
pub(super) fn error(message: impl Into<String>) -> Box<dyn Error> {
    Box::new(CommandError { message: message.into(), source: None })
}

/// Returns an error with its cause.
pub(super) fn error_with_cause(
    message: impl Into<String>,
    cause: impl Into<Box<dyn Error>>,
) -> Box<dyn Error> {
    Box::new(CommandError { message: message.into(), source: Some(cause.into()) })
}

/// Writes the result of a command to standard output. A reader that has read enough, such as `head`, is no error.
pub(super) fn print(result: &str) -> Result<(), Box<dyn Error>> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(result.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|cause| error_with_cause("can't write to standard output", cause)),
    }
}

/// Returns a number with its noun, for example `1 message` or `2 messages`.
pub(super) fn count(number: i64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

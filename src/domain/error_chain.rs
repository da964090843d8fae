//! Formats errors with their sources.

/// Displays an error and its chain of sources in one line. Omits a source that the error before it quotes.
#[derive(Debug)]
pub struct ErrorChain<'a>(pub &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut last = self.0.to_string();
        f.write_str(&last)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !last.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("can't connect")]
        Connect(#[source] std::io::Error),
        #[error("can't connect: {0}")]
        Quoting(#[source] std::io::Error),
    }

    #[test]
    fn every_text_appears_once() {
        let refused = || std::io::Error::other("refused");
        for error in [Failure::Connect(refused()), Failure::Quoting(refused())] {
            assert_eq!(ErrorChain(&error).to_string(), "can't connect: refused");
        }
    }
}

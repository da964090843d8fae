//! Data of images and files. Providers reject a list for ever if the type or the data of one image is wrong, so the first bytes decide
//! about the type, and unusual notations of base64 are normalised.

use crate::domain::message::Source;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Accepts data without padding, and superfluous bits at its end, as other decoders do.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Returns the source of an image: a web address, or data that is an image by its first bytes.
pub(super) fn image_url(url: &str) -> Option<Source> {
    match data_url(url) {
        Some((_, base64)) => image_data(base64),
        None => web_url(url),
    }
}

/// Returns a web address as a source.
pub(super) fn web_url(url: &str) -> Option<Source> {
    let url = url.trim();
    let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    matches!(scheme.as_deref(), Some("http" | "https")).then(|| Source::Url(url.to_owned()))
}

/// Returns the source of an image in base64 of a type that all providers accept.
pub(super) fn image_data(base64: &str) -> Option<Source> {
    let (base64, bytes) = decode(base64)?;
    let media_type = match bytes.as_slice() {
        [0xFF, 0xD8, 0xFF, ..] => "image/jpeg",
        [0x89, b'P', b'N', b'G', ..] => "image/png",
        [b'G', b'I', b'F', b'8', ..] => "image/gif",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "image/webp",
        _ => return None,
    };
    Some(Source::Data { media_type: media_type.to_owned(), base64 })
}

/// Returns the source of a file: a data URL, or its data in base64. A document that is declared as PDF must be one.
pub(super) fn file_data(media_type: Option<&str>, data: &str) -> Option<Source> {
    let (declared, data) = match data_url(data) {
        Some((declared, data)) => (Some(declared), data),
        None => (media_type.map(str::to_ascii_lowercase), data),
    };
    let (base64, bytes) = decode(data)?;
    let is_pdf = bytes.windows(5).take(1024).any(|start| start == b"%PDF-");
    let media_type = match declared.filter(|declared| !declared.is_empty()) {
        Some(declared) if declared == "application/pdf" && !is_pdf => return None,
        Some(declared) => declared,
        None if is_pdf => "application/pdf".to_owned(),
        None => "application/octet-stream".to_owned(),
    };
    Some(Source::Data { media_type, base64 })
}

/// Returns data in base64 in its usual notation, if it is not empty.
pub(super) fn normal_base64(data: &str) -> Option<String> {
    decode(data).map(|(base64, _)| base64)
}

fn decode(data: &str) -> Option<(String, Vec<u8>)> {
    let usual = |c: char| match c {
        '-' => '+',
        '_' => '/',
        c => c,
    };
    let digits: String = data.chars().filter(|c| !c.is_ascii_whitespace()).map(usual).collect();
    let bytes = LENIENT.decode(&digits).ok().filter(|bytes| !bytes.is_empty())?;
    let is_usual = digits == data && digits.len().is_multiple_of(4);
    Some((if is_usual { digits } else { base64::engine::general_purpose::STANDARD.encode(&bytes) }, bytes))
}

/// Returns the media type, without parameters and in small letters, and the data of a data URL in base64.
fn data_url(url: &str) -> Option<(String, &str)> {
    let url = url.trim_start();
    let (scheme, rest) = url.split_at_checked("data:".len())?;
    let (head, data) = rest.split_once(',').filter(|_| scheme.eq_ignore_ascii_case("data:"))?;
    let mut fields = head.split(';').map(|field| field.trim().to_ascii_lowercase());
    let media_type = fields.next().unwrap_or_default();
    fields.any(|field| field == "base64").then_some((media_type, data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    #[test_case("data:image/png;base64,/9j/4AAQSkZJRg==" => "image/jpeg /9j/4AAQSkZJRg=="; "wrong type")]
    #[test_case("DATA:Image/PNG;charset=x;BASE64,iVBORw0K\nGgo" => "image/png iVBORw0KGgo="; "unusual notation")]
    #[test_case("data:image/jpg;base64,_9j_4AAQSkZJRg" => "image/jpeg /9j/4AAQSkZJRg=="; "alphabet of URLs")]
    #[test_case("data:image/png;base64,PGh0bWw+" => "none"; "a page of HTML")]
    #[test_case("data:image/png;base64,no" => "none"; "no image")]
    #[test_case("data:image/png;base64,%%%%" => "none"; "no base64")]
    #[test_case("data:image/png;base64," => "none"; "no data")]
    #[test_case("data:image/svg+xml,<svg/>" => "none"; "not in base64")]
    #[test_case("HTTPS://example.org/a.png" => "HTTPS://example.org/a.png"; "web address")]
    #[test_case("ftp://example.org/a.png" => "none"; "another address")]
    #[test_case("" => "none"; "nothing")]
    fn image_is_what_its_first_bytes_say(url: &str) -> String {
        match image_url(url) {
            Some(Source::Data { media_type, base64 }) => format!("{media_type} {base64}"),
            Some(Source::Url(url)) => url,
            _ => "none".to_owned(),
        }
    }

    #[test]
    fn pdf_must_be_one() {
        let is_file = |media_type, data| file_data(media_type, data).is_some();
        assert!(is_file(None, "data:application/pdf;base64,JVBERi0xLjQ="));
        assert!(!is_file(None, "data:application/pdf;base64,PGh0bWw+"));
        assert!(!is_file(Some("application/pdf"), "PGh0bWw+"));
        assert!(is_file(None, "data:text/plain;base64,PGh0bWw+"));
    }
}

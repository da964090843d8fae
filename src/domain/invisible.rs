//! Characters without a visible form.

/// Returns `true` for the characters that a display ignores (`Default_Ignorable_Code_Point` of Unicode). Some of them are letters.
#[inline]
pub fn is_invisible(c: char) -> bool {
    !c.is_ascii()
        && matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Removes the NUL character, which Postgres cannot store, from a text of a model, an agent or a client.
pub fn without_nul(text: &str) -> String {
    text.replace('\0', "")
}

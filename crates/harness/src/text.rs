//! Text from others, such as names of threads and disks, for terminals, pages and JSON.

use std::fmt::{self, Write};

/// Whether a character only shows itself: it controls neither a terminal nor the direction of the text around it, and is
/// not invisible (Unicode's `Default_Ignorable_Code_Point`, separators of lines, and annotations).
pub fn is_printable(c: char) -> bool {
    let formats = matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    );
    !(c.is_control() || formats)
}

/// The text with a question mark in place of each character that is not [printable](is_printable).
pub fn printable(text: &str) -> String {
    text.replace(|c| !is_printable(c), "?")
}

/// As [`printable`], and keeps line breaks and tabs.
pub fn printable_lines(text: &str) -> String {
    text.replace(|c| !(is_printable(c) || matches!(c, '\n' | '\t')), "?")
}

/// The text with escapes for characters that are not [printable](is_printable), line breaks too: it is one line, and shows what it
/// has.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let _ = Escaping(&mut out).write_str(text);
    out
}

/// Writes text as [`escaped`] returns it.
pub struct Escaping<W>(pub W);

impl<W: Write> Write for Escaping<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(|c| !is_printable(c)) {
            let (plain, other) = rest.split_at(at);
            self.0.write_str(plain)?;
            let mut others = other.chars();
            for c in others.by_ref().take(1) {
                write!(self.0, "{}", c.escape_default())?;
            }
            rest = others.as_str();
        }
        self.0.write_str(rest)
    }
}

/// JSON with escapes for characters that are not [printable](is_printable). They occur in strings only, so the values are
/// the same.
pub fn printable_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if is_printable(c) || c == '\n' {
            escaped.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[31m\r\u{7f}\u{9b}\u{202a}\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}\u{2028}\u{e0041}z";

    #[test]
    fn text_of_others_controls_nothing() {
        assert_eq!(printable(HOSTILE), format!("a?[31m{}z", "?".repeat(12)));
        assert_eq!(printable("größe 尺寸 عربي –"), "größe 尺寸 عربي –");
        assert_eq!(printable("a\tb\nc"), "a?b?c");
        assert_eq!(printable_lines("a\tb\n\u{202e}c"), "a\tb\n?c");
    }

    #[test]
    fn escaped_text_is_one_line() {
        let forged = "a\n<0>b\r\t\u{9b}31m\u{202e}\u{34f}\u{fe0f}ü\u{e0041}\"\\";
        let shown = r#"a\n<0>b\r\t\u{9b}31m\u{202e}\u{34f}\u{fe0f}ü\u{e0041}"\"#;
        assert_eq!(escaped(forged), shown);
        assert_eq!(escaped(&escaped(HOSTILE)), escaped(HOSTILE));
        assert!(escaped(HOSTILE).chars().all(is_printable));
        assert_eq!(escaped("größe 尺寸 عربي –"), "größe 尺寸 عربي –");
    }

    #[test]
    fn escaped_json_has_the_same_values() {
        let value = serde_json::json!({ "name": HOSTILE, "list": ["é", "\n", 3] });
        for json in [
            value.to_string(),
            serde_json::to_string_pretty(&value).unwrap(),
        ] {
            let escaped = printable_json(&json);
            assert!(
                escaped.chars().all(|c| is_printable(c) || c == '\n'),
                "{escaped}"
            );
            let read: serde_json::Value = serde_json::from_str(&escaped).unwrap();
            assert_eq!(read, value);
        }
    }
}

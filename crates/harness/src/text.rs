//! Text from others, such as names of threads and disks, for terminals, pages and JSON.

use std::fmt::Write as _;

/// Whether a character only shows itself: it controls neither a terminal nor the direction of the text around it, and is
/// not invisible.
pub fn is_printable(c: char) -> bool {
    let formats = matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
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

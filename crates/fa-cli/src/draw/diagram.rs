//! What pages and plots share: colours, and texts that markup cannot mistake.

/// Text and lines.
pub(crate) const INK: &str = "#1f2430";
/// Secondary text.
pub(crate) const MUTED: &str = "#5b6372";
/// Grid lines and outlines.
pub(crate) const RULE: &str = "#d8dce3";

/// Text as part of a page, attributes included: what markup reserves is written as entities.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML admits no control characters, not even escaped.
            c if c.is_control() && c != '\n' => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_cannot_break_out_of_their_element() {
        let hostile = "a < b & \"c\" 'd' </text>";
        let drawing = format!("<svg aria-label=\"{0}\"><text>{0}</text></svg>", escape(hostile));
        let document = roxmltree::Document::parse(&drawing).unwrap();
        let root = document.root_element();
        assert_eq!(root.attribute("aria-label"), Some(hostile));
        let texts: Vec<&str> = root.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect();
        assert_eq!(texts, [hostile]);
    }

    #[test]
    fn texts_of_pages_are_escaped() {
        assert_eq!(escape("a<b & c>\u{7}"), "a&lt;b &amp; c&gt;");
    }
}

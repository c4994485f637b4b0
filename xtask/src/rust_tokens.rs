//! The tokens of Rust source, as far as checks of the tree need them.

/// A word or a mark. Literals are left out, but for numbers, which are words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Token<'a> {
    pub text: &'a str,
    /// An identifier, a keyword or a number.
    pub is_word: bool,
}

/// The tokens of `text` without comments, strings and characters. `::` is one token, every other mark stands
/// alone.
pub(crate) fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let (len, token) = if first.is_whitespace() {
            (first.len_utf8(), None)
        } else if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), None)
        } else if rest.starts_with("/*") {
            (block_comment_len(rest), None)
        } else if let Some(len) = raw_string_len(rest) {
            (len, None)
        } else if first == '"' {
            (quoted_len(rest), None)
        } else if first == '\'' {
            (quote_len(rest), None)
        } else if word > 0 {
            (word, Some(Token { text: &rest[..word], is_word: true }))
        } else {
            let len = if rest.starts_with("::") { 2 } else { first.len_utf8() };
            (len, Some(Token { text: &rest[..len], is_word: false }))
        };
        tokens.extend(token);
        rest = &rest[len..];
    }
    tokens
}

/// Comments nest.
fn block_comment_len(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// `r"..."`, `r#"..."#` and the same of bytes.
fn raw_string_len(text: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        text.strip_prefix(prefix).is_some_and(|rest| rest.trim_start_matches('#').starts_with('"'))
    })?;
    let hashes = text[prefix.len()..].chars().take_while(|c| *c == '#').count();
    let open = prefix.len() + hashes + 1;
    let close = format!("\"{}", "#".repeat(hashes));
    Some(text[open..].find(&close).map_or(text.len(), |at| open + at + close.len()))
}

fn quoted_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// A character, or the quote of a lifetime.
fn quote_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => text[3..].find('\'').map_or(text.len(), |at| 3 + at + 1),
        Some((at, c)) if text[at + c.len_utf8()..].starts_with('\'') => at + c.len_utf8() + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_marks_are_left_when_comments_and_literals_go() {
        let text = r###"fn f<'a>(x: &'a str) -> char {
            /* a /* b */ c */ g::h("q \" //", 'x', '\'', '\\', r#"raw " "#)
        } // end"###;
        let found: Vec<&str> = tokens(text).iter().map(|token| token.text).collect();
        assert_eq!(found.join(" "), "fn f < a > ( x : & a str ) - > char { g :: h ( , , , , ) }");
    }
}

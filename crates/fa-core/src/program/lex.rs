//! From text to tokens.

use std::ops::Range;

use super::error::{ProgramError, ProgramProblem};
use super::limits::{MAX_NAME, MAX_TEXT};
use super::types::Type;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// A name or keyword.
    Name(String),
    /// An integer of 32 bits, or 2^31, whose negative is one.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f32),
    /// An operator or a mark.
    Mark(&'static str),
    /// The end of the text.
    End,
}

/// Longer ones first.
const MARKS: [&str; 30] = [
    "**", "//", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/", "%", "<", ">", "&", "|",
    "^", "~", "!", "=", "(", ")", "[", "]", ",", ";", ":",
];

impl Token {
    /// How messages call it.
    pub(super) fn shown(&self) -> String {
        match self {
            Token::Name(name) => format!("`{name}`"),
            Token::Int(value) => format!("`{value}`"),
            Token::Float(value) => format!("`{value:?}`"),
            Token::Mark(mark) => format!("`{mark}`"),
            Token::End => "the end".to_owned(),
        }
    }
}

/// The tokens of `text`, each with its bytes; the last is [`Token::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<(Token, Range<usize>)>, ProgramError> {
    if text.len() > MAX_TEXT {
        let problem = ProgramProblem::Limit { what: "bytes of text", most: MAX_TEXT, given: text.len() };
        return Err(ProgramError::new(problem, "", 0..0));
    }
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        if first.is_whitespace() {
            at += first.len_utf8();
        } else if first == '#' {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if first.is_ascii_alphabetic() || first == '_' {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            if end > MAX_NAME {
                return Err(ProgramError::new(
                    ProgramProblem::LongName { most: MAX_NAME },
                    text,
                    at..at + end,
                ));
            }
            found.push((Token::Name(rest[..end].to_owned()), at..at + end));
            at += end;
        } else if first.is_ascii_digit()
            || (first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit()))
        {
            let length = number_length(rest);
            let token = number(&rest[..length])
                .map_err(|problem| ProgramError::new(problem, text, at..at + length))?;
            found.push((token, at..at + length));
            at += length;
        } else if let Some(mark) = MARKS.into_iter().find(|mark| rest.starts_with(mark)) {
            found.push((Token::Mark(mark), at..at + mark.len()));
            at += mark.len();
        } else {
            let span = at..at + first.len_utf8();
            return Err(ProgramError::new(ProgramProblem::Character(first), text, span));
        }
    }
    found.push((Token::End, text.len()..text.len()));
    Ok(found)
}

fn number_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    if rest.starts_with("0x") || rest.starts_with("0X") {
        return 2 + bytes[2..].iter().take_while(|b| b.is_ascii_hexdigit()).count();
    }
    let digits = |from: usize| bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    let mut end = digits(0);
    if bytes.get(end) == Some(&b'.') {
        end += 1;
        end += digits(end);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        let exponent = digits(end + 1 + sign);
        if exponent > 0 {
            end += 1 + sign + exponent;
        }
    }
    end
}

fn number(text: &str) -> Result<Token, ProgramProblem> {
    let fits = |ty| ProgramProblem::Number(ty);
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let bits = u32::from_str_radix(digits, 16);
        return bits.map(|bits| Token::Int((bits as i32).into())).map_err(|_| fits(Type::I32));
    }
    if text.bytes().all(|b| b.is_ascii_digit()) {
        let value: u32 = text.parse().map_err(|_| fits(Type::I32))?;
        return if value <= 1 << 31 { Ok(Token::Int(value.into())) } else { Err(fits(Type::I32)) };
    }
    let value: f32 = text.parse().map_err(|_| fits(Type::F32))?;
    if value.is_finite() { Ok(Token::Float(value)) } else { Err(fits(Type::F32)) }
}

//! The code of a CUDA source as the compiler sees it: its tokens, without comments and layout.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The operators and separators of more than one character, longest first.
const LONG: [&str; 26] = [
    "<<=", ">>=", "<=>", "...", "->*", "::", "->", ".*", "++", "--", "<<", ">>", "<=", ">=", "==", "!=",
    "&&", "||", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=",
];

/// `text` as a canonical string: one space between tokens, one line for each preprocessor directive and one
/// for the code between two of them, no comments. Two sources that differ in comments, in line breaks or in
/// indentation give the same string; two that differ in a token do not. String and character literals stand
/// as they were written.
///
/// A macro that turns its argument into a string (`#x`) could still distinguish `a+b` from `a + b`: the
/// kernels have none.
pub(super) fn canonical(text: &str) -> String {
    Lexer { rest: text, out: String::with_capacity(text.len()), directive: Directive::None, fresh: true }
        .run()
}

/// [`canonical`] of a header. Kernels share their headers: each is read once in a process.
pub(super) fn of_header(text: &str) -> Arc<str> {
    static KNOWN: LazyLock<Mutex<HashMap<String, Arc<str>>>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = known().get(text).cloned();
    found.unwrap_or_else(|| {
        let code: Arc<str> = canonical(text).into();
        known().insert(text.to_owned(), Arc::clone(&code));
        code
    })
}

/// The preprocessor directive that is being read.
#[derive(Clone, Copy, PartialEq)]
enum Directive {
    None,
    /// After `#`: the next word is the directive's name.
    Name,
    /// After `#define`: the next word is the macro's name.
    Define,
    /// Right after the macro's name, where `(` opens the parameters only if no space is before it.
    Macro,
    Body,
}

struct Lexer<'a> {
    rest: &'a str,
    out: String,
    directive: Directive,
    /// No token has been read on this line of the source.
    fresh: bool,
}

impl<'a> Lexer<'a> {
    fn run(mut self) -> String {
        while !self.rest.is_empty() {
            if self.take_layout() {
                continue;
            }
            let token = &self.rest[..token_len(self.rest)];
            self.rest = &self.rest[token.len()..];
            self.push(token);
        }
        self.end_line();
        self.out
    }

    /// Skips a line break, white space, a spliced line or a comment; whether there was one.
    fn take_layout(&mut self) -> bool {
        let rest = self.rest;
        let space = if rest.starts_with('\n') {
            if self.directive != Directive::None {
                self.directive = Directive::None;
                self.end_line();
            }
            self.fresh = true;
            1
        } else if let Some(len) = splice_len(rest) {
            len
        } else if rest.starts_with("//") {
            line_comment_len(rest)
        } else if let Some(comment) = rest.strip_prefix("/*") {
            comment.find("*/").map_or(rest.len(), |end| end + 4)
        } else {
            rest.chars().next().filter(|c| c.is_whitespace()).map_or(0, char::len_utf8)
        };
        self.rest = &rest[space..];
        let macro_ends = space > 0 && self.directive == Directive::Macro;
        if macro_ends {
            self.directive = Directive::Body;
        }
        space > 0
    }

    fn push(&mut self, token: &'a str) {
        use Directive::{Body, Define, Macro, Name, None};
        if self.fresh && token == "#" {
            self.end_line();
            self.directive = Name;
        } else {
            // Without a space, `(` opens the macro's parameters.
            let glued = self.directive == Macro && token == "(";
            if !glued && !self.out.is_empty() && !self.out.ends_with('\n') {
                self.out.push(' ');
            }
            self.directive = match self.directive {
                None => None,
                Name if token == "define" => Define,
                Define => Macro,
                Name | Macro | Body => Body,
            };
        }
        self.fresh = false;
        self.out.push_str(token);
    }

    fn end_line(&mut self) {
        if !self.out.is_empty() && !self.out.ends_with('\n') {
            self.out.push('\n');
        }
    }
}

/// Bytes of a backslash and the line break that it hides, if `text` starts so.
fn splice_len(text: &str) -> Option<usize> {
    ["\\\n", "\\\r\n"].into_iter().find(|splice| text.starts_with(splice)).map(str::len)
}

/// Bytes of a `//` comment up to its line break, which a backslash hides.
fn line_comment_len(text: &str) -> usize {
    let ends = |at: &usize| !text[..*at].trim_end_matches('\r').ends_with('\\');
    text.match_indices('\n').map(|(at, _)| at).find(ends).unwrap_or(text.len())
}

/// Bytes of the token that `text` starts with; `text` is not empty and starts with neither white space nor a
/// comment.
fn token_len(text: &str) -> usize {
    let word = text.find(|c| !is_word(c)).unwrap_or(text.len());
    match &text[word..] {
        literal if literal.starts_with('"') && text[..word].strip_suffix('R').is_some_and(is_encoding) => {
            word + raw_string_len(literal)
        }
        literal if literal.starts_with(['"', '\'']) && is_encoding(&text[..word]) => {
            word + quoted_len(literal)
        }
        _ if text.starts_with(|c: char| c.is_ascii_digit()) => number_len(text),
        _ if word > 0 => word,
        dotted if dotted.starts_with('.') && dotted[1..].starts_with(|c: char| c.is_ascii_digit()) => {
            number_len(text)
        }
        mark => LONG
            .iter()
            .find(|long| mark.starts_with(**long))
            .map_or_else(|| mark.chars().next().map_or(0, char::len_utf8), |long| long.len()),
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '$'
}

/// Whether these letters before a quote belong to the literal. Without any, the quote is the literal's start.
fn is_encoding(letters: &str) -> bool {
    matches!(letters, "" | "u8" | "u" | "U" | "L")
}

/// Bytes of a string or character literal that opens with its quote; an open one ends with the text.
fn quoted_len(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Bytes of `"delimiter(...)delimiter"`, the part of a raw string from its quote on.
fn raw_string_len(text: &str) -> usize {
    let Some(open) = text.find('(') else { return text.len() };
    let close = format!("){}\"", &text[1..open]);
    text[open..].find(&close).map_or(text.len(), |at| open + at + close.len())
}

/// Bytes of a number as the preprocessor reads it: digits, letters, points, separators, and signs after an
/// exponent.
fn number_len(text: &str) -> usize {
    let mut before = '0';
    for (at, c) in text.char_indices() {
        let sign = matches!(c, '+' | '-') && matches!(before, 'e' | 'E' | 'p' | 'P');
        let separator = c == '\'' && text[at + 1..].starts_with(is_word);
        if !(is_word(c) || c == '.' || sign || separator) {
            return at;
        }
        before = c;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "#define FA_ADD(a) \\\n    (a + 1)\n#if FA_X\n\
        int f(int a) {\n    return a - -1;  // less\n}\n#endif\n";

    #[test]
    fn headers_are_read_once() {
        let first = of_header(CODE);
        assert_eq!(*first, *canonical(CODE));
        assert!(Arc::ptr_eq(&first, &of_header(CODE)));
        assert_ne!(first, of_header("int b;"));
    }

    #[test]
    fn comments_and_layout_do_not_count() {
        let same = "/* at\nlength */ #define FA_ADD(a) (a+1)\n\n  #  if FA_X // on\n\
            int f( int a )\n{return a/**/- -1;}\n#endif";
        assert_eq!(canonical(CODE), canonical(same));
        assert_eq!(
            canonical(CODE),
            "# define FA_ADD( a ) ( a + 1 )\n# if FA_X\nint f ( int a ) { return a - - 1 ; }\n# endif\n"
        );
        assert_eq!(canonical("int a;\r\nint b;\r\n"), canonical("int a; int b;"));
        assert_eq!(canonical("a // one \\\n still the comment\nb"), "a b\n");
        assert_eq!(canonical("// only\n/* a comment"), "");
    }

    #[test]
    fn every_token_counts() {
        let different = [
            ("return a - -1;", "return a --1;"),
            ("inta;", "int a;"),
            ("a/**/b", "ab"),
            ("a >> b", "a > > b"),
            ("1.e+5", "1.e + 5"),
            ("1'000", "1'001"),
            ("\"a  b\"", "\"a b\""),
            ("' '", "'  '"),
            ("#define F(x) x", "#define F (x) x"),
            ("#define A\nb", "#define A b"),
            ("#if A\nb\n#endif", "#if A b\n#endif"),
            ("x", "x\n#pragma unroll"),
            ("R\"(a  b)\"", "R\"(a b)\""),
        ];
        for (one, other) in different {
            assert_ne!(canonical(one), canonical(other), "{one} and {other}");
        }
    }

    #[test]
    fn literals_are_no_comments() {
        for literal in [
            r#""// no comment""#,
            r#""/* none */""#,
            r#""a \" // b""#,
            r#"'"'"#,
            r"'\''",
            "R\"x(a // )\" \n b)x\"",
            "u8R\"(/*)\"",
            "L\"//\"",
        ] {
            let text = format!("f({literal}); // comment");
            assert_eq!(canonical(&text), format!("f ( {literal} ) ;\n"), "{text}");
        }
        assert_eq!(canonical("0x1p-3f + .5e-3 // \"\n c"), "0x1p-3f + .5e-3 c\n");
    }
}

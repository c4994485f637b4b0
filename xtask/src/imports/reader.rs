//! A file's modules, imports and paths, read from its tokens.

use std::collections::BTreeSet;

use crate::rust_tokens::Token;

/// What a file declares and names.
#[derive(Default)]
pub(super) struct File {
    /// As in messages.
    pub name: String,
    /// Modules declared here, with those of inline modules: `tests`, `ffi::raw`.
    pub inline: BTreeSet<String>,
    /// Declared by `#[cfg(test)] mod name;` somewhere.
    pub test: bool,
    pub imports: Vec<Import>,
    /// Every path in the code outside `use`, each with the module that it stands in.
    pub paths: Vec<(String, Vec<String>)>,
    /// Names in the code outside `use`.
    pub words: BTreeSet<String>,
}

/// One name of a `use`.
pub(super) struct Import {
    /// The module that it stands in.
    pub module: String,
    pub path: Vec<String>,
    /// The name that it has here; `*` for all names.
    pub name: String,
    pub public: bool,
}

/// Reads a file's modules, imports and paths.
pub(super) struct Reader<'a> {
    pub tokens: &'a [Token<'a>],
    pub at: usize,
    pub file: &'a mut File,
    pub tests: &'a mut BTreeSet<String>,
}

impl<'a> Reader<'a> {
    fn peek(&self, ahead: usize) -> &'a str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text)
    }

    fn starts(&self, texts: &[&str]) -> bool {
        texts.iter().enumerate().all(|(i, text)| self.peek(i) == *text)
    }

    /// Up to the brace that closes `module`, or to the end.
    pub(crate) fn read(&mut self, module: &str) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            let is_path = self.at == 0 || self.tokens[self.at - 1].text != "::";
            match self.peek(0) {
                "{" => depth += 1,
                "}" if depth == 0 => return,
                "}" => depth -= 1,
                "#" if self.starts(&["#", "[", "cfg", "(", "test", ")", "]"]) => {
                    self.skip_test(module);
                    continue;
                }
                "mod" if self.tokens.get(self.at + 1).is_some_and(|t| t.is_word) && self.peek(2) == "{" => {
                    let inner = join(module, self.peek(1));
                    self.file.inline.insert(inner.clone());
                    self.at += 3;
                    self.read(&inner);
                }
                "use" if self.peek(1) != "<" => {
                    let public = self.is_public();
                    self.at += 1;
                    self.read_use(module, &mut Vec::new(), public);
                    continue;
                }
                "crate" | "self" | "super" if is_path && self.peek(1) == "::" => self.read_path(module),
                _ if is_path && self.peek(1) == "::" && self.tokens[self.at].is_word => {
                    self.read_path(module)
                }
                _ => {}
            }
            if self.at < self.tokens.len() && self.tokens[self.at].is_word {
                self.file.words.insert(self.peek(0).to_owned());
            }
            self.at += 1;
        }
    }

    /// Whether `pub` or `pub(...)` is before the `use` at hand.
    fn is_public(&self) -> bool {
        let before = &self.tokens[..self.at];
        let last = |back: usize| before.len().checked_sub(back).map_or("", |at| before[at].text);
        match last(1) {
            "pub" => true,
            ")" => {
                let open = before.iter().rposition(|token| token.text == "(");
                open.is_some_and(|open| open > 0 && before[open - 1].text == "pub")
            }
            _ => false,
        }
    }

    /// A path up to its last name; the reader stands at that name after it.
    fn read_path(&mut self, module: &str) {
        let mut path = vec![self.peek(0).to_owned()];
        self.file.words.insert(self.peek(0).to_owned());
        while self.peek(1) == "::" && self.tokens.get(self.at + 2).is_some_and(|token| token.is_word) {
            self.at += 2;
            path.push(self.peek(0).to_owned());
        }
        self.file.paths.push((module.to_owned(), path));
    }

    /// One tree of a `use`, after `prefix`; ends behind it.
    fn read_use(&mut self, module: &str, prefix: &mut Vec<String>, public: bool) {
        let depth = prefix.len();
        loop {
            match self.peek(0) {
                "::" => {}
                "{" => {
                    self.at += 1;
                    while !matches!(self.peek(0), "}" | "") {
                        self.read_use(module, prefix, public);
                        if self.peek(0) == "," {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    break;
                }
                "*" => {
                    self.at += 1;
                    self.import(module, prefix, "*", public);
                    break;
                }
                "as" => {
                    let name = self.peek(1).to_owned();
                    self.at += 2;
                    self.import(module, prefix, &name, public);
                    break;
                }
                "" | ";" | "," | "}" => {
                    let name = prefix.last().cloned().unwrap_or_default();
                    self.import(module, prefix, &name, public);
                    break;
                }
                name => prefix.push(name.to_owned()),
            }
            self.at += 1;
        }
        prefix.truncate(depth);
    }

    fn import(&mut self, module: &str, path: &[String], name: &str, public: bool) {
        let mut path = path.to_vec();
        let mut name = name.to_owned();
        // `a::{self}` is `a`.
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
            if name == "self" {
                name = path.last().cloned().unwrap_or_default();
            }
        }
        self.file.imports.push(Import { module: module.to_owned(), path, name, public });
    }

    /// Skips the item under `#[cfg(test)]`, and notes the file that it may declare.
    fn skip_test(&mut self, module: &str) {
        let mut depth = 0;
        self.at += 7;
        while self.at < self.tokens.len() {
            match self.peek(0) {
                "mod" if depth == 0 && self.peek(2) == ";" => {
                    self.tests.insert(join(module, self.peek(1)));
                }
                "{" | "(" | "[" => depth += 1,
                "}" if depth == 1 => {
                    self.at += 1;
                    return;
                }
                "}" | ")" | "]" => depth -= 1,
                ";" if depth == 0 => {
                    self.at += 1;
                    return;
                }
                _ => {}
            }
            self.at += 1;
        }
    }
}

pub(super) fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") }
}

pub(super) fn parent(module: &str) -> &str {
    module.rsplit_once("::").map_or("", |(parent, _)| parent)
}

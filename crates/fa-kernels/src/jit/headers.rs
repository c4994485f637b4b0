//! The CUDA headers: compiled into the library, or read from a folder while kernels are being written.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::Error;

/// Names the folder of [`Headers::current`].
pub const HEADERS_VARIABLE: &str = "FA_HEADERS";

/// What [`Headers::choose`] was given.
static CHOSEN: OnceLock<PathBuf> = OnceLock::new();

static EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// Headers by the names under which they are included: their paths below the `cuda` folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Headers(BTreeMap<Cow<'static, str>, Cow<'static, str>>);

impl Headers {
    /// The headers that the library was built with.
    pub fn embedded() -> Headers {
        Headers(EMBEDDED.iter().map(|&(name, text)| (name.into(), text.into())).collect())
    }

    /// Every `.cuh` file below `folder`.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read.
    pub fn from_dir(folder: &Path) -> Result<Headers, Error> {
        let mut headers = BTreeMap::new();
        read_dir(folder, "", &mut headers)?;
        Ok(Headers(headers))
    }

    /// The headers that kernels are compiled with: of the folder that [`Headers::choose`] or else the
    /// variable FA_HEADERS names, for kernels that are being written, or else those embedded.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read.
    pub fn current() -> Result<Headers, Error> {
        Headers::folder().map_or_else(|| Ok(Headers::embedded()), |folder| Headers::from_dir(&folder))
    }

    /// The folder of [`Headers::current`]; `None` for the embedded ones.
    pub fn folder() -> Option<PathBuf> {
        let named =
            || std::env::var_os(HEADERS_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
        CHOSEN.get().cloned().or_else(named)
    }

    /// Compiles this process's kernels with the headers in `folder` from now on. The first choice stays.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read.
    pub fn choose(folder: &Path) -> Result<(), Error> {
        Headers::from_dir(folder)?;
        CHOSEN.get_or_init(|| folder.to_owned());
        Ok(())
    }

    /// These headers, with another one.
    #[must_use]
    pub fn with(&self, name: &'static str, text: String) -> Headers {
        let mut own = self.clone();
        own.0.insert(name.into(), text.into());
        own
    }

    /// A header's text.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|text| &**text)
    }

    /// The headers that `text` includes, and those that they include, ordered by name: a kernel's whole
    /// source, so that changing one kernel leaves the others' cache entries and validation records valid.
    ///
    /// # Errors
    /// [`Error::MissingHeader`] for an `#include "..."` of a name that is not here.
    pub fn reachable(&self, text: &str) -> Result<Vec<(&str, &str)>, Error> {
        self.reachable_by(text, &mut Includes::new())
    }

    /// [`Headers::reachable`] with what was read before of these headers.
    ///
    /// # Errors
    /// As [`Headers::reachable`].
    pub(super) fn reachable_by<'a>(
        &'a self,
        text: &str,
        known: &mut Includes<'a>,
    ) -> Result<Vec<(&'a str, &'a str)>, Error> {
        let mut found = BTreeMap::new();
        let own = includes(text).map(|name| (name.to_owned(), "the translation unit"));
        let mut waiting: Vec<(String, &str)> = own.collect();
        while let Some((name, from)) = waiting.pop() {
            let Some((name, text)) = self.0.get_key_value(&*name) else {
                return Err(Error::MissingHeader { name, from: from.to_owned() });
            };
            if found.insert(&**name, &**text).is_none() {
                let own = known.entry(name).or_insert_with(|| includes(text).collect());
                waiting.extend(own.iter().map(|&own| (own.to_owned(), &**name)));
            }
        }
        Ok(found.into_iter().collect())
    }
}

/// The names that headers include.
pub(super) type Includes<'a> = HashMap<&'a str, Vec<&'a str>>;

/// The names that `text` includes.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix("#include"))
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
}

fn read_dir(
    folder: &Path,
    prefix: &str,
    headers: &mut BTreeMap<Cow<'static, str>, Cow<'static, str>>,
) -> Result<(), Error> {
    let io = |e| Error::io(folder, e);
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let name = format!("{prefix}{name}");
        if path.is_dir() {
            read_dir(&path, &format!("{name}/"), headers)?;
        } else if path.extension().is_some_and(|e| e == "cuh") {
            let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
            headers.insert(name.into(), text.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(files: &[(&'static str, &'static str)]) -> Headers {
        Headers(files.iter().map(|&(name, text)| (name.into(), text.into())).collect())
    }

    #[test]
    fn only_what_is_included_is_reached() {
        let all = headers(&[
            ("a.cuh", "#pragma once\n#include \"x/b.cuh\"\n#include \"c.cuh\"\n"),
            ("c.cuh", "  #include \"a.cuh\"\n"),
            ("unused.cuh", ""),
            ("x/b.cuh", "#include <system>\n"),
        ]);
        let names: Vec<&str> =
            all.reachable("#include \"a.cuh\"\n").unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a.cuh", "c.cuh", "x/b.cuh"]);
    }

    #[test]
    fn a_missing_header_is_named_with_where_it_is_included() {
        let error =
            headers(&[("a.cuh", "#include \"gone.cuh\"")]).reachable("#include \"a.cuh\"").unwrap_err();
        assert_eq!(error.to_string(), "a.cuh includes gone.cuh, which is not among the kernels' headers");
    }
}

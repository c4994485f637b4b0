//! Mutation testing of the emulation: every synchronising statement of a kernel is removed, one at a time. A
//! removal that goes unnoticed means that the statement is redundant, did not run, or is outside of what the
//! emulation models.

use std::collections::BTreeMap;

use fa_core::{Arch, KernelSpec};
use fa_kernels::{Headers, Source};

use crate::emulator::{Emulator, source};
use crate::error::Error;
use crate::options::Options;
use crate::sweep::{Case, SEEDS, Trials};

/// Functions that synchronise: those of `ptx/`, and those of the kernels that wrap them.
const SYNCHRONISING: &[&str] = &[
    "acquire",
    "add_dq",
    "advance",
    "announce",
    "announce_dq",
    "await_turn",
    "bulk_commit",
    "bulk_wait",
    "bulk_wait_read",
    "cluster_exchange",
    "cluster_leave",
    "cluster_publish",
    "cluster_sync",
    "commit",
    "cp_async_commit",
    "cp_async_wait",
    "cta_sync",
    "end_turn",
    "exchange",
    "fence",
    "fence_async_shared",
    "fence_gpu",
    "give_turn",
    "init",
    "mbarrier_arrive",
    "mbarrier_arrive_expect",
    "mbarrier_arrive_remote",
    "mbarrier_init",
    "mbarrier_init_fence",
    "mbarrier_wait",
    "named_barrier_arrive",
    "named_barrier_sync",
    "named_barrier_sync_unaligned",
    "pass_turn",
    "red_release_increment",
    "release",
    "release_do",
    "release_k",
    "release_q",
    "release_v",
    "retire_counter",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
    "signal_next",
    "skip_k",
    "skip_v",
    "step_barrier",
    "wait",
    "wait_empty",
    "wait_dq_free",
    "wait_ds_stored",
    "wait_for_turn",
    "wait_full",
    "wait_pds_free",
    "wait_turn",
    "warp_sync",
];

/// Steps after which a mutant is given up: many times those of a whole kernel.
pub(crate) const STEP_LIMIT: u64 = 3_000_000;

/// A statement that can be removed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Statement {
    /// Its header.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// Its text, on one line.
    pub text: String,
    /// Its number among statements of the same text in its header, from 1.
    pub occurrence: usize,
    begin: usize,
    end: usize,
}

impl Statement {
    /// Whether it is this statement, in any version of the sources.
    pub(crate) fn is(&self, file: &str, text: &str, occurrence: usize) -> bool {
        (&*self.file, &*self.text, self.occurrence) == (file, text, occurrence)
    }
}

/// The synchronising statements of a source, outside `ptx/`.
pub fn statements(source: &Source) -> Vec<Statement> {
    let mut found = Vec::new();
    for (file, text) in &source.headers {
        if file.starts_with("ptx/") {
            continue;
        }
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let mut begin = 0;
        for (index, line) in text.split_inclusive('\n').enumerate() {
            if let Some((from, to)) = call_in(&text[begin..], line) {
                let statement =
                    text[begin + from..begin + to].split_whitespace().collect::<Vec<_>>().join(" ");
                let occurrence = seen.entry(statement.clone()).or_default();
                *occurrence += 1;
                found.push(Statement {
                    file: file.clone(),
                    line: index + 1,
                    text: statement,
                    occurrence: *occurrence,
                    begin: begin + from,
                    end: begin + to,
                });
            }
            begin += line.len();
        }
    }
    found
}

/// The range in `text` of the call that the statement starting on `line` consists of, if it synchronises.
/// What precedes it on the line (`if (...)`, a lambda's `{`) is kept.
fn call_in(text: &str, line: &str) -> Option<(usize, usize)> {
    let code = line.split("//").next().unwrap_or(line);
    for (at, _) in code.match_indices('(') {
        // A name before the bracket, possibly with template arguments.
        let head = code[..at].trim_end();
        let named = match head.strip_suffix('>') {
            Some(inner) => &inner[..inner.rfind('<')?],
            None => head,
        };
        let name_at = named.rfind(|c: char| !(c.is_alphanumeric() || c == '_')).map_or(0, |i| i + 1);
        if !SYNCHRONISING.contains(&&named[name_at..]) {
            continue;
        }
        let path_at =
            named.rfind(|c: char| !(c.is_alphanumeric() || "_.:>-".contains(c))).map_or(0, |i| i + 1);
        // A statement begins after `;`, `{`, `)` of a condition, or at the start; anything else is a
        // declaration or an expression.
        let before = named[..path_at].trim_end();
        if !(before.is_empty() || before.ends_with([';', '{', ')']) || before.ends_with("else")) {
            continue;
        }
        let mut depth = 0usize;
        for (offset, c) in text[at..].char_indices() {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                ';' if depth == 0 => return Some((path_at, at + offset + 1)),
                '{' if depth == 0 => break,
                _ => {}
            }
        }
    }
    None
}

/// The source without a statement.
pub fn without(source: &Source, statement: &Statement) -> Source {
    let mut mutant = source.clone();
    if let Some((_, text)) = mutant.headers.iter_mut().find(|(name, _)| *name == statement.file) {
        text.replace_range(statement.begin..statement.end, ";");
    }
    mutant
}

/// A kernel and a problem on which it is run.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The kernel.
    pub spec: KernelSpec,
    /// Its architecture.
    pub arch: Arch,
    /// The problem.
    pub case: Case,
}

/// What noticed the removal of a statement: the subject, and the first line of the finding; or `None`.
///
/// # Errors
/// Those of the emulation. A mutant that does not compile counts as noticed.
pub fn noticed(
    emulator: &Emulator,
    subjects: &[Subject],
    statement: &Statement,
    trials: &Trials,
) -> Result<Option<(usize, String)>, Error> {
    for (number, subject) in subjects.iter().enumerate() {
        let source = source(&subject.spec, subject.arch, &Headers::embedded())?;
        // Positions are of this source's headers, which all subjects of a kernel share.
        if !source.headers.iter().any(|(name, _)| *name == statement.file) {
            continue;
        }
        let mutant = without(&source, statement);
        let unit = match emulator.unit_of(&subject.spec, subject.arch, &mutant) {
            Ok(unit) => unit,
            Err(Error::Compile { .. }) => return Ok(Some((number, "does not compile".into()))),
            Err(error) => return Err(error),
        };
        let trial = trials.get(&subject.case, &subject.spec);
        for seed in SEEDS {
            let options = Options { step_limit: STEP_LIMIT, ..Options::of(&subject.spec, seed) };
            let faults = trial.run(&unit, &options)?.faults();
            if let Some(fault) = faults.first() {
                return Ok(Some((number, fault.lines().next().unwrap_or_default().to_owned())));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let source = Source {
            unit: String::new(),
            headers: vec![("a.cuh".into(), text.into()), ("ptx/b.cuh".into(), text.into())],
            target: "sm_90a".into(),
        };
        statements(&source)
            .into_iter()
            .map(|own| format!("{}:{} {}", own.line, own.text, own.occurrence))
            .collect()
    }

    #[test]
    fn calls_that_synchronise_are_statements_and_declarations_are_not() {
        let text = [
            "void wait_turn() const {",
            "    wgmma::wait<0>();",
            "    if constexpr (X) named_barrier_sync(kA + i,",
            "        128);",
            "    /* not code: */ // cta_sync();",
            "    const auto wait = [&] { cta_sync(); };",
            "    smem.q_bars.release(state, elected);",
            "    auto x = f.wait(1);",
            "    cta_sync();",
            "}",
        ];
        let text = text.join("\n");
        assert_eq!(
            found(&text),
            [
                "2:wgmma::wait<0>(); 1",
                "3:named_barrier_sync(kA + i, 128); 1",
                "6:cta_sync(); 1",
                "7:smem.q_bars.release(state, elected); 1",
                "9:cta_sync(); 2",
            ]
        );
    }

    #[test]
    fn a_statement_is_removed_alone() {
        let source = Source {
            unit: String::new(),
            headers: vec![("a.cuh".into(), "if (x) cta_sync();\ny();\n".into())],
            target: "sm_80".into(),
        };
        let mutant = without(&source, &statements(&source)[0]);
        assert_eq!(mutant.headers[0].1, "if (x) ;\ny();\n");
    }
}

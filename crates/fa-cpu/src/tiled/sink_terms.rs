//! The terms that the heads of a backward's units add to the gradients of their sinks.

use std::sync::OnceLock;

use super::cut::Cut;

/// A term for each head of each unit, set by whichever worker has the unit's first item.
pub(super) struct SinkTerms {
    terms: Vec<OnceLock<f64>>,
    group: usize,
}

impl SinkTerms {
    /// Room for the terms of `cuts` units with `group` heads each; none unless `asked`.
    pub(super) fn new(asked: bool, cuts: usize, group: usize) -> SinkTerms {
        let count = if asked { cuts * group } else { 0 };
        SinkTerms { terms: (0..count).map(|_| OnceLock::new()).collect(), group }
    }

    /// Sets the term of a unit's head, by its number within the group; computes nothing unless
    /// terms were asked for.
    pub(super) fn set(&self, cut: usize, member: usize, term: impl FnOnce() -> f64) {
        if let Some(own) = self.terms.get(cut * self.group + member) {
            let empty = own.set(term()).is_ok();
            debug_assert!(empty, "an item runs once");
        }
    }

    /// Query heads with their terms, in the order of `cuts`.
    pub(super) fn by_head(&self, cuts: &[Cut]) -> Vec<(usize, f64)> {
        let head = |index: usize| cuts[index / self.group].unit.kv_head * self.group + index % self.group;
        self.terms.iter().enumerate().filter_map(|(index, term)| Some((head(index), *term.get()?))).collect()
    }
}

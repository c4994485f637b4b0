//! Which kernel was chosen for which problem.

use std::collections::HashMap;

use fa_core::KernelSpec;

/// Choices that are remembered at the most, some 4 MB: lengths that never come again must not fill the memory of a server.
const REMEMBERED: usize = 4096;

/// Kernels by the key of a problem: what a caller prefers for good, what was chosen as long as there is room.
#[derive(Debug, Default)]
pub struct Choices {
    preferred: HashMap<String, KernelSpec>,
    chosen: HashMap<String, KernelSpec>,
}

impl Choices {
    /// The kernel for the problem of `key`.
    pub fn get(&self, key: &str) -> Option<&KernelSpec> {
        self.preferred.get(key).or_else(|| self.chosen.get(key))
    }

    /// Keeps `spec`, which may be forgotten: it is chosen again at the cost of planning, a millisecond or two.
    pub fn remember(&mut self, key: String, spec: KernelSpec) {
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(key, spec);
    }

    /// Keeps `spec` for good.
    pub fn prefer(&mut self, key: String, spec: KernelSpec) {
        self.preferred.insert(key, spec);
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    #[test]
    fn what_is_preferred_stays_and_what_is_chosen_takes_bounded_room() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let mut plans = plan(&problem, Arch::Sm80, &PlanOptions::default()).expect("there are plans");
        let (first, second) = (plans.swap_remove(0).spec, plans.swap_remove(0).spec);
        let mut choices = Choices::default();
        choices.remember("a".to_owned(), first.clone());
        choices.prefer("a".to_owned(), second.clone());
        for i in 0..2 * REMEMBERED {
            choices.remember(i.to_string(), first.clone());
            assert_eq!(choices.get(&i.to_string()), Some(&first));
            assert!(choices.chosen.len() <= REMEMBERED);
        }
        assert_eq!(choices.get("a"), Some(&second));
        assert_eq!(choices.get("0"), None);
    }
}

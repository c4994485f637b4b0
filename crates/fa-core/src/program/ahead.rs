//! The load of a score's program whose elements kernels read before the scores are there.

use super::cuda_names::Rate;
use super::node::{Node, NodeId};
use super::types::{Element, Var};
use super::whole::Program;

/// How a load's elements lie in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AheadForm {
    /// The last index is the key: the elements of neighbouring keys are neighbours.
    Keys,
    /// The last index is a distance of query and key, which many pairs of a tile have.
    Distances {
        /// Whether the index rises with the query.
        by_query: bool,
    },
}

/// A load of an element for each query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// The load.
    pub load: NodeId,
    /// Its form.
    pub form: AheadForm,
    /// Bytes of an element.
    pub bytes: u32,
}

impl Ahead {
    /// Whether the SM90 class copies a tile of the elements to shared memory before it is needed.
    pub const fn is_copied(self) -> bool {
        matches!(self.form, AheadForm::Keys) && self.bytes == 2
    }

    /// Registers of a thread that hold what it reads ahead for `scores` of its scores. Rows of `packed` heads
    /// share no distances, and nothing is read ahead for them.
    pub const fn registers(self, scores: u32, packed: bool) -> u32 {
        match self.form {
            AheadForm::Keys => scores * self.bytes / 4,
            AheadForm::Distances { .. } if packed => 0,
            AheadForm::Distances { .. } => scores / 2 + 2,
        }
    }
}

impl Program {
    /// The load that kernels make before the scores are there: the first of one of these forms.
    pub fn ahead(&self) -> Option<Ahead> {
        let score = self.score()?;
        let mut needed = vec![false; score.index() + 1];
        needed[score.index()] = true;
        for index in (0..needed.len()).rev() {
            if needed[index] {
                self.nodes()[index].operands().for_each(|x| needed[x.index()] = true);
            }
        }
        (0..needed.len()).filter(|&index| needed[index]).map(|index| NodeId(index as u16)).find_map(|load| {
            let (form, bytes) = self.ahead_form(load)?;
            Some(Ahead { load, form, bytes })
        })
    }

    /// The array whose tiles the SM90 class copies to shared memory, by its place.
    pub fn copied_array(&self) -> Option<usize> {
        let load = self.ahead().filter(|ahead| ahead.is_copied())?.load;
        let Node::Load(array, _) = self.nodes()[load.index()] else { return None };
        Some(usize::from(array))
    }

    fn ahead_form(&self, load: NodeId) -> Option<(AheadForm, u32)> {
        let Node::Load(array, indices) = self.nodes()[load.index()] else { return None };
        let bytes = match self.arrays()[usize::from(array)].element {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::I32 | Element::U8 | Element::Bool | Element::Bits => return None,
        };
        let mut others = indices.into_iter().flatten();
        let last = others.next_back()?;
        let rates: Vec<_> = others.map(|index| Rate::of(self.deps(index))).collect();
        let all = |rate: Rate| rates.iter().all(|&own| own <= rate);
        if Rate::of(self.deps(load)) != Rate::Pair {
            None
        } else if self.nodes()[last.index()] == Node::Var(Var::K) && all(Rate::Row) {
            Some((AheadForm::Keys, bytes))
        } else {
            let by_query = self.distance(last)?;
            all(Rate::Tile).then_some((AheadForm::Distances { by_query }, bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::AheadForm::{Distances, Keys};
    use super::*;

    #[test]
    fn loads_are_read_ahead_by_what_their_last_index_follows() {
        for (text, form) in [
            ("array t: bf16[_, _, _, _]; score = s + t[b, h, q, k];", Some((Keys, 2))),
            ("array t: f32[_, _]; score = s * t[q // 2, k];", Some((Keys, 4))),
            ("array t: f32[_, _]; scalar c: i32; score = s + t[h, q - k + c];", Some((BY_QUERY, 4))),
            ("array t: f16[_]; score = s + tanh(t[sk - (q - k)]);", Some((BY_KEY, 2))),
            // A number of keys only, bounds, two keys, a row of its own, integers, a mask's load.
            ("array t: f32[_, _]; score = s + t[h, k];", None),
            ("array t: f32[_]; score = s + t[max(q - k, 0)];", None),
            ("array t: f32[_]; score = s + t[q - 2 * k];", None),
            ("array t: f32[_, _]; score = s + t[q, q - k];", None),
            ("array t: i32[_, _]; score = s + f32(t[q, k]);", None),
            ("array t: f32[_, _]; mask = t[q, k] > 0.0; score = s + 1.0;", None),
        ] {
            let program = Program::parse(text).unwrap();
            let found = program.ahead().map(|ahead| (ahead.form, ahead.bytes));
            assert_eq!(found, form, "{text}");
            assert_eq!(program.cuda().contains("kAhead"), form.is_some(), "{text}");
        }
    }

    #[test]
    fn rows_that_are_copied_may_be_aligned() {
        let of = |text: &str| Program::parse(text).unwrap().intern().unwrap();
        let text = "array c: i32[_]; array t: bf16[_, _] grad; score = s + t[h, k] + t[c[q], k];";
        let (slot, aligned) = of(text).with_aligned_rows().unwrap();
        assert_eq!(slot, 1);
        assert_eq!(aligned, of(&text.replace("grad;", "grad aligned;")));
        assert!(aligned.cuda().contains("AlignedRows") && !of(text).cuda().contains("AlignedRows"));
        assert_eq!(Program::parse(aligned.text()).unwrap(), *aligned);
        assert_eq!(of(text).with_aligned_rows(), Some((slot, aligned)));
        // It is so already; nothing is copied.
        assert_eq!(aligned.with_aligned_rows(), None);
        assert_eq!(of("array t: f32[_, _]; score = s + t[q, k];").with_aligned_rows(), None);
    }

    const BY_QUERY: AheadForm = Distances { by_query: true };
    const BY_KEY: AheadForm = Distances { by_query: false };
}

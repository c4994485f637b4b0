//! A problem that a kernel is tried on: its layout, lengths, slopes and sinks.

use fa_core::extras;
use fa_core::{Problem, TensorLayout};
use fa_cpu::OwnedExtras;
use fa_lab::grid::{Arrangement, Values};
use fa_lab::mods::Mods;
use fa_lab::sequences::Sequences;
use serde_json::{Value, json};

use crate::extras::with_mods;
use crate::placement::{Placement, Shared};

/// A problem in a layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The problem.
    pub problem: Problem,
    /// The layout of its tensors.
    pub placement: Placement,
    /// Its extras.
    pub extras: OwnedExtras,
}

impl Case {
    /// A case of sequences of equal lengths.
    pub fn of(problem: &Problem, placement: Placement) -> Case {
        Case { problem: *problem, placement, extras: with_mods(OwnedExtras::NONE, problem) }
    }

    /// A case of the list that GPUs are validated on, with its slopes and sinks; `None` for tensors with huge
    /// strides, which only a GPU has the memory for.
    pub fn of_grid(case: &fa_lab::grid::Case) -> Option<Case> {
        let shared = |axis| Placement { shared: Some(axis), ..Placement::PACKED };
        let placement = match case.arrangement {
            Arrangement::Bshd => Placement::PACKED,
            Arrangement::Bhsd => Placement::of(TensorLayout::Bhsd, 0),
            Arrangement::Gap(gap) => Placement::of(TensorLayout::Bshd, case.gap(gap)),
            Arrangement::BhsdGap(gap) => Placement::of(TensorLayout::Bhsd, case.gap(gap)),
            Arrangement::SharedBatch => shared(Shared::Batch),
            Arrangement::SharedHeads => shared(Shared::Heads),
            Arrangement::SharedRows => shared(Shared::Rows),
            Arrangement::FarBatch | Arrangement::FarKeys => return None,
        };
        let rows = case.sequences.as_ref().map_or(OwnedExtras::NONE, Sequences::arrays);
        let mut extras = with_mods(rows, &case.problem);
        if case.values == Values::Edges {
            let own = |given: &Option<Vec<f32>>| given.clone().unwrap_or_default();
            let mods =
                Mods { slopes: own(&extras.alibi_slopes), sinks: own(&extras.sinks), ..Mods::default() };
            let mods = mods.at_the_edges();
            extras.alibi_slopes = extras.alibi_slopes.map(|_| mods.slopes);
            extras.sinks = extras.sinks.map(|_| mods.sinks);
        }
        Some(Case { problem: case.problem, placement, extras })
    }

    /// The case as data, for a record's key: it names no Rust type and omits empty fields.
    pub(crate) fn data(&self) -> Value {
        let Case { problem, placement: Placement { layout, gap, shared }, extras } = self;
        let mut data = json!({
            "problem": problem,
            "layout": layout,
            "gap": gap,
            "shared": shared.map(Shared::name),
        });
        for (extra, values) in extras.iter() {
            data[extra.name()] = match values {
                extras::Value::I32(values) => json!(values),
                extras::Value::F32(values) => json!(values),
            };
        }
        sorted(data)
    }
}

/// JSON whose fields are in the order of their names, without those that are null.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.into_iter().filter(|(_, value)| !value.is_null()).collect();
            fields.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(fields.into_iter().map(|(name, value)| (name, sorted(value))).collect())
        }
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa_core::{Dtype, Lengths, Mask, Side};

    #[test]
    fn data_is_in_the_order_of_names_and_has_no_types() {
        let mut problem = Problem::square(2, 3, 4, 64, Mask::window(40, 7), Dtype::Bf16);
        problem.lengths = Lengths::of(2, Side::packed(9, 5), Side::padded(6).with_used());
        problem.score.sinks = true;
        let extras = OwnedExtras {
            cu_seqlens_q: Some(vec![0, 4, 9]),
            seqused_k: Some(vec![6, 1]),
            ..OwnedExtras::NONE
        };
        let case = Case { problem, placement: Placement::PACKED, extras: with_mods(extras, &problem) };
        let expected = concat!(
            r#"{"cu_seqlens_q":[0,4,9],"gap":0,"layout":"bshd","problem":{"batch":2,"dtype":"bf16","#,
            r#""head_dim":64,"head_dim_v":64,"heads_kv":4,"heads_q":4,"mask":{"left":40,"right":7},"#,
            r#""seqlen_k":6,"seqlen_q":5,"sinks":true,"total_q":9,"used_k":true},"seqused_k":[6,1],"#,
            r#""sinks":[1.5,-3.0,4.25,0.0]}"#,
        );
        assert_eq!(case.data().to_string(), expected);
    }
}

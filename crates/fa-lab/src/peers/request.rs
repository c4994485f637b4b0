//! Requests to the helper.

use fa_core::Pass;
use serde_json::json;

use crate::marks::Wanted;
use crate::sequences::Store;

/// The request for `wanted`.
pub(super) fn request(wanted: &Wanted, pass: Pass) -> serde_json::Value {
    let problem = &wanted.problem;
    let mask = &problem.mask;
    let mut request = json!({
        "cmd": "open", "mode": pass.short_name(), "reps": 1,
        "batch": problem.lengths.sequences(), "heads_q": problem.heads_q, "heads_kv": problem.heads_kv,
        "seqlen_q": problem.lengths.max_q(), "seqlen_k": problem.lengths.max_k(),
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
        "causal": mask.is_causal(), "dtype": problem.types.q.to_string(),
    });
    if !(mask.is_full() || mask.is_causal()) {
        request["window"] = json!([mask.left, mask.right]);
    }
    if let Some(softcap) = problem.score.softcap {
        request["softcap"] = json!(softcap);
    }
    if let Some(alibi) = problem.score.alibi {
        request["alibi"] = json!(alibi.name());
    }
    if pass == Pass::DETERMINISTIC_BACKWARD {
        request["deterministic"] = json!(true);
    }
    if problem.score.sinks {
        request["sinks"] = json!(true);
    }
    if wanted.graph > 0 {
        request["graph"] = json!(wanted.graph);
    }
    if !problem.lengths.is_uniform() {
        let sequences = wanted.sequences();
        for (name, side) in [("q", &sequences.q), ("k", &sequences.k)] {
            let lens: Vec<usize> = (0..side.sequences()).map(|b| side.len(b)).collect();
            let (store, page) = match side.store() {
                Store::Padded { .. } => ("padded", None),
                Store::Packed { .. } => ("packed", None),
                Store::Paged { page, .. } => ("paged", Some(*page)),
            };
            request["sequences"][name] = json!({ "store": store, "lens": lens });
            if let Some(page) = page {
                request["sequences"][name]["page"] = json!(page);
            }
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::marks::Marks;

    #[test]
    fn requests_say_how_sequences_lie() {
        let asked = |marks: Marks, row: usize| request(&marks.shapes()[row], Pass::Forward);
        let packed = asked(Marks::Packed, 2);
        assert_eq!(packed["sequences"]["q"]["store"], "packed");
        assert_eq!(packed["sequences"]["k"]["lens"][59], 513);
        assert_eq!((&packed["seqlen_q"], &packed["batch"]), (&json!(513), &json!(60)));
        let dense = asked(Marks::Packed, 3);
        assert!(dense.get("sequences").is_none() && dense.get("graph").is_none());
        let pages = asked(Marks::Paged, 1);
        assert_eq!(pages["sequences"]["k"]["page"], 16);
        assert_eq!((&pages["sequences"]["q"]["store"], &pages["graph"]), (&json!("padded"), &json!(16)));
        let sinks = asked(Marks::Sinks, 2);
        assert_eq!((&sinks["sinks"], &sinks["window"]), (&json!(true), &json!([127, 0])));
        assert!(asked(Marks::Sinks, 1).get("sinks").is_none());
        assert_eq!(asked(Marks::Step, 0)["graph"], 32);
        let gradients = |pass| request(&Marks::PackedBwd.shapes()[0], pass);
        assert_eq!(gradients(Pass::BACKWARD)["mode"], "bwd");
        assert!(gradients(Pass::BACKWARD).get("deterministic").is_none());
        assert_eq!(gradients(Pass::DETERMINISTIC_BACKWARD)["deterministic"], true);
    }
}

//! What a plan refuses: problems that its scheme does not compute, and calls that are not of the plan.

use fa_core::lengths::SideRows;
use fa_core::{Alibi, Extra, Extras, Mask, Pass, Problem, Types};

use super::{MAX_PARTS, Scheme, ShardPlan};
use crate::error::Error;
use crate::program::AXES;

impl ShardPlan {
    /// What a scheme does not compute.
    pub(super) fn refused(&self, what: String, instead: &str) -> Error {
        let instead = instead.to_owned();
        Error::Refused { scheme: self.scheme.name(), world: self.world, what, instead }
    }

    /// What the scheme computes.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Problem { lengths, heads_q, heads_kv, .. } = self.problem;
        let refuse = |what: String, instead: &str| Err(self.refused(what, instead));
        if let (SideRows::Paged { page, .. }, false) = (lengths.k().rows, self.is_cache()) {
            return refuse(
                format!("keys in pages of {page} rows"),
                "use decode, or pack or pad the keys of each rank",
            );
        }
        if self.problem.latent {
            let instead = "split the heads between ranks, each of which holds all latents, or their keys, \
                           with a call on each rank and a merge by LSE";
            return refuse("latent problems, whose keys begin with their values".to_owned(), instead);
        }
        if lengths.q().used || lengths.k().used && !self.is_cache() {
            return refuse("lengths in use".to_owned(), "pack the sequences, or leave the lengths out");
        }
        let Mask { left, right, offset, .. } = self.problem.mask;
        let is_whole = (left, right) == (None, None)
            || (left, right, offset) == (None, Some(0), 0) && lengths.max_q() == 1;
        if self.is_cache() && !is_whole {
            // The last keys of a sequence are on any rank.
            let what = format!("{} queries under the mask {} on caches", lengths.max_q(), self.problem.mask);
            return refuse(what, "decode one query at a time, or give a full mask");
        }
        let is_uniform = match self.is_cache() {
            true => !lengths.q().is_packed() && !lengths.k().is_packed(),
            false => lengths.is_uniform(),
        };
        match (is_uniform, self.scheme, &self.starts) {
            (true, ..) | (false, Scheme::Ulysses, _) => {}
            (false, Scheme::Gather | Scheme::Ring, None) => {
                let what = "packed sequences of unknown starts".to_owned();
                return refuse(what, "use ShardPlan::packed, or ulysses");
            }
            (false, Scheme::Gather | Scheme::Ring, Some(_)) => {
                if offset != 0 || !(right == Some(0) || (left, right) == (None, None)) {
                    // The diagonal of a part would end elsewhere in each sequence.
                    let what = format!("packed sequences under the mask {}", self.problem.mask);
                    return refuse(what, "use ulysses, or a causal or full mask");
                }
            }
            (false, Scheme::Decode, _) => {
                return refuse("packed sequences".to_owned(), "use gather, ulysses or ring");
            }
        }
        let (score, types) = (self.problem.score, self.problem.types);
        let kinds = if self.is_cache() { types.with_kv(types.q) } else { types };
        if kinds != Types::same(types.q) {
            let instead = "use one type for all tensors, or decode on caches of codes with lengths in use";
            return refuse(format!("tensors of several types ({types:?})"), instead);
        }
        if score.program.is_some() && self.scheme == Scheme::Decode {
            let what = if score.dropout.is_some() { "dropout" } else { "a program of masks or scores" };
            return refuse(what.to_owned(), "use gather, ulysses or ring");
        }
        match (score.alibi, self.scheme) {
            (Some(Alibi::PerSequenceHead), _) => {
                return refuse("slopes of each sequence".to_owned(), "use slopes of heads alone");
            }
            (Some(Alibi::PerHead), Scheme::Decode) => {
                return refuse("ALiBi".to_owned(), "use gather, ulysses or ring");
            }
            (Some(Alibi::PerHead), Scheme::Gather | Scheme::Ulysses | Scheme::Ring) | (None, _) => {}
        }
        let (rows, keys) = self.len();
        let seeing = || self.block(0..rows, 0..keys).map_or(0, |block| block.rows.len());
        let is_counted = self.scheme != Scheme::Ulysses && self.starts.is_none() && !self.is_cache();
        if score.sinks && is_counted && seeing() < rows {
            // Their LSE is the sink.
            return refuse("sinks where queries see no key".to_owned(), "use ulysses");
        }
        if self.scheme == Scheme::Ulysses {
            let world = self.world;
            let whole = heads_q.is_multiple_of(world)
                && (heads_kv.is_multiple_of(world) || world.is_multiple_of(heads_kv));
            if !whole {
                let what =
                    format!("{heads_q} query heads and {heads_kv} K/V heads, which {world} does not divide");
                return refuse(what, "use gather or ring");
            }
        }
        if matches!(self.scheme, Scheme::Ring | Scheme::Decode) && 4 * self.world > MAX_PARTS {
            // Each of a rank's two ranges of queries may see both of another rank's.
            let what = format!("up to {} partial results", 4 * self.world);
            return refuse(what, &format!("use gather, or at most {} ranks", MAX_PARTS / 4));
        }
        Ok(())
    }

    /// The refusal of the gradient of an array whose extents the plan does not know.
    pub(crate) fn without_extents(&self, array: &str) -> Error {
        let what = format!("the gradient of the array {array} of a program whose extents it does not know");
        self.refused(what, "give them by ShardPlan::with_arrays, or declare the array without grad")
    }

    /// Whether a call's arrays are those that the plan knows: their extents, in the order of declarations.
    pub(crate) fn check_arrays(&self, given: &[[i32; AXES]]) -> Result<(), Error> {
        let decls = self.problem.score.program;
        let decls = decls.as_deref().map_or(&[][..], |program| program.arrays());
        for own in &self.arrays {
            let found = given.get(own.array).map(|extents| extents.map(|extent| extent.max(0) as usize));
            if found != Some(own.extents) {
                let name = &decls[own.array].name;
                let got = found.map_or("not given".to_owned(), |extents| format!("{extents:?} of {name}"));
                let need = format!("{:?}", own.extents);
                return Err(Error::Tensor { tensor: "an array of the program", got, need });
            }
        }
        Ok(())
    }

    /// Whether a call of a pass may have these extras, and has those that it needs.
    pub(crate) fn check_extras<I32, F32>(&self, given: &Extras<I32, F32>, pass: Pass) -> Result<(), Error> {
        let refuse = |what: &str, instead: &str| Err(self.refused(what.to_owned(), instead));
        let wants_dlse = self.has_dlse && pass.is_backward();
        let (starts, dlse) =
            (given.cu_seqlens_q.is_some() || given.cu_seqlens_k.is_some(), given.dlse.is_some());
        for (extra, value) in given.as_ref().entries() {
            let is_known = matches!(extra, Extra::CuSeqlensQ | Extra::CuSeqlensK) && self.starts.is_some();
            let need = extra.need(&self.problem, pass).filter(|need| !need.is_optional && !is_known);
            if let (Some(need), None) = (need, value) {
                let (got, need) = ("not given".to_owned(), format!("{} elements", need.len));
                return Err(Error::Tensor { tensor: extra.name(), got, need });
            }
        }
        match (starts && self.starts.is_some(), dlse, wants_dlse) {
            (true, ..) => refuse("cu_seqlens of a call", "leave them out: the plan knows the starts"),
            (false, true, false) => refuse(
                "the gradient of the LSE (dlse) in this call",
                "use ShardPlan::with_dlse, by which backwards take it",
            ),
            (false, false, true) => {
                refuse("a backward without dlse", "give it, or leave ShardPlan::with_dlse out")
            }
            (false, true, true) | (false, false, false) => Ok(()),
        }
    }
}

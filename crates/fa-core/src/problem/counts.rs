//! What a problem costs by the conventions of the field: visible pairs, operations and bytes moved.

use super::Problem;
use crate::{DescaleForm, Descales, Dtype, Pass};

impl Problem {
    /// Visible (query, key) pairs over all heads and sequences. Where lengths are on the device this is an
    /// estimate, as if every sequence had the mean length; a caller that knows the lengths can add up
    /// problems of one sequence each.
    pub fn pairs(&self) -> f64 {
        let pairs = self.mask.pairs(self.lengths.mean_q(), self.lengths.mean_k());
        self.lengths.sequences() as f64 * self.heads_q as f64 * pairs as f64
    }

    /// Floating-point operations of the forward: two products of 2 operations per pair and element,
    /// `2 * pairs * (head_dim + head_dim_v)` (the field's convention; masked pairs do not count).
    pub fn flops_forward(&self) -> f64 {
        2.0 * self.pairs() * (self.head_dim as f64 + self.head_dim_v as f64)
    }

    /// Floating-point operations of the backward, by the field's convention 2.5 times the forward's: five
    /// products per tile against two. (With `head_dim != head_dim_v` the exact count is `2 * pairs
    /// * (3 hd + 2 hdv)`.)
    pub fn flops_backward(&self) -> f64 {
        2.5 * self.flops_forward()
    }

    /// [`Problem::flops_forward`] or [`Problem::flops_backward`].
    pub fn flops(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.flops_forward(),
            Pass::Backward { .. } => self.flops_backward(),
        }
    }

    /// [`Problem::bytes_forward`] or [`Problem::bytes_backward`].
    pub fn bytes(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.bytes_forward(),
            Pass::Backward { .. } => self.bytes_backward(),
        }
    }

    /// Fewest bytes the forward moves: Q, and K and V as far as any query sees them, read once; O and the f32
    /// LSE written once.
    pub fn bytes_forward(&self) -> f64 {
        self.bytes_held(Pass::Forward) - self.unseen_bytes()
    }

    /// Fewest bytes the backward moves: Q, K and V as far as any query sees them, O, dO and LSE read once;
    /// dQ, dK and dV written once.
    pub fn bytes_backward(&self) -> f64 {
        self.bytes_held(Pass::BACKWARD) - self.unseen_bytes()
    }

    /// Bytes of the tensors that a pass reads and writes: Q, K, V, their descales, O and LSE, and for the
    /// backward dO, dQ, dK and dV.
    pub fn bytes_held(&self, pass: Pass) -> f64 {
        let (q, k, v, o) = self.elements();
        let [of_q, of_kv, of_out, of_dkv] =
            [self.types.q, self.types.kv, self.types.out, self.types.dkv].map(Dtype::bytes_per_number);
        let forward = of_q * q + of_kv * (k + v) + self.descale_bytes() + of_out * o;
        let gradients = of_q * q + of_dkv * (k + v) + of_out * o;
        forward + if pass.is_backward() { gradients } else { 0.0 } + 4.0 * self.rows()
    }

    /// Bytes of K and V themselves, in all of the cache that sequences reach.
    pub fn bytes_of_keys(&self) -> f64 {
        let (_, k, v, _) = self.elements();
        self.types.kv.bytes_per_number() * (k + v)
    }

    /// Bytes of the descales of Q, K and V; of those of each row as far as sequences reach.
    pub fn descale_bytes(&self) -> f64 {
        let heads = self.heads_kv as f64;
        let Descales { q, k, v } = self.descales;
        let of = |form: DescaleForm| match form {
            DescaleForm::None => 0.0,
            DescaleForm::Head => heads,
            DescaleForm::SequenceHead => self.lengths.sequences() as f64 * heads,
            DescaleForm::TokenHead => self.lengths.reach_k() as f64 * heads,
        };
        4.0 * (of(q) + of(k) + of(v))
    }

    /// Bytes of one key and its value in one head, with descales of their own.
    pub fn bytes_per_key(&self) -> f64 {
        let numbers = self.head_dim_k() as f64 + self.head_dim_v as f64;
        let Descales { k, v, .. } = self.descales;
        let descales = [k, v].into_iter().filter(|form| *form == DescaleForm::TokenHead).count();
        numbers * self.types.kv.bytes_per_number() + 4.0 * descales as f64
    }

    /// Bytes of K and V that no query sees: those before a window. Where lengths are on the device an
    /// estimate by the mean lengths, as for [`Problem::pairs`].
    fn unseen_bytes(&self) -> f64 {
        let (mean_q, mean_k) = (self.lengths.mean_q(), self.lengths.mean_k());
        let seen = self.mask.keys_of_all(mean_q, mean_k).len() as f64;
        let keys = self.heads_kv as f64 * self.lengths.reach_k() as f64;
        keys * self.bytes_per_key() * (1.0 - seen / (mean_k as f64).max(1.0))
    }

    /// Query rows over all heads and sequences: the number of LSE values (at most, where lengths are on the
    /// device).
    pub fn rows(&self) -> f64 {
        self.heads_q as f64 * self.lengths.reach_q() as f64
    }

    fn elements(&self) -> (f64, f64, f64, f64) {
        let keys = self.heads_kv as f64 * self.lengths.reach_k() as f64;
        let (hd, hdv) = (self.head_dim as f64, self.head_dim_v as f64);
        (self.rows() * hd, keys * self.head_dim_k() as f64, keys * hdv, self.rows() * hdv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Lengths, Mask, Types};

    const BASE: Problem = Problem::square(2, 1024, 16, 128, Mask::FULL, Dtype::Bf16);

    #[test]
    fn counts_follow_the_published_convention() {
        assert_eq!(BASE.flops_forward(), 4.0 * 2.0 * 16.0 * 1024.0 * 1024.0 * 128.0);
        assert_eq!(BASE.flops_backward(), 2.5 * BASE.flops_forward());
        let causal = BASE.with_mask(Mask::CAUSAL);
        assert_eq!(causal.pairs(), 2.0 * 16.0 * 1024.0 * 1025.0 / 2.0);
        assert_eq!(BASE.bytes_forward(), 2.0 * 16.0 * 1024.0 * (4.0 * 128.0 * 2.0 + 4.0));
        assert_eq!(BASE.bytes_backward(), 2.0 * 16.0 * 1024.0 * (8.0 * 128.0 * 2.0 + 4.0));
        // A latent row is read once, as key and as value.
        let latent = BASE.with_heads_kv(1).with_head_dims(576, 512).with_latent(true);
        let (rows, keys) = (2.0 * 16.0 * 1024.0, 2.0 * 1024.0);
        assert_eq!(latent.bytes_forward(), rows * (1088.0 * 2.0 + 4.0) + keys * 576.0 * 2.0);
        // One token of a window of 128 reads 128 keys of 1,024, and holds them all.
        let lengths = Lengths::uniform(2, 1, 1024);
        let token = BASE.with_lengths(lengths).with_mask(Mask::causal_window(127));
        let [held, moved] = [token.bytes_held(Pass::Forward), token.bytes_forward()];
        assert_eq!(held, token.with_mask(Mask::CAUSAL).bytes_forward());
        assert_eq!(held - moved, 2.0 * 16.0 * (1024.0 - 128.0) * 2.0 * 128.0 * 2.0);
        assert_eq!(token.bytes_held(Pass::BACKWARD) - token.bytes_backward(), held - moved);
        // 8-bit keys with a descale for each row, of which a window sees as many as of the rows.
        let of_rows = Descales::both(DescaleForm::TokenHead);
        let codes = token.with_types(Types::same(Dtype::Bf16).with_kv(Dtype::E4m3)).with_descales(of_rows);
        assert_eq!(codes.descale_bytes(), 2.0 * 16.0 * 1024.0 * 2.0 * 4.0);
        assert_eq!(codes.bytes_of_keys(), 2.0 * 16.0 * 1024.0 * 2.0 * 128.0);
        let half = codes.with_types(Types::same(Dtype::Bf16).with_kv(Dtype::Int4));
        assert_eq!((half.bytes_of_keys() * 2.0, half.bytes_per_key()), (codes.bytes_of_keys(), 136.0));
        let unseen = codes.bytes_held(Pass::Forward) - codes.bytes_forward();
        assert_eq!(unseen, 2.0 * 16.0 * (1024.0 - 128.0) * 2.0 * (128.0 + 4.0));
        let of_heads = codes.with_descales(Descales::both(DescaleForm::Head));
        assert_eq!(of_heads.descale_bytes(), 16.0 * 2.0 * 4.0);
    }

    #[test]
    fn estimates_of_problems_that_are_refused_do_not_panic() {
        let lengths = Lengths::uniform(usize::MAX, usize::MAX, usize::MAX);
        let dims = BASE.with_head_dims(usize::MAX, usize::MAX);
        for problem in [BASE.with_lengths(lengths), dims, dims.with_lengths(lengths).with_heads_kv(0)] {
            assert!(problem.check().is_err());
            assert!(problem.flops_backward().is_finite() && problem.bytes(Pass::BACKWARD).is_finite());
        }
    }

    #[test]
    fn counts_of_varied_problems_are_bounded_by_rows_and_lengths() {
        let packed = BASE.with_lengths(Lengths::packed(4, 1000, 9000, 500, 1000));
        assert_eq!(packed.rows(), 16.0 * 1000.0);
        assert_eq!(packed.pairs(), 4.0 * 16.0 * 250.0 * 1000.0);
        let keys = 4000.0 * 2.0 * 128.0 * 16.0 * 2.0;
        assert_eq!(packed.bytes_forward(), keys + 1000.0 * 16.0 * (2.0 * 128.0 * 2.0 + 4.0));
        let uniform = BASE.with_lengths(Lengths::uniform(4, 250, 1000));
        assert_eq!(
            (packed.flops_forward(), packed.bytes_backward()),
            (uniform.flops_forward(), uniform.bytes_backward())
        );
    }
}

//! The SM80-class forward: mma.sync and cp.async.

use super::error::SpecError;
use super::params::{kernel_params, multiple};
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM80-class forward. Each optimisation is a switch, so that it can be measured alone.
    pub struct Sm80Fwd {
        /// Query rows of a CTA; a multiple of `16 * num_warps` up to 256, or 16 or 32 with `divide_keys`.
        tile_m: u32 = 64,
        /// Keys per step; a multiple of 16 up to 256.
        tile_n: u32 = 64 => multiple(16, 16, 256),
        /// Warps of a CTA, 1 to 16; each owns `tile_m / num_warps` rows, or keys with `divide_keys`.
        num_warps: u32 = 4 => range(1, 16),
        /// K/V buffers in flight, 1 to 4; a step waits for all but the newest copies.
        stages: u32 = 2 => range(1, 4),
        /// Keep the Q fragments in registers for the whole mainloop.
        q_in_regs: bool = false,
        /// Resident CTAs per SM that the compiler is asked to leave registers for, 1 to 8.
        blocks_per_sm: u32 = 1 => range(1, 8),
        /// XOR-swizzled shared memory instead of plain row-major rows.
        swizzle: bool = true,
        /// ldmatrix instead of plain 32-bit fragment loads.
        ldmatrix: bool = true,
        /// exp2 with the scale folded into one multiply-add instead of exp of scaled scores.
        exp2: bool = true,
        /// Flush-to-zero exponentials, and approximate division unless `exact_div`.
        fast_math: bool = true,
        /// Separate loops for masked and unmasked tiles instead of a mask on every tile.
        loop_split: bool = true,
        /// Last query tiles first, so that the causal mask's longest tiles start earliest.
        reverse_blocks: bool = true,
        /// Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
        /// with all of their heads.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pack_gqa: bool = false,
        /// With `fast_math`: divide exactly at the end all the same.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        exact_div: bool = false,
        /// The warps divide the keys of a step, 16 or 32 to each, and each has all rows: for few rows, as in
        /// decoding. Codes are converted in registers.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        divide_keys: bool = false,
    }
}

impl Sm80Fwd {
    /// Checks the fields against the kernel's rules.
    pub(super) fn check(&self, head_dims: (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        if self.exact_div && !self.fast_math {
            let why = "exact_div turns off the approximate division of fast_math: leave it out with \
                       fast_math = false";
            return Err(SpecError::Conflict(why.to_owned()));
        }
        if self.divide_keys {
            return self.check_divided(head_dims);
        }
        multiple("tile_m", self.tile_m, 16 * self.num_warps, 16 * self.num_warps, 256)
    }

    /// Checks what `divide_keys` asks for.
    fn check_divided(&self, head_dims: (u32, u32)) -> Result<(), SpecError> {
        let refused = [
            (!self.swizzle || !self.ldmatrix, "swizzle = true and ldmatrix = true, as its copies have them"),
            (self.stages < 2, "stages = 2 to 4: copies run under the products of a stage before"),
            (self.num_warps < 2, "num_warps = 2 to 16: one warp has no keys to divide"),
            (
                !head_dims.0.is_multiple_of(32) || !head_dims.1.is_multiple_of(32),
                "head dims that are multiples of 32",
            ),
        ];
        if let Some((_, need)) = refused.iter().find(|(applies, _)| *applies) {
            return Err(SpecError::Conflict(format!("divide_keys needs {need}")));
        }
        multiple("tile_m", self.tile_m, 16, 16, 32)?;
        multiple("tile_n", self.tile_n, 16 * self.num_warps, 16 * self.num_warps, 32 * self.num_warps)
    }

    /// Checks what conversion of codes asks for.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        if self.swizzle {
            return Ok(());
        }
        let why = "needs swizzle = true: codes are converted to swizzled tiles";
        Err(SpecError::Conflict(format!("kv_dtype {dtype}: {why}")))
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm80_fwd",
            pass: Pass::Forward,
            family: Family::Sm80,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.num_warps.saturating_mul(32),
            blocks_per_sm: self.blocks_per_sm,
            cluster: 1,
            scheduler: Scheduler::PerTile,
            tile_order: if self.reverse_blocks { TileOrder::LongestFirst } else { TileOrder::Natural },
            packs_gqa: self.pack_gqa,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &[],
            query_box: self.tile_m,
            gathers: false,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm80Fwd {
            tile_m: _,
            tile_n: _,
            num_warps,
            stages,
            q_in_regs,
            blocks_per_sm,
            swizzle,
            ldmatrix,
            exp2,
            fast_math,
            loop_split,
            reverse_blocks,
            pack_gqa,
            exact_div,
            divide_keys,
        } = self;
        vec![
            (true, format!("w{num_warps}")),
            (true, format!("s{stages}")),
            (*q_in_regs, "qr".into()),
            (true, format!("b{blocks_per_sm}")),
            (*swizzle, "swz".into()),
            (*ldmatrix, "ldm".into()),
            (*exp2, "exp2".into()),
            (*fast_math, "fast".into()),
            (*loop_split, "split".into()),
            (*reverse_blocks, "rev".into()),
            (*pack_gqa, "pack".into()),
            (*exact_div, "xdiv".into()),
            (*divide_keys, "divk".into()),
        ]
    }
}

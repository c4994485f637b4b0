//! The SM90 forward of e4m3 tensors: wgmma on 8 bits, V transposed on chip.

use super::error::SpecError;
use super::params::kernel_params;
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM90 forward of e4m3 tensors.
    pub struct Sm90FwdFp8 {
        /// Query rows per CTA: `64 * num_wg`.
        tile_m: u32 = 128,
        /// Keys per step; a multiple of 32 up to 256.
        tile_n: u32 = 128 => multiple(32, 32, 256),
        /// Consumer warpgroups, 1 to 3; one more loads, and transposes V.
        num_wg: u32 = 2 => range(1, 3),
        /// Issue S of the next step before P V of this one (overlap within a warpgroup).
        overlap_wg: bool = false,
        /// The tensor cores add P V of one step at a time, and f32 units add the steps: sums of many keys on
        /// tensor cores lose 6 % of O at 4k keys, 66 % at 128k.
        two_level: bool = true,
        /// Q buffers, 1 or 2: with 2, the next tile's Q is loaded while this one's is in use.
        q_stages: u32 = 1 => range(1, 2),
        /// Buffers of K, and of V transposed, 1 to 4.
        kv_stages: u32 = 2 => range(1, 4),
        /// Buffers of V as it is loaded, 1 or 2.
        v_stages: u32 = 1 => range(1, 2),
        /// Warpgroups take turns at the tensor cores: the softmax of one runs under the products of another.
        ping_pong: bool = false,
        /// How tiles are assigned to CTAs.
        scheduler: Scheduler = Scheduler::PerTile,
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
        exp_poly_of_16: u32 = 0 => range(0, 16),
        /// Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
        /// with all of their heads.
        pack_gqa: bool = false,
    }
}

/// Columns of O whose products of a step are in registers at once beside all of O, where O is wide.
const SLICE: u32 = 64;

/// Keys of a step from which the products of 128 columns come in slices: their scores leave no registers for
/// all.
const SLICED_FROM: u32 = 160;

impl Sm90FwdFp8 {
    /// Columns of O that one product of P and V has: all, or with two levels of sums slices where O, or O and
    /// the scores, take many registers.
    pub const fn slice(&self, head_dim_v: u32) -> u32 {
        let is_wide =
            head_dim_v > 128 || (head_dim_v == 128 && !self.overlap_wg && self.tile_n >= SLICED_FROM);
        match self.two_level && is_wide {
            true if head_dim_v.is_multiple_of(SLICE) => SLICE,
            true => 32,
            false => head_dim_v,
        }
    }

    /// Checks the fields against the kernel's rules.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        if self.tile_m != 64 * self.num_wg {
            let need = format!("64 * num_wg = {}", 64 * self.num_wg);
            return Err(SpecError::BadValue { field: "tile_m", value: self.tile_m, need });
        }
        // The steps of wgmma on 8 bits, and pairs of matrices of the transposition.
        for (field, value) in [("head_dim", head_dim), ("head_dim_v", head_dim_v)] {
            if !value.is_multiple_of(32) {
                return Err(SpecError::BadValue { field, value, need: "a multiple of 32".into() });
            }
        }
        if self.ping_pong && self.num_wg < 2 {
            return Err(SpecError::Conflict(
                "ping_pong needs num_wg of 2 or 3: a single warpgroup has no partner".into(),
            ));
        }
        if self.overlap_wg && self.slice(head_dim_v) != head_dim_v {
            return Err(SpecError::Conflict(format!(
                "overlap_wg and two_level at head_dim_v = {head_dim_v}: no registers hold the products of a \
                 step beside the scores of the next; use overlap_wg = false"
            )));
        }
        Ok(())
    }

    /// The kernel converts no codes: it multiplies them.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        Err(SpecError::KvDtype { dtype, kernel: self.traits().name })
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm90_fwd_fp8",
            pass: Pass::Forward,
            family: Family::Sm90,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.num_wg.saturating_add(1).saturating_mul(128),
            blocks_per_sm: 1,
            cluster: 1,
            scheduler: self.scheduler,
            tile_order: self.tile_order,
            packs_gqa: self.pack_gqa,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &["q", "k", "v"],
            query_box: self.tile_m,
            gathers: false,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm90FwdFp8 {
            tile_m: _,
            tile_n: _,
            num_wg: _,
            overlap_wg,
            two_level,
            q_stages,
            kv_stages,
            v_stages,
            ping_pong,
            scheduler,
            tile_order,
            exp_poly_of_16,
            pack_gqa,
        } = self;
        vec![
            (*overlap_wg, "ovl".into()),
            (!*two_level, "one".into()),
            (*q_stages > 1, format!("q{q_stages}")),
            (true, format!("s{kv_stages}")),
            (*v_stages > 1, format!("v{v_stages}")),
            (*ping_pong, "pp".into()),
            (*scheduler != Scheduler::PerTile, format!("{scheduler:?}").to_lowercase()),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*exp_poly_of_16 > 0, format!("poly{exp_poly_of_16}")),
            (*pack_gqa, "pack".into()),
        ]
    }
}

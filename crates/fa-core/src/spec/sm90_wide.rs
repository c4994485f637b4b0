//! The SM90 forward for wide heads: two warpgroups share the columns of O, and V may be K's first columns.

use super::error::SpecError;
use super::params::kernel_params;
use super::values::{MAX_HEAD_DIM, MaskKind, Scheduler, TileOrder, Traits};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM90 forward for wide heads, of which two warpgroups share the columns of O.
    pub struct Sm90Wide {
        /// Query rows per CTA: the 64 of a wgmma.
        tile_m: u32 = 64 => range(64, 64),
        /// Keys per step: 32 or 64.
        tile_n: u32 = 64 => multiple(32, 32, 64),
        /// V is the first columns of K's tile, of which the tensor K has the others.
        latent: bool = false,
        /// Issue S of the next step before P V of this one, under which the softmax then runs.
        overlap: bool = false,
        /// K and V buffers in flight, 1 to 4.
        kv_stages: u32 = 1 => range(1, 4),
        /// How tiles are assigned to CTAs: `PerTile` or `Static`.
        scheduler: Scheduler = Scheduler::PerTile,
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
        exp_poly_of_16: u32 = 0 => range(0, 16),
        /// Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
        /// rescales whenever it grew. Beyond 15, P would leave f16.
        rescale_threshold: u32 = 8 => range(0, 15),
        /// Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
        /// with all of their heads.
        pack_gqa: bool = false,
        /// Equal parts of the query heads of a K/V head, each with tiles of its own: where a group has more
        /// heads than a tile has rows.
        head_parts: u32 = 1 => range(1, 1024),
        /// Rows of paged keys are copied by the producer's threads, for pages of any size, instead of by TMA
        /// with a box for each part of a page.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gather: bool = false,
    }
}

/// The widest V: two warpgroups hold 256 columns of O each.
const MAX_HEAD_DIM_V: u32 = 512;

impl Sm90Wide {
    /// Checks the fields against the kernel's rules.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        let bad = |field, value, need: &str| Err(SpecError::BadValue { field, value, need: need.to_owned() });
        if !head_dim.is_multiple_of(64) {
            return bad("head_dim", head_dim, "a multiple of 64: whole panels of Q and K");
        }
        if !head_dim_v.is_multiple_of(128) || head_dim_v > MAX_HEAD_DIM_V {
            return bad("head_dim_v", head_dim_v, "128, 256, 384 or 512: whole panels for each warpgroup");
        }
        if self.latent && (head_dim < head_dim_v || head_dim_v < 256) {
            return Err(SpecError::Conflict(format!(
                "latent needs head_dim of head_dim_v or more, and head_dim_v of 256 or more; here they are \
                 {head_dim} and {head_dim_v}"
            )));
        }
        if self.latent && self.overlap && self.kv_stages < 2 {
            return Err(SpecError::Conflict(
                "latent and overlap need kv_stages of 2 or more: S of a step and P V of the one before read \
                 two tiles of latents"
                    .into(),
            ));
        }
        if self.gather && self.tile_n < 64 {
            return Err(SpecError::Conflict(format!(
                "gather needs tile_n = 64, a row of half a tile for each lane of a warp; here it is {}",
                self.tile_n
            )));
        }
        if self.scheduler == Scheduler::Dynamic {
            return Err(SpecError::Conflict(
                "scheduler = Dynamic: sm90_wide draws no tiles from a counter; use PerTile or Static".into(),
            ));
        }
        if self.head_parts > 1 && !self.pack_gqa {
            return Err(SpecError::Conflict(format!(
                "head_parts = {} needs pack_gqa: without it a tile has one query head",
                self.head_parts
            )));
        }
        Ok(())
    }

    /// Checks what conversion of codes asks for: threads copy them.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        if self.gather {
            return Err(SpecError::Conflict(format!(
                "kv_dtype {dtype}: codes are copied by threads wherever they lie; use gather = false"
            )));
        }
        Ok(())
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm90_wide",
            pass: Pass::Forward,
            family: Family::Sm90,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: MAX_HEAD_DIM,
            threads: 384,
            blocks_per_sm: 1,
            cluster: 1,
            scheduler: self.scheduler,
            tile_order: self.tile_order,
            packs_gqa: self.pack_gqa,
            head_parts: self.head_parts,
            is_latent: self.latent,
            tensor_maps: &["q", "k", "v"],
            query_box: self.tile_m,
            gathers: self.gather,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm90Wide {
            tile_m: _,
            tile_n: _,
            latent,
            overlap,
            kv_stages,
            scheduler,
            tile_order,
            exp_poly_of_16,
            rescale_threshold,
            pack_gqa,
            head_parts,
            gather,
        } = self;
        vec![
            (*latent, "latent".into()),
            (*overlap, "ovl".into()),
            (true, format!("s{kv_stages}")),
            (*scheduler != Scheduler::PerTile, format!("{scheduler:?}").to_lowercase()),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*exp_poly_of_16 > 0, format!("poly{exp_poly_of_16}")),
            (*rescale_threshold > 0, format!("rt{rescale_threshold}")),
            (*pack_gqa, "pack".into()),
            (*head_parts > 1, format!("parts{head_parts}")),
            (*gather, "gather".into()),
        ]
    }
}

//! The SM90 forward: wgmma and TMA, with warpgroups that load or compute.

use super::error::SpecError;
use super::pages::operand_panel;
use super::params::kernel_params;
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM90 forward.
    pub struct Sm90Fwd {
        /// Query rows per CTA: `64 * num_wg`.
        tile_m: u32 = 128,
        /// Keys per step; a multiple of 16 up to 256.
        tile_n: u32 = 128 => multiple(16, 16, 256),
        /// Consumer warpgroups, 1 to 3; one more is the producer.
        num_wg: u32 = 2 => range(1, 3),
        /// P as a register operand of P V instead of through shared memory.
        pv_is_rs: bool = true,
        /// Issue S of the next step before P V of this one (overlap within a warpgroup).
        overlap_wg: bool = true,
        /// Q buffers, 1 or 2: with 2, the next tile's Q is loaded while this one's is in use.
        q_stages: u32 = 1 => range(1, 2),
        /// K and V buffers in flight, 1 to 4.
        kv_stages: u32 = 2 => range(1, 4),
        /// Warpgroups take turns at the tensor cores: the softmax of one runs under the products of another.
        ping_pong: bool = false,
        /// How tiles are assigned to CTAs.
        scheduler: Scheduler = Scheduler::PerTile,
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// CTAs per cluster, which share K/V loads by multicast: 1 or 2 (2 under the full mask only, where
        /// neighbours load the same keys).
        cluster_m: u32 = 1 => range(1, 2),
        /// How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
        exp_poly_of_16: u32 = 0 => range(0, 16),
        /// Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
        /// rescales whenever it grew. With `pv_is_rs` and `overlap_wg` no maximum is taken until the sum of a
        /// tile's probabilities P shows that it grew that far. Beyond 15, P would leave f16.
        rescale_threshold: u32 = 0 => range(0, 15),
        /// Fold the query heads of a K/V head into the rows of a tile, which takes as many queries as fit
        /// with all of their heads.
        pack_gqa: bool = false,
        /// Rows of paged keys are copied by the producer's threads, for pages of any size, instead of by TMA
        /// with a box for each part of a page. Requires equal panels of K and V.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gather: bool = false,
        /// CTAs that share an SM and its registers, 1 to 4: with more, one loads and stores while others
        /// compute.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        blocks_per_sm: u32 = 1 => range(1, 4),
    }
}

/// Registers that a product takes beside its accumulators, as NVRTC 13.0 counts them: 128 columns compile for
/// 94 and not for 80.
const PRODUCT_REGISTERS: u32 = 32;

const fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)]
const fn is_one(count: &u32) -> bool {
    *count == 1
}

impl Sm90Fwd {
    /// Checks the fields against the kernel's rules.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), mask: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        if self.tile_m != 64 * self.num_wg {
            let need = format!("64 * num_wg = {}", 64 * self.num_wg);
            return Err(SpecError::BadValue { field: "tile_m", value: self.tile_m, need });
        }
        if self.cluster_m > 1 && mask != MaskKind::Full {
            return Err(SpecError::Conflict(
                "cluster_m = 2 needs mask full: the CTAs of a cluster load the same keys; use cluster_m = 1"
                    .into(),
            ));
        }
        if self.cluster_m > 1 && self.scheduler == Scheduler::Dynamic {
            return Err(SpecError::Conflict(
                "cluster_m = 2 needs scheduler PerTile or Static: the CTAs of a cluster take neighbouring \
                 tiles"
                    .into(),
            ));
        }
        if self.ping_pong && self.num_wg < 2 {
            return Err(SpecError::Conflict(
                "ping_pong needs num_wg of 2 or 3: a single warpgroup has no partner".into(),
            ));
        }
        if self.blocks_per_sm > 1 && (self.cluster_m > 1 || self.gather || self.num_wg == 3) {
            return Err(SpecError::Conflict(format!(
                "blocks_per_sm = {} needs cluster_m = 1, gather = false and num_wg of 1 or 2: others have \
                 an SM to themselves; use blocks_per_sm = 1",
                self.blocks_per_sm
            )));
        }
        // Of a thread at the launch. A product's operands need as many, whatever setmaxnreg gives later.
        let registers = 65_536 / (128 * (self.num_wg + 1) * self.blocks_per_sm) / 8 * 8;
        let widest = self.tile_n.max(head_dim_v);
        if self.blocks_per_sm > 1 && widest / 2 + PRODUCT_REGISTERS > registers {
            return Err(SpecError::Conflict(format!(
                "blocks_per_sm = {} leaves a thread {registers} registers, too few for a product of {widest} \
                 columns (tile_n or head_dim_v): use at most {}, or fewer blocks",
                self.blocks_per_sm,
                2 * registers.saturating_sub(PRODUCT_REGISTERS)
            )));
        }
        // Each lane looks up the pages of rows 32 apart, in a warp's half of a tile (fwd_gather.cuh).
        if self.gather && self.tile_n < 64 {
            return Err(SpecError::Conflict(format!(
                "gather needs tile_n of 64 or more, a row of half a tile for each lane of a warp; here it is \
                 {}: use a wider tile, or gather = false",
                self.tile_n
            )));
        }
        if self.gather && operand_panel(head_dim) != operand_panel(head_dim_v) {
            return Err(SpecError::Conflict(format!(
                "gather needs panels of equal width: K has {} columns at head_dim = {head_dim}, V {} at \
                 head_dim_v = {head_dim_v}; use gather = false",
                operand_panel(head_dim),
                operand_panel(head_dim_v)
            )));
        }
        Ok(())
    }

    /// Checks what conversion of codes asks for: two warps convert half of a tile's rows each.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        let refuse = |why: &str| Err(SpecError::Conflict(format!("kv_dtype {dtype}: {why}")));
        if self.blocks_per_sm > 1 {
            return refuse("the conversion needs all registers of an SM; use blocks_per_sm = 1");
        }
        if self.gather {
            return refuse("codes are copied by threads wherever they lie; use gather = false");
        }
        if self.cluster_m > 1 {
            return refuse("each CTA converts its own codes; use cluster_m = 1");
        }
        if !self.tile_n.is_multiple_of(32) || self.tile_n < 64 {
            let need = "a multiple of 32 from 64 with K and V in codes, half of it for each of two warps";
            return Err(SpecError::BadValue { field: "tile_n", value: self.tile_n, need: need.to_owned() });
        }
        Ok(())
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm90_fwd",
            pass: Pass::Forward,
            family: Family::Sm90,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.num_wg.saturating_add(1).saturating_mul(128),
            blocks_per_sm: self.blocks_per_sm,
            cluster: self.cluster_m,
            scheduler: self.scheduler,
            tile_order: self.tile_order,
            packs_gqa: self.pack_gqa,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &["q", "k", "v"],
            query_box: self.tile_m,
            gathers: self.gather,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm90Fwd {
            tile_m: _,
            tile_n: _,
            num_wg: _,
            pv_is_rs,
            overlap_wg,
            q_stages,
            kv_stages,
            ping_pong,
            scheduler,
            tile_order,
            cluster_m,
            exp_poly_of_16,
            rescale_threshold,
            pack_gqa,
            gather,
            blocks_per_sm,
        } = self;
        vec![
            (true, if *pv_is_rs { "rs".into() } else { "ss".into() }),
            (*overlap_wg, "ovl".into()),
            (*q_stages > 1, format!("q{q_stages}")),
            (true, format!("s{kv_stages}")),
            (*ping_pong, "pp".into()),
            (*scheduler != Scheduler::PerTile, format!("{scheduler:?}").to_lowercase()),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*cluster_m > 1, format!("c{cluster_m}")),
            (*exp_poly_of_16 > 0, format!("poly{exp_poly_of_16}")),
            (*rescale_threshold > 0, format!("rt{rescale_threshold}")),
            (*pack_gqa, "pack".into()),
            (*gather, "gather".into()),
            (*blocks_per_sm > 1, format!("b{blocks_per_sm}")),
        ]
    }
}

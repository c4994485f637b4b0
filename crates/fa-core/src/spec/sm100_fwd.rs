//! The SM100 forward: tcgen05 and TMA, scores and outputs in tensor memory. Assembled and emulated, never
//! run on a GPU.

use super::error::SpecError;
use super::params::kernel_params;
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM100 forward, which was assembled and emulated, and never run on a GPU.
    pub struct Sm100Fwd {
        /// Query rows of a CTA: `128 * q_tiles`.
        tile_m: u32 = 256,
        /// Keys per step; a multiple of 32 up to 128.
        tile_n: u32 = 128 => multiple(32, 32, 128),
        /// Tiles of 128 queries that share K and V, 1 or 2: with 2, the softmax of one runs under the
        /// products of the other.
        q_tiles: u32 = 2 => range(1, 2),
        /// Slots of the ring that tiles of K and V use in turn, 2 to 12.
        kv_stages: u32 = 3 => range(2, 12),
        /// How tiles are assigned to CTAs: `PerTile` or `Static`.
        scheduler: Scheduler = Scheduler::PerTile,
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// How many of every 16 exponentials are polynomials on the FMA units: 0 to 16.
        exp_poly_of_16: u32 = 0 => range(0, 16),
        /// Rescale O only when the running maximum grew by more than this many powers of 2, 0 to 15; 0
        /// rescales whenever it grew. Beyond 15, P would leave f16.
        rescale_threshold: u32 = 8 => range(0, 15),
    }
}

/// Columns of tensor memory that a CTA has.
const TENSOR_COLUMNS: u32 = 512;

impl Sm100Fwd {
    /// Columns of tensor memory that the kernel uses: S of each tile of queries, with P in its upper half,
    /// then O of each.
    pub const fn columns(&self, head_dim_v: u32) -> u32 {
        self.q_tiles.saturating_mul(self.tile_n.saturating_add(head_dim_v))
    }

    /// Checks the fields against the kernel's rules.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        if self.tile_m != 128 * self.q_tiles {
            let need = format!("128 * q_tiles = {}", 128 * self.q_tiles);
            return Err(SpecError::BadValue { field: "tile_m", value: self.tile_m, need });
        }
        for (field, value) in [("head_dim", head_dim), ("head_dim_v", head_dim_v)] {
            if !value.is_multiple_of(32) {
                return Err(SpecError::BadValue { field, value, need: "a multiple of 32".into() });
            }
        }
        if self.scheduler == Scheduler::Dynamic {
            return Err(SpecError::Conflict(
                "scheduler = Dynamic: sm100_fwd draws no tiles from a counter; use PerTile or Static".into(),
            ));
        }
        let columns = self.columns(head_dim_v);
        if columns > TENSOR_COLUMNS {
            return Err(SpecError::Conflict(format!(
                "q_tiles = {} and tile_n = {} take {columns} columns of tensor memory at head_dim_v = \
                 {head_dim_v}, of {TENSOR_COLUMNS}; use fewer",
                self.q_tiles, self.tile_n
            )));
        }
        Ok(())
    }

    /// K and V in codes are for other kernels.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        Err(SpecError::KvDtype { dtype, kernel: self.traits().name })
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm100_fwd",
            pass: Pass::Forward,
            family: Family::Sm100,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.q_tiles.saturating_add(2).saturating_mul(128),
            blocks_per_sm: 1,
            cluster: 1,
            scheduler: self.scheduler,
            tile_order: self.tile_order,
            packs_gqa: false,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &["q", "k", "v"],
            query_box: self.tile_m / if self.q_tiles > 0 { self.q_tiles } else { 1 },
            gathers: false,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm100Fwd {
            tile_m: _,
            tile_n: _,
            q_tiles: _,
            kv_stages,
            scheduler,
            tile_order,
            exp_poly_of_16,
            rescale_threshold,
        } = self;
        vec![
            (true, format!("s{kv_stages}")),
            (*scheduler != Scheduler::PerTile, format!("{scheduler:?}").to_lowercase()),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*exp_poly_of_16 > 0, format!("poly{exp_poly_of_16}")),
            (*rescale_threshold > 0, format!("rt{rescale_threshold}")),
        ]
    }
}

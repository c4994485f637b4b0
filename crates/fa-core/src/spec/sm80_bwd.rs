//! The SM80-class backward: mma.sync and cp.async.

use super::error::SpecError;
use super::params::kernel_params;
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM80-class backward. A CTA owns `tile_n` keys and loops over the tiles of `tile_m`
    /// queries that see them.
    ///
    /// Each of the five products of a step (see `Sm90Bwd`) is divided among the warps into whole 16 x 16
    /// blocks.
    pub struct Sm80Bwd {
        /// Queries per step; a multiple of 16 from 32 to 128.
        tile_m: u32 = 64 => multiple(16, 32, 128),
        /// Keys per CTA; a multiple of 16 up to 128.
        tile_n: u32 = 64 => multiple(16, 16, 128),
        /// Warps, an even number from 2 to 8: half are P warps (P, dV), half are dS warps (dS, dK).
        num_warps: u32 = 4 => multiple(2, 2, 8),
        /// Q buffers, 2 or 3: P is one step ahead. With 2, the next Q arrives during the step that needs it.
        q_stages: u32 = 2 => range(2, 3),
        /// dO buffers, 1 or 2.
        do_stages: u32 = 1 => range(1, 2),
        /// Warps of a group along `tile_m` in S and dP; divides `num_warps / 2`.
        atom_layout_m_sdp: u32 = 2,
        /// Warps of a group along `tile_n` in dK and dV; divides `num_warps / 2`.
        atom_layout_n_dkv: u32 = 2,
        /// Warps of a group along `tile_m` in dQ; divides `num_warps / 2`.
        atom_layout_m_dq: u32 = 2,
        /// Columns of dQ that the P warps compute, fewer than the head dim; the dS warps compute the others.
        dq_first: u32 = 32,
        /// Resident CTAs per SM that the register budget is set for, 1 to 4.
        blocks_per_sm: u32 = 1 => range(1, 4),
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
        deterministic: bool = false,
    }
}

impl Sm80Bwd {
    /// Checks the fields against the kernel's rules, for the tile extents of the head dims.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        if self.dq_first >= head_dim {
            let need = format!("less than the head dim, {head_dim}");
            return Err(SpecError::BadValue { field: "dq_first", value: self.dq_first, need });
        }
        let warps = self.num_warps / 2;
        let products = [
            ("S and dP", self.tile_m, self.tile_n, "atom_layout_m_sdp", self.atom_layout_m_sdp),
            ("dK", self.tile_n, head_dim, "atom_layout_n_dkv", self.atom_layout_n_dkv),
            ("dV", self.tile_n, head_dim_v, "atom_layout_n_dkv", self.atom_layout_n_dkv),
            ("dQ", self.tile_m, head_dim - self.dq_first, "atom_layout_m_dq", self.atom_layout_m_dq),
            ("dQ's first columns", self.tile_m, self.dq_first, "atom_layout_m_dq", self.atom_layout_m_dq),
        ];
        for (name, rows, columns, field, atoms) in products {
            if atoms == 0 || !warps.is_multiple_of(atoms) {
                let need = format!("a divisor of num_warps / 2 = {warps}");
                return Err(SpecError::BadValue { field, value: atoms, need });
            }
            let across = warps / atoms;
            if !rows.is_multiple_of(16 * atoms) || !columns.is_multiple_of(16 * across) {
                return Err(SpecError::Conflict(format!(
                    "{name}: [{rows}, {columns}] cannot be cut into {atoms} x {across} warps: a warp takes \
                     whole blocks of 16"
                )));
            }
        }
        Ok(())
    }

    /// K and V in codes are for other kernels.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        Err(SpecError::KvDtype { dtype, kernel: self.traits().name })
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm80_bwd",
            pass: Pass::Backward { deterministic: self.deterministic },
            family: Family::Sm80,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.num_warps.saturating_mul(32),
            blocks_per_sm: self.blocks_per_sm,
            cluster: 1,
            scheduler: Scheduler::PerTile,
            tile_order: self.tile_order,
            packs_gqa: false,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &[],
            query_box: self.tile_m,
            gathers: false,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm80Bwd {
            tile_m: _,
            tile_n: _,
            num_warps,
            q_stages,
            do_stages,
            atom_layout_m_sdp,
            atom_layout_n_dkv,
            atom_layout_m_dq,
            dq_first,
            blocks_per_sm,
            tile_order,
            deterministic,
        } = self;
        vec![
            (true, format!("w{num_warps}")),
            (true, format!("s{q_stages}{do_stages}")),
            (true, format!("a{atom_layout_m_sdp}{atom_layout_n_dkv}{atom_layout_m_dq}")),
            (true, format!("q{dq_first}")),
            (true, format!("b{blocks_per_sm}")),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*deterministic, "det".into()),
        ]
    }
}

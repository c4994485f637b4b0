//! The SM90 backward: wgmma and TMA, with warpgroups that load or compute.

use super::error::SpecError;
use super::pages::operand_columns;
use super::params::kernel_params;
use super::values::{MaskKind, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM};
use crate::{Dtype, Family, Pass};

kernel_params! {
    /// Parameters of the SM90 backward. A CTA owns `tile_n` keys and loops over the tiles of `tile_m` queries
    /// that see them.
    ///
    /// A step has five products: S and dP (`[tile_m, tile_n]`), dK and dV (`[tile_n, head dim]`) and dQ
    /// (`[tile_m, head dim]`). Each can be computed transposed (swap_ab), and its rows or its columns are
    /// divided among the warpgroups (atom layout).
    pub struct Sm90Bwd {
        /// Queries per step; a multiple of 16 from 32 to 128.
        tile_m: u32 = 128 => multiple(16, 32, 128),
        /// Keys per CTA; a multiple of 16 up to 128.
        tile_n: u32 = 128 => multiple(16, 16, 128),
        /// Consumer warpgroups, 2 or 3; one more is the producer, which also adds dQ to device memory.
        num_wg: u32 = 2 => range(2, 3),
        /// Q buffers, 1 or 2.
        q_stages: u32 = 1 => range(1, 2),
        /// dO buffers, 1 or 2.
        do_stages: u32 = 1 => range(1, 2),
        /// Buffers of P and dS, 1 or 2; with 2 a step has one barrier over the warpgroups instead of two.
        pds_stages: u32 = 1 => range(1, 2),
        /// Compute S and dP transposed.
        sdp_swap_ab: bool = false,
        /// Compute dK and dV transposed.
        dkv_swap_ab: bool = false,
        /// Compute dQ transposed.
        dq_swap_ab: bool = false,
        /// Warpgroups along `tile_m` in S and dP: 1 or `num_wg`.
        atom_layout_m_sdp: u32 = 2,
        /// Warpgroups along `tile_n` in dK and dV: 1 or `num_wg`.
        atom_layout_n_dkv: u32 = 2,
        /// Warpgroups along `tile_m` in dQ: 1 or `num_wg`.
        atom_layout_m_dq: u32 = 2,
        /// P and dS as register operands of dV and dK instead of through shared memory.
        mma_dkv_is_rs: bool = false,
        /// dQ is added to device memory from shared memory by TMA; otherwise by vector atomics from
        /// registers.
        dq_via_smem: bool = true,
        /// Parts in which dQ is computed, one after the other in the same registers: 1 or 2.
        dq_slices: u32 = 1 => range(1, 2),
        /// The order of tiles.
        tile_order: TileOrder = TileOrder::Natural,
        /// Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
        deterministic: bool = false,
        /// One CTA per SM, which draws tiles from a counter: the next tile's loads run under the end of the
        /// current one, whose dK and dV are stored through the buffer of dS.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        persistent: bool = false,
        /// A tile has all keys of its sequence, of equal lengths: dQ goes from registers to its tensor in 16
        /// bits, without accumulators and without a launch that converts them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        whole_keys: bool = false,
    }
}

/// A warpgroup's share of a product: rows in multiples of the 64 of wgmma, columns in multiples of 8.
struct Share {
    rows: u32,
    columns: u32,
}

impl Sm90Bwd {
    /// Checks the fields against the kernel's rules, for the tile extents of the head dims.
    pub(super) fn check(&self, (head_dim, head_dim_v): (u32, u32), _: MaskKind) -> Result<(), SpecError> {
        self.check_numbers()?;
        for (field, atoms) in [
            ("atom_layout_m_sdp", self.atom_layout_m_sdp),
            ("atom_layout_n_dkv", self.atom_layout_n_dkv),
            ("atom_layout_m_dq", self.atom_layout_m_dq),
        ] {
            if atoms != 1 && atoms != self.num_wg {
                let need = format!("1 or num_wg = {}", self.num_wg);
                return Err(SpecError::BadValue { field, value: atoms, need });
            }
        }
        let products = [
            ("S and dP", self.tile_m, self.tile_n, self.atom_layout_m_sdp, self.sdp_swap_ab),
            ("dK", self.tile_n, head_dim, self.atom_layout_n_dkv, self.dkv_swap_ab),
            ("dV", self.tile_n, head_dim_v, self.atom_layout_n_dkv, self.dkv_swap_ab),
            ("dQ", self.tile_m, head_dim, self.atom_layout_m_dq, self.dq_swap_ab),
        ];
        for (name, m, n, atoms, swap) in products {
            let share = self.share(m, n, atoms, swap);
            if share.is_none_or(|share| share.rows % 64 != 0 || share.columns % 8 != 0) {
                let swapped = if swap { "transposed " } else { "" };
                return Err(SpecError::Conflict(format!(
                    "{name}: {swapped}[{m}, {n}] cannot be divided among {} warpgroups with atom layout \
                     {atoms}: each takes rows in multiples of 64 and columns in multiples of 8",
                    self.num_wg
                )));
            }
        }
        // What is divided are columns of Q, dO and K, whose panels have 16 columns at least.
        for (name, m, n, atoms, swap) in &products[1..] {
            let share = self.share(*m, *n, *atoms, *swap).filter(|_| !swap);
            if let Some(Share { columns, .. }) = share.filter(|share| !share.columns.is_multiple_of(16)) {
                return Err(SpecError::Conflict(format!(
                    "{name}: each of {} warpgroups takes {columns} of {n} columns, which have to be a \
                     multiple of 16; divide its rows (atom layout {}) or use a wider head dim",
                    self.num_wg, self.num_wg
                )));
            }
        }
        let dq = self.share(self.tile_m, head_dim, self.atom_layout_m_dq, self.dq_swap_ab);
        if dq.is_none_or(|share| !share.rows.is_multiple_of(64 * self.dq_slices)) {
            return Err(SpecError::Conflict(format!(
                "dq_slices = {}: a warpgroup's share of dQ has fewer blocks of 64 rows",
                self.dq_slices
            )));
        }
        let own_rows = self.sdp_swap_ab
            && !self.dkv_swap_ab
            && self.atom_layout_m_sdp == 1
            && self.atom_layout_n_dkv == self.num_wg;
        if self.mma_dkv_is_rs && !own_rows {
            return Err(SpecError::Conflict(
                "mma_dkv_is_rs needs sdp_swap_ab without dkv_swap_ab, atom_layout_m_sdp = 1 and \
                 atom_layout_n_dkv = num_wg: a warpgroup must own the rows of dK and dV whose P \
                 and dS it computes"
                    .into(),
            ));
        }
        if self.whole_keys && (self.dq_via_smem || self.dq_swap_ab || self.deterministic) {
            return Err(SpecError::Conflict(
                "whole_keys needs dq_via_smem, dq_swap_ab and deterministic = false: rows of dQ leave from \
                 registers, and no tile waits for another"
                    .into(),
            ));
        }
        if self.persistent && self.num_wg != 2 {
            return Err(SpecError::Conflict(format!(
                "persistent needs num_wg = 2: beside num_wg = {} no warp of the producers is left to draw \
                 tiles",
                self.num_wg
            )));
        }
        let (rows, dim) = (self.pds_stages * self.tile_m, operand_columns(head_dim.max(head_dim_v)));
        if self.persistent && rows < dim {
            return Err(SpecError::Conflict(format!(
                "persistent needs room in dS for dK and for dV, one after the other: pds_stages * tile_m = \
                 {rows} is below the head dim {dim}; use larger ones or persistent = false"
            )));
        }
        Ok(())
    }

    /// What a warpgroup gets of an `[m, n]` product with `atoms` warpgroups along m; `None` when that is not
    /// whole.
    fn share(&self, m: u32, n: u32, atoms: u32, swap: bool) -> Option<Share> {
        let (rows, columns) = if swap { (n, m) } else { (m, n) };
        let along_rows = if swap { self.num_wg / atoms } else { atoms };
        let along_columns = self.num_wg / along_rows;
        (rows.is_multiple_of(along_rows) && columns.is_multiple_of(along_columns))
            .then(|| Share { rows: rows / along_rows, columns: columns / along_columns })
    }

    /// K and V in codes are for other kernels.
    pub(super) fn check_codes(&self, dtype: Dtype) -> Result<(), SpecError> {
        Err(SpecError::KvDtype { dtype, kernel: self.traits().name })
    }

    pub(super) const fn traits(&self) -> Traits {
        Traits {
            name: "sm90_bwd",
            pass: Pass::Backward { deterministic: self.deterministic },
            family: Family::Sm90,
            tile: (self.tile_m, self.tile_n),
            max_head_dim: WHOLE_ROW_HEAD_DIM,
            threads: self.num_wg.saturating_add(1).saturating_mul(128),
            blocks_per_sm: 1,
            cluster: 1,
            scheduler: if self.persistent { Scheduler::Dynamic } else { Scheduler::PerTile },
            tile_order: self.tile_order,
            packs_gqa: false,
            head_parts: 1,
            is_latent: false,
            tensor_maps: &["q", "k", "v", "do"],
            query_box: self.tile_m,
            gathers: false,
        }
    }

    /// What a spec's name says of the parameters, with whether it says it.
    pub(super) fn name_parts(&self) -> Vec<(bool, String)> {
        let Sm90Bwd {
            tile_m: _,
            tile_n: _,
            num_wg,
            q_stages,
            do_stages,
            pds_stages,
            sdp_swap_ab,
            dkv_swap_ab,
            dq_swap_ab,
            atom_layout_m_sdp,
            atom_layout_n_dkv,
            atom_layout_m_dq,
            mma_dkv_is_rs,
            dq_via_smem,
            dq_slices,
            tile_order,
            deterministic,
            persistent,
            whole_keys,
        } = self;
        let swaps = [(sdp_swap_ab, "S"), (dkv_swap_ab, "K"), (dq_swap_ab, "Q")];
        let swaps: String = swaps.into_iter().filter(|(on, _)| **on).map(|(_, name)| name).collect();
        vec![
            (true, format!("wg{num_wg}")),
            (true, format!("s{q_stages}{do_stages}{pds_stages}")),
            (!swaps.is_empty(), format!("swap{swaps}")),
            (true, format!("a{atom_layout_m_sdp}{atom_layout_n_dkv}{atom_layout_m_dq}")),
            (*mma_dkv_is_rs, "rs".into()),
            (!dq_via_smem, "red".into()),
            (*dq_slices > 1, format!("sl{dq_slices}")),
            (*tile_order == TileOrder::LongestFirst, "lpt".into()),
            (*deterministic, "det".into()),
            (*persistent, "pt".into()),
            (*whole_keys, "whole".into()),
        ]
    }
}

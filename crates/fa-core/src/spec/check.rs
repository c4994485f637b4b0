//! The rules of each kernel: what its fields may be.

use super::{MAX_HEAD_DIM, Scheduler, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, SpecError};

impl Sm80Fwd {
    /// Checks the fields against the kernel's rules.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn check(&self) -> Result<(), SpecError> {
        range("num_warps", self.num_warps, 1, 16)?;
        multiple("tile_m", self.tile_m, 16 * self.num_warps, 256)?;
        multiple("tile_n", self.tile_n, 16, 256)?;
        range("stages", self.stages, 1, 4)?;
        range("blocks_per_sm", self.blocks_per_sm, 1, 8)
    }
}

impl Sm90Fwd {
    /// Checks the fields against the kernel's rules.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn check(&self) -> Result<(), SpecError> {
        range("num_wg", self.num_wg, 1, 3)?;
        if self.tile_m != 64 * self.num_wg {
            let need = format!("64 * num_wg = {}", 64 * self.num_wg);
            return Err(SpecError::BadValue { field: "tile_m", value: self.tile_m, need });
        }
        multiple("tile_n", self.tile_n, 16, 256)?;
        range("q_stages", self.q_stages, 1, 2)?;
        range("kv_stages", self.kv_stages, 1, 4)?;
        range("cluster_m", self.cluster_m, 1, 2)?;
        range("exp_poly_of_16", self.exp_poly_of_16, 0, 16)?;
        range("rescale_threshold", self.rescale_threshold, 0, 15)?;
        if self.cluster_m > 1 && self.scheduler == Scheduler::Dynamic {
            return Err(SpecError::Conflict(
                "cluster_m = 2 needs scheduler PerTile or Static: blocks of a cluster take neighbouring tiles".into(),
            ));
        }
        if self.ping_pong && self.num_wg < 2 {
            return Err(SpecError::Conflict(
                "ping_pong needs num_wg of 2 or 3: one group has no partner".into(),
            ));
        }
        Ok(())
    }
}

/// A warp group's share of a product: rows in multiples of the 64 of wgmma, columns in multiples of 8.
struct Share {
    rows: u32,
    columns: u32,
}

impl Sm90Bwd {
    /// Checks the fields against the kernel's rules, for the tile extents of the head dims.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn check(&self, head_dim: u32, head_dim_v: u32) -> Result<(), SpecError> {
        multiple("tile_m", self.tile_m, 16, 128)?;
        multiple("tile_n", self.tile_n, 16, 128)?;
        multiple("head_dim", head_dim, 32, MAX_HEAD_DIM)?;
        multiple("head_dim_v", head_dim_v, 32, MAX_HEAD_DIM)?;
        range("num_wg", self.num_wg, 2, 3)?;
        range("q_stages", self.q_stages, 1, 2)?;
        range("do_stages", self.do_stages, 1, 2)?;
        range("pds_stages", self.pds_stages, 1, 2)?;
        range("dq_slices", self.dq_slices, 1, 2)?;
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
            self.share(m, n, atoms, swap).filter(|share| share.rows % 64 == 0 && share.columns % 8 == 0).ok_or_else(
                || {
                    let swapped = if swap { "transposed " } else { "" };
                    SpecError::Conflict(format!(
                        "{name}: {swapped}[{m}, {n}] cannot be shared out to {} warp groups with atom layout {atoms}: a group \
                         takes rows in multiples of 64 and columns in multiples of 8",
                        self.num_wg
                    ))
                },
            )?;
        }
        let dq = self.share(self.tile_m, head_dim, self.atom_layout_m_dq, self.dq_swap_ab);
        if dq.is_none_or(|share| !share.rows.is_multiple_of(64 * self.dq_slices)) {
            return Err(SpecError::Conflict(format!(
                "dq_slices = {}: a warp group's share of dQ has not that many blocks of 64 rows",
                self.dq_slices
            )));
        }
        let own_rows = self.sdp_swap_ab
            && !self.dkv_swap_ab
            && self.atom_layout_m_sdp == 1
            && self.atom_layout_n_dkv == self.num_wg;
        if self.mma_dkv_is_rs && !own_rows {
            return Err(SpecError::Conflict(
                "mma_dkv_is_rs needs sdp_swap_ab without dkv_swap_ab, atom_layout_m_sdp = 1 and atom_layout_n_dkv = num_wg: \
                 a warp group must own the rows of dK and dV whose P and dS it computes"
                    .into(),
            ));
        }
        Ok(())
    }

    /// What a warp group gets of an `[m, n]` product with `atoms` groups along m; `None` when that is not whole.
    fn share(&self, m: u32, n: u32, atoms: u32, swap: bool) -> Option<Share> {
        let (rows, columns) = if swap { (n, m) } else { (m, n) };
        let along_rows = if swap { self.num_wg / atoms } else { atoms };
        let along_columns = self.num_wg / along_rows;
        (rows.is_multiple_of(along_rows) && columns.is_multiple_of(along_columns))
            .then(|| Share { rows: rows / along_rows, columns: columns / along_columns })
    }
}

impl Sm80Bwd {
    /// Checks the fields against the kernel's rules, for the tile extents of the head dims.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn check(&self, head_dim: u32, head_dim_v: u32) -> Result<(), SpecError> {
        multiple("tile_m", self.tile_m, 16, 128)?;
        multiple("tile_n", self.tile_n, 16, 128)?;
        multiple("num_warps", self.num_warps, 2, 8)?;
        range("q_stages", self.q_stages, 2, 3)?;
        range("do_stages", self.do_stages, 1, 2)?;
        range("blocks_per_sm", self.blocks_per_sm, 1, 4)?;
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
                    "{name}: [{rows}, {columns}] cannot be cut into {atoms} x {across} warps: a warp takes whole blocks of 16"
                )));
            }
        }
        Ok(())
    }
}

fn range(field: &'static str, value: u32, min: u32, max: u32) -> Result<(), SpecError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(SpecError::BadValue { field, value, need: format!("{min} to {max}") })
}

pub(super) fn multiple(field: &'static str, value: u32, step: u32, max: u32) -> Result<(), SpecError> {
    if value > 0 && value.is_multiple_of(step) && value <= max {
        return Ok(());
    }
    Err(SpecError::BadValue { field, value, need: format!("a multiple of {step} from {step} to {max}") })
}

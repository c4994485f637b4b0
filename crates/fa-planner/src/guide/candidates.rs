//! Every combination that the guide enumerates, in its order and without judgement.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A forward candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FwdSpec {
    /// Query rows of a CTA: `64 * num_wg`.
    pub tile_m: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// MMA warpgroups.
    pub num_wg: u32,
    /// P as a register operand of P V.
    pub pv_is_rs: bool,
    /// S of the next step is issued before P V of this one.
    pub overlap_wg: bool,
}

/// A backward candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BwdSpec {
    /// Queries per step.
    pub tile_m: u32,
    /// Key rows of a CTA.
    pub tile_n: u32,
    /// MMA warpgroups.
    pub num_wg: u32,
    /// Compute S and dP transposed.
    pub sdp_swap_ab: bool,
    /// Compute dK and dV transposed.
    pub dkv_swap_ab: bool,
    /// Compute dQ transposed.
    pub dq_swap_ab: bool,
    /// Warpgroups along tile_m in S and dP.
    pub atom_layout_m_sdp: u32,
    /// Warpgroups along tile_n in dK and dV.
    pub atom_layout_n_dkv: u32,
    /// Warpgroups along tile_m in dQ.
    pub atom_layout_m_dq: u32,
}

/// MMA warpgroups that the guide has a register budget for.
pub const NUM_WG: [u32; 2] = [2, 3];

/// The guide's forward tile_n: 64 to 192 in steps of 16.
pub const FWD_TILE_N: [u32; 9] = [64, 80, 96, 112, 128, 144, 160, 176, 192];

/// The guide's backward tile_m and tile_n.
pub const BWD_TILES: [u32; 5] = [64, 80, 96, 112, 128];

const BOOLS: [bool; 2] = [false, true];

/// Forward candidates: num_wg, then tile_n, then pv_is_rs and overlap_wg (true first).
pub fn fwd(tile_n: &[u32]) -> Vec<FwdSpec> {
    let mut specs = Vec::with_capacity(NUM_WG.len() * tile_n.len() * 4);
    for num_wg in NUM_WG {
        for &tile_n in tile_n {
            for pv_is_rs in [true, false] {
                for overlap_wg in [true, false] {
                    specs.push(FwdSpec { tile_m: 64 * num_wg, tile_n, num_wg, pv_is_rs, overlap_wg });
                }
            }
        }
    }
    specs
}

/// Backward candidates: num_wg, tile_m, tile_n, the three swaps (false first), then the three atom layouts
/// over the divisors of num_wg; the last named varies fastest.
pub fn bwd(tile_m: &[u32], tile_n: &[u32]) -> Vec<BwdSpec> {
    let mut specs = Vec::with_capacity(NUM_WG.len() * tile_m.len() * tile_n.len() * 64);
    for num_wg in NUM_WG {
        for &tile_m in tile_m {
            for &tile_n in tile_n {
                for sdp_swap_ab in BOOLS {
                    for dkv_swap_ab in BOOLS {
                        for dq_swap_ab in BOOLS {
                            let swaps = BwdSpec {
                                tile_m,
                                tile_n,
                                num_wg,
                                sdp_swap_ab,
                                dkv_swap_ab,
                                dq_swap_ab,
                                atom_layout_m_sdp: 1,
                                atom_layout_n_dkv: 1,
                                atom_layout_m_dq: 1,
                            };
                            push_atom_layouts(swaps, &mut specs);
                        }
                    }
                }
            }
        }
    }
    specs
}

fn push_atom_layouts(spec: BwdSpec, specs: &mut Vec<BwdSpec>) {
    // 2 and 3 are prime: their divisors are 1 and themselves.
    let divisors = [1, spec.num_wg];
    for atom_layout_m_sdp in divisors {
        for atom_layout_n_dkv in divisors {
            for atom_layout_m_dq in divisors {
                specs.push(BwdSpec { atom_layout_m_sdp, atom_layout_n_dkv, atom_layout_m_dq, ..spec });
            }
        }
    }
}

impl BwdSpec {
    /// Whether P and dS stay in registers as the A operand of dV and dK: S and dP transposed put a whole row
    /// of P^T into one warpgroup, which must own the same rows of dV and dK, and these must not be transposed
    /// themselves.
    pub const fn mma_dkv_is_rs(&self) -> bool {
        self.atom_layout_m_sdp == 1
            && self.atom_layout_n_dkv == self.num_wg
            && self.sdp_swap_ab
            && !self.dkv_swap_ab
    }
}

/// As in `128x192, 2 WG, P in registers, overlap`.
impl fmt::Display for FwdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = if self.pv_is_rs { "registers" } else { "SMEM" };
        let overlap = if self.overlap_wg { "" } else { "no " };
        write!(f, "{}x{}, {} WG, P in {p}, {overlap}overlap", self.tile_m, self.tile_n, self.num_wg)
    }
}

/// As in `80x128, 2 WG, swap SdP+dQ, atoms 1/2/1` (atom layouts SdP/dKV/dQ).
impl fmt::Display for BwdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let swaps = [(self.sdp_swap_ab, "SdP"), (self.dkv_swap_ab, "dKV"), (self.dq_swap_ab, "dQ")];
        let swapped: Vec<&str> = swaps.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let swapped = if swapped.is_empty() { "nothing".into() } else { swapped.join("+") };
        write!(f, "{}x{}, {} WG, swap {swapped}, ", self.tile_m, self.tile_n, self.num_wg)?;
        write!(f, "atoms {}/{}/{}", self.atom_layout_m_sdp, self.atom_layout_n_dkv, self.atom_layout_m_dq)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_combination_is_there_once() {
        let fwd = fwd(&FWD_TILE_N);
        assert_eq!(fwd.len(), 2 * 9 * 4);
        assert_eq!(fwd.iter().collect::<HashSet<_>>().len(), fwd.len());
        let bwd = bwd(&BWD_TILES, &BWD_TILES);
        assert_eq!(bwd.len(), 2 * 25 * 64);
        assert_eq!(bwd.iter().collect::<HashSet<_>>().len(), bwd.len());
    }
}

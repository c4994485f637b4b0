//! The SM90 guide's published examples, and its rules written down a second time and compared over many head
//! dims.

use std::collections::BTreeSet;

use fa_planner::guide::bwd::BwdConfig;
use fa_planner::guide::search::{MAX_TILE, SearchError, SearchResult, Tiles, search};
use fa_planner::{HeadDims, Mode};
use proptest::prelude::*;

const KIB: u32 = 1024;

fn found(dims: &str) -> SearchResult {
    search(dims.parse().expect("good head dims"), Mode::Both, &Tiles::default()).expect("good tiles")
}

fn shown(traffic_per_element: f64) -> String {
    format!("{traffic_per_element:.1}")
}

#[test]
fn hd128_forward_example() {
    let best = found("128").fwd[0];
    assert_eq!((best.tile_m, best.tile_n, best.num_wg), (128, 192, 2));
    assert!(best.pv_is_rs);
    assert_eq!(best.smem_bytes, 224 * KIB);
    assert_eq!(shown(best.traffic_per_element()), "9.3");
}

#[test]
fn hd128_backward_example() {
    let of_fa3 = |c: &&BwdConfig| {
        (c.tile_m, c.tile_n) == (80, 128)
            && (c.sdp_swap_ab, c.dkv_swap_ab, c.dq_swap_ab) == (true, false, true)
            && (c.atom_layout_m_sdp, c.atom_layout_n_dkv) == (1, 2)
    };
    let result = found("128");
    let matching: Vec<&BwdConfig> = result.bwd.iter().filter(of_fa3).collect();
    let best = matching[0];
    assert!(best.mma_dkv_is_rs);
    assert_eq!((best.num_wg, best.smem_bytes, best.total_regs), (2, 204 * KIB, 208));
    assert_eq!(shown(best.traffic_per_element()), "39.6");
    assert!(matching.iter().all(|c| (c.num_wg, c.smem_bytes, c.total_regs) == (2, 204 * KIB, 208)));
}

/// The guide's prose calls this the only tile_n above 64. Its rules also admit 2 warpgroups with tile_n 80
/// and 96, so what is asked here is that tile_n 96 is the widest, and that 3 warpgroups have no other.
#[test]
fn hd192_backward_example() {
    let result = found("192");
    assert!(result.bwd.iter().all(|c| c.tile_n <= 96));
    let three: Vec<&BwdConfig> = result.bwd.iter().filter(|c| c.num_wg == 3).collect();
    for config in &three {
        assert_eq!((config.tile_m, config.tile_n), (64, 96));
        assert_eq!((config.sdp_swap_ab, config.dkv_swap_ab), (false, true));
        assert_eq!((config.smem_bytes, config.total_regs), (216 * KIB, 128));
    }
    let atoms: BTreeSet<u32> = three.iter().map(|c| c.atom_layout_n_dkv).collect();
    assert_eq!(atoms, BTreeSet::from([1, 3]));
}

/// The prose gives 168 KiB for tile_n 64, the sum with one stage of dO; by the rule that dO has two stages
/// where they fit, it is 16 KiB more.
#[test]
fn hd192_128_backward_example() {
    let result = found("192-128");
    let three: Vec<&BwdConfig> = result.bwd.iter().filter(|c| c.num_wg == 3).collect();
    assert!(!three.is_empty());
    for config in three {
        assert_eq!((config.atom_layout_n_dkv, config.tile_n), (3, 96));
        assert_eq!(config.smem_bytes, 212 * KIB);
    }
    let two = |tile_n| result.bwd.iter().find(|c| (c.num_wg, c.tile_m, c.tile_n) == (2, 64, tile_n));
    assert_eq!(two(112).map(|c| (c.do_stage, c.smem_bytes)), Some((1, 210 * KIB)));
    let narrow = two(64).expect("tile_n 64 fits");
    assert_eq!((narrow.do_stage, narrow.smem_bytes), (2, (168 + 16) * KIB));
    assert_eq!(
        fa_planner::guide::smem::bwd(HeadDims { head_dim: 192, head_dim_v: 128 }, &narrow.spec(), 1),
        168 * KIB
    );
}

#[test]
fn counts_of_feasible_configurations() {
    for (dims, fwd, bwd) in [
        ("32", 66, 30),
        ("64", 64, 128),
        ("96", 56, 14),
        ("128", 44, 142),
        ("160", 28, 2),
        ("192", 16, 18),
        ("192-128", 28, 18),
        ("256", 6, 0),
        ("512", 0, 0),
    ] {
        let result = found(dims);
        assert_eq!((result.fwd.len(), result.bwd.len()), (fwd, bwd), "head dim {dims}");
    }
}

#[test]
fn head_dims_count_as_the_next_multiple_of_32() {
    for (dims, padded) in [("72", "96"), ("80", "96"), ("112", "128"), ("1", "32"), ("161-100", "192-128")] {
        let (odd, even) = (found(dims), found(padded));
        assert_eq!((odd.fwd, odd.bwd), (even.fwd, even.bwd), "{dims} is not planned as {padded}");
        assert_eq!(odd.head_dim, dims.parse::<HeadDims>().expect("good").head_dim);
    }
}

#[test]
fn nothing_found_comes_with_the_nearest_misses() {
    let explain = found("256").explain.and_then(|e| e.bwd).expect("both directions are explained");
    assert_eq!((explain.candidates, explain.feasible), (3200, 0));
    let rejected: usize = explain.limits().iter().map(|(_, limit)| limit.rejected).sum();
    assert_eq!(rejected, 3200);
    for (name, limit) in explain.limits() {
        assert_eq!(limit.nearest.is_some(), limit.rejected > 0, "{name}");
    }
    assert!(explain.registers.nearest.is_some());
}

#[test]
fn a_mode_searches_only_its_direction() {
    let tiles = Tiles::default();
    let both = found("128");
    let fwd = search(HeadDims::square(128), Mode::Fwd, &tiles).expect("good");
    let bwd = search(HeadDims::square(128), Mode::Bwd, &tiles).expect("good");
    assert_eq!((&fwd.fwd, &bwd.bwd), (&both.fwd, &both.bwd));
    assert!(fwd.bwd.is_empty() && bwd.fwd.is_empty());
    assert!(fwd.explain.is_some_and(|e| e.fwd.is_some() && e.bwd.is_none()));
}

#[test]
fn results_read_back_from_ron_and_json() {
    for dims in ["64", "192-128", "256"] {
        for explained in [true, false] {
            let mut result = found(dims);
            result.explain = result.explain.filter(|_| explained);
            let ron =
                ron::ser::to_string_pretty(&result, ron::ser::PrettyConfig::default()).expect("plain data");
            assert_eq!(ron::from_str(&ron), Ok(result.clone()));
            let json = serde_json::to_string(&result).expect("plain data");
            assert_eq!(serde_json::from_str::<SearchResult>(&json).expect("reads back"), result);
        }
    }
}

#[test]
fn sizes_out_of_range_are_refused() {
    let tiles = |side| Tiles { bwd_n: vec![64, side], ..Tiles::default() };
    for side in [0, MAX_TILE + 1, u32::MAX] {
        let error = search(HeadDims::square(64), Mode::Both, &tiles(side));
        assert_eq!(error, Err(SearchError::Tile { name: "bwd tile_n", value: side }));
    }
    for head_dim in [0, 577, u32::MAX] {
        let error = search(HeadDims::square(head_dim), Mode::Both, &Tiles::default());
        assert!(matches!(error, Err(SearchError::HeadDims(_))));
    }
    // The largest of everything is counted without overflow.
    let largest =
        search(HeadDims::square(512), Mode::Both, &Tiles::with_lists(Some(&[MAX_TILE]), Some(&[MAX_TILE])));
    assert!(largest.is_ok_and(|r| r.fwd.is_empty() && r.bwd.is_empty()));
}

/// The rules once more, as plain loops over plain integers: (tile_n, tile_m, traffic, everything else).
mod rules {
    /// Rows and columns of an output and warpgroups along both, by the guide's swap; `None` when shapes do
    /// not divide.
    fn product(m: i64, n: i64, wg: i64, atom: i64, swap: bool) -> Option<[i64; 3]> {
        let (m, n, am) = if swap { (n, m, wg / atom) } else { (m, n, atom) };
        let an = wg / am;
        (m % (64 * am) == 0 && n % (8 * an) == 0).then_some([m, n, an])
    }

    fn reads([m, n, an]: [i64; 3], k: i64, rs: bool) -> i64 {
        m / 64 * an * ((if rs { 0 } else { 64 * k * 2 }) + n / an * k * 2)
    }

    /// One feasible configuration, fields in the order of the JSON description.
    pub(crate) type Row = Vec<i64>;

    pub(crate) fn fwd(hd: i64, hdv: i64, tile_ns: &[i64]) -> Vec<Row> {
        let mut rows = Vec::new();
        for wg in [2, 3] {
            let (tm, limit) = (64 * wg, if wg == 2 { 216 } else { 128 });
            for &tn in tile_ns {
                for rs in [1, 0] {
                    for overlap in [1, 0] {
                        let (s, o) = (tm * tn / (128 * wg), tm * hdv / (128 * wg));
                        let total = s + o + overlap * (s / 2);
                        let p = (1 - rs) * tm * tn * 2;
                        let smem = (tm * hd * 2).max(tm * hdv * 2) + 4 * tn * hd + 4 * tn * hdv + p;
                        let traffic =
                            wg * (64 * hd + tn * hd) * 2 + wg * ((1 - rs) * 64 * tn + hdv * tn) * 2 + p;
                        if tn % 8 == 0 && total <= limit && smem <= 224 * 1024 {
                            rows.push(vec![
                                tm,
                                tn,
                                wg,
                                total,
                                limit,
                                smem,
                                traffic,
                                rs,
                                overlap,
                                s,
                                o,
                                s / 2,
                            ]);
                        }
                    }
                }
            }
        }
        rows.sort_by(|a, b| b[1].cmp(&a[1]).then((a[6] * b[0] * b[1]).cmp(&(b[6] * a[0] * a[1]))));
        rows
    }

    pub(crate) fn bwd(hd: i64, hdv: i64, tile_ms: &[i64], tile_ns: &[i64]) -> Vec<Row> {
        let mut rows = Vec::new();
        for wg in [2, 3] {
            for &tm in tile_ms {
                for &tn in tile_ns {
                    for bits in 0..64 {
                        let [swap_s, swap_kv, swap_q] = [32, 16, 8].map(|bit| bits & bit != 0);
                        let [a_s, a_kv, a_q] = [4, 2, 1].map(|bit| if bits & bit == 0 { 1 } else { wg });
                        let row = bwd_row([hd, hdv, tm, tn, wg], [swap_s, swap_kv, swap_q], [a_s, a_kv, a_q]);
                        rows.extend(row);
                    }
                }
            }
        }
        rows.sort_by(|a, b| {
            (b[1], b[0]).cmp(&(a[1], a[0])).then((a[6] * b[0] * b[1]).cmp(&(b[6] * a[0] * a[1])))
        });
        rows
    }

    fn bwd_row(
        [hd, hdv, tm, tn, wg]: [i64; 5],
        [swap_s, swap_kv, swap_q]: [bool; 3],
        [a_s, a_kv, a_q]: [i64; 3],
    ) -> Option<Row> {
        let sdp = product(tm, tn, wg, a_s, swap_s)?;
        let dk = product(tn, hd, wg, a_kv, swap_kv)?;
        let dv = product(tn, hdv, wg, a_kv, swap_kv)?;
        let dq = product(tm, hd, wg, a_q, swap_q)?;
        let [r_s, r_k, r_v, r_q] = [tm * tn, tn * hd, tn * hdv, tm * hd].map(|e| e / (128 * wg));
        let (total, limit) = ((2 * r_s).max(r_q) + r_k + r_v, if wg == 2 { 216 } else { 128 });
        let rs = a_s == 1 && a_kv == wg && swap_s && !swap_kv;
        let p = if rs { 0 } else { tm * tn * 2 };
        let smem = |stages: i64| {
            4 * tm * hd + 2 * tn * (hd + hdv) + stages * 2 * tm * hdv + p + 2 * tm * tn + 4 * tm * hd
        };
        let stages = if smem(2) <= 224 * 1024 { 2 } else { 1 };
        let traffic = reads(sdp, hd, false)
            + reads(sdp, hdv, false)
            + reads(dv, tm, rs)
            + reads(dk, tm, rs)
            + reads(dq, tn, false)
            + p
            + 2 * tm * tn
            + 8 * tm * hd;
        let swaps = [swap_s, swap_kv, swap_q].map(i64::from);
        let mut row = vec![tm, tn, wg, total, limit, smem(stages), traffic, 2, stages, 1];
        row.extend(swaps);
        row.extend([a_s, a_kv, a_q, i64::from(rs), r_s, r_k, r_v, r_q]);
        (total <= limit && smem(stages) <= 224 * 1024).then_some(row)
    }
}

fn fwd_rows(result: &SearchResult) -> Vec<rules::Row> {
    let row = |c: &fa_planner::guide::fwd::FwdConfig| {
        let head = [c.tile_m, c.tile_n, c.num_wg, c.total_regs, c.reg_limit, c.smem_bytes, c.smem_traffic];
        let tail = [c.pv_is_rs.into(), c.overlap_wg.into(), c.regs_s, c.regs_o, c.regs_p];
        head.into_iter().chain(tail).map(i64::from).collect()
    };
    result.fwd.iter().map(row).collect()
}

fn bwd_rows(result: &SearchResult) -> Vec<rules::Row> {
    let row = |c: &BwdConfig| {
        let head = [c.tile_m, c.tile_n, c.num_wg, c.total_regs, c.reg_limit, c.smem_bytes, c.smem_traffic];
        let stages = [c.q_stage, c.do_stage, c.pds_stage];
        let swaps = [c.sdp_swap_ab, c.dkv_swap_ab, c.dq_swap_ab].map(u32::from);
        let atoms = [c.atom_layout_m_sdp, c.atom_layout_n_dkv, c.atom_layout_m_dq];
        let tail = [c.mma_dkv_is_rs.into(), c.regs_sdp, c.regs_dk, c.regs_dv, c.regs_dq];
        [&head[..], &stages, &swaps, &atoms, &tail].concat().into_iter().map(i64::from).collect()
    };
    result.bwd.iter().map(row).collect()
}

const FWD_N: [i64; 9] = [64, 80, 96, 112, 128, 144, 160, 176, 192];
const BWD: [i64; 5] = [64, 80, 96, 112, 128];

#[test]
fn rules_hold_for_every_pair_of_padded_head_dims() {
    for hd in (32..=512).step_by(32) {
        for hdv in (32..=512).step_by(32) {
            let dims = HeadDims { head_dim: hd, head_dim_v: hdv };
            let result = search(dims, Mode::Both, &Tiles::default()).expect("in range");
            let (hd, hdv) = (i64::from(hd), i64::from(hdv));
            assert_eq!(fwd_rows(&result), rules::fwd(hd, hdv, &FWD_N), "forward {dims}");
            assert_eq!(bwd_rows(&result), rules::bwd(hd, hdv, &BWD, &BWD), "backward {dims}");
        }
    }
}

proptest! {
    #[test]
    fn rules_hold_for_any_tile_lists(
        hd in 1..=512u32,
        hdv in 1..=512u32,
        tile_m in prop::collection::btree_set(1..=256u32, 1..4),
        tile_n in prop::collection::btree_set((1..=32u32).prop_map(|n| n * 8), 1..4),
    ) {
        let (tile_m, tile_n) = (Vec::from_iter(tile_m), Vec::from_iter(tile_n));
        let dims = HeadDims { head_dim: hd, head_dim_v: hdv };
        let tiles = Tiles::with_lists(Some(&tile_m), Some(&tile_n));
        let result = search(dims, Mode::Both, &tiles).expect("in range");
        let pad = |d: u32| i64::from(d.div_ceil(32) * 32);
        let wide = |list: &[u32]| -> Vec<i64> { list.iter().map(|&v| v.into()).collect() };
        prop_assert_eq!(fwd_rows(&result), rules::fwd(pad(hd), pad(hdv), &wide(&tile_n)));
        prop_assert_eq!(bwd_rows(&result), rules::bwd(pad(hd), pad(hdv), &wide(&tile_m), &wide(&tile_n)));
    }
}

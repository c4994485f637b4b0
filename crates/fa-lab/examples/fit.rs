use fa_core::Pass;
use fa_core::{Arch, Family, KernelSpec, Problem};
use fa_planner::cost::{CostConstants, predict};
use fa_planner::kernels::unbound;
use fa_planner::plan::{PlanOptions, plan};
use serde::Deserialize;
use std::collections::HashMap;
#[derive(Deserialize)]
struct Record {
    date: String,
    problems: Vec<Entry>,
    gpu: String,
}
#[derive(Deserialize)]
struct Entry {
    number: usize,
    problem: Problem,
    kind: String,
    #[serde(default)]
    deterministic: bool,
    family: Option<Family>,
    kernels: Vec<M>,
}
#[derive(Deserialize)]
struct M {
    spec: KernelSpec,
    ms: Option<f64>,
    again_ms: Option<f64>,
}
struct P {
    id: String,
    problem: Problem,
    ks: Vec<(KernelSpec, f64)>,
    weight: f64,
    set: usize,
}
fn eval(ps: &[P], c: &CostConstants, preds: &mut Vec<Vec<f64>>) {
    preds.clear();
    let half = ps.len() / 2;
    let run = |ps: &[P]| {
        ps.iter()
            .map(|p| {
                p.ks.iter()
                    .map(|(s, _)| 1e3 * predict(&p.problem, s, Arch::Sm90, c).seconds)
                    .collect::<Vec<f64>>()
            })
            .collect::<Vec<_>>()
    };
    let (a, b) = std::thread::scope(|s| {
        let h = s.spawn(|| run(&ps[half..]));
        let a = run(&ps[..half]);
        (a, h.join().unwrap())
    });
    preds.extend(a);
    preds.extend(b);
}
struct Score {
    j: f64,
    near: f64,
    near8: f64,
    worst: f64,
    within: f64,
    abs: f64,
    n: f64,
}
fn score(ps: &[P], preds: &[Vec<f64>], only: &dyn Fn(&P) -> bool) -> Score {
    let (mut j, mut near, mut n8, mut n, mut within, mut abs, mut cnt, mut wsum) =
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
    let mut worst: f64 = 1.0;
    for (p, pr) in ps.iter().zip(preds) {
        if !only(p) {
            continue;
        }
        let best = p.ks.iter().map(|k| k.1).fold(f64::MAX, f64::min);
        let low = pr.iter().cloned().fold(f64::MAX, f64::min);
        let tau = 0.012;
        let (mut ws, mut reg) = (0.0, 0.0);
        for (k, q) in p.ks.iter().zip(pr) {
            let w = (-(q / low).ln() / tau).exp();
            ws += w;
            reg += w * ((k.1 / best).ln()).min(0.15);
        }
        let i = (0..pr.len()).min_by(|&a, &b| pr[a].total_cmp(&pr[b])).unwrap();
        let rate = best / p.ks[i].1;
        let res: Vec<f64> = p.ks.iter().zip(pr).map(|(k, q)| (k.1 / q).ln()).collect();
        let mean = res.iter().sum::<f64>() / res.len() as f64;
        let v: f64 = res.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / res.len() as f64;
        j += p.weight * (reg / ws + 1.0 * v.sqrt() * 0.15 + 0.03 * mean.abs());
        wsum += p.weight;
        n += 1.0;
        near += f64::from(rate >= 1.0 / 1.03);
        n8 += f64::from(rate >= 1.0 / 1.08);
        worst = worst.min(rate);
        within += v * res.len() as f64;
        abs += mean.powi(2);
        cnt += res.len() as f64;
    }
    Score {
        j: j / wsum,
        near: near / n,
        near8: n8 / n,
        worst,
        within: (within / cnt).sqrt(),
        abs: (abs / n).sqrt(),
        n,
    }
}
fn show(t: &str, s: &Score) {
    println!(
        "{t}: n {} J {:.5} near {:.3} near8 {:.3} worst {:.3} within-sd {:.4} abs {:.4}",
        s.n, s.j, s.near, s.near8, s.worst, s.within, s.abs
    );
}
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let mode = args[1].clone();
    let names: Vec<String> = args[2].split(',').map(str::to_owned).collect();
    let rounds: usize = args[3].parse().unwrap();
    let (kind, family) = match mode.as_str() {
        "bwd90" => ("bwd", Family::Sm90),
        "bwd80" => ("bwd", Family::Sm80),
        "fwd80" => ("fwd", Family::Sm80),
        _ => ("fwd", Family::Sm90),
    };
    let mut ps = Vec::new();
    for f in &args[4..] {
        let r: Record = serde_json::from_str(&std::fs::read_to_string(f).unwrap()).unwrap();
        let recent = r.date.as_str() > "2026-11-25";
        if r.gpu.contains("H200") && std::env::var_os("NOH200").is_some() {
            continue;
        }
        for e in r.problems {
            if e.kind != kind || e.family.unwrap_or(Family::Sm90) != family || e.deterministic {
                continue;
            }
            let pass = if kind == "bwd" { Pass::BACKWARD } else { Pass::Forward };
            let Ok(plans) = plan(
                &e.problem,
                Arch::Sm90,
                &PlanOptions { family: Some(family), pass, ..PlanOptions::default() },
            ) else {
                continue;
            };
            let ks: Vec<_> = e
                .kernels
                .into_iter()
                .filter(|m| plans.iter().any(|p| unbound(&p.spec) == unbound(&m.spec)))
                .filter_map(|m| Some((m.spec, m.again_ms.or(m.ms)?)))
                .collect();
            if ks.len() < 2 {
                continue;
            }
            let tag = std::path::Path::new(f).file_name().unwrap().to_string_lossy().into_owned();
            let set = e.number % 2;
            ps.push(P {
                id: format!("{tag} #{}", e.number),
                problem: e.problem,
                ks,
                weight: if recent { 1.0 } else { 0.5 },
                set,
            });
        }
    }
    let old = |name: &str| std::fs::read_to_string(format!("crates/fa-planner/tests/data/{name}")).unwrap();
    let old_weight: f64 = std::env::var("OLD").ok().map_or(0.5, |v| v.parse().unwrap());
    if mode != "fwd90" {
        let text = old(match mode.as_str() {
            "bwd90" => "sm90-bwd-h100.txt",
            "bwd80" => "sm80-bwd-h100.txt",
            _ => "sm80-fwd-h100.txt",
        });
        let mut head = String::new();
        let mut map: HashMap<String, KernelSpec> = HashMap::new();
        let mut own: Vec<P> = Vec::new();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let w: Vec<&str> = line.split(' ').collect();
            if w[0] == "head_dim" {
                ps.append(&mut own);
                head = line.to_owned();
                map.clear();
                let nine = mode == "bwd90";
                let num = |i: usize| w[i].parse::<usize>().unwrap();
                let (hd, hdv, heads, mask) =
                    if nine { (num(1), num(2), num(4), w[5]) } else { (num(1), num(1), num(3), w[4]) };
                let mask = if mask == "causal" { fa_core::Mask::CAUSAL } else { fa_core::Mask::FULL };
                let lens: Vec<usize> = if nine {
                    vec![512, 1024, 2048, 4096, 8192, 16384]
                } else {
                    vec![w.iter().position(|x| *x == "seqlen").map_or(8192, |i| num(i + 1))]
                };
                for n in lens {
                    let sq = Problem::square(16384 / n, n, heads, hd, mask, fa_core::Dtype::Bf16);
                    own.push(P {
                        id: format!("old {line} N {n}"),
                        problem: Problem { head_dim_v: hdv, ..sq },
                        ks: Vec::new(),
                        weight: if n < 2048 && nine { 0.0 } else { old_weight },
                        set: 2,
                    });
                }
                let pass = if kind == "bwd" { Pass::BACKWARD } else { Pass::Forward };
                let last = if nine { &own[4].problem } else { &own[0].problem };
                let set = fa_planner::plan::explore(
                    last,
                    Arch::Sm90,
                    &PlanOptions { family: Some(family), pass, ..PlanOptions::default() },
                )
                .unwrap();
                let m = format!("-{}-", last.mask);
                for pl in set.plans {
                    let n = pl.spec.to_string();
                    let (_, o) = n.split_once(&m).unwrap();
                    let o = if nine {
                        o.trim_end_matches("-pt").trim_end_matches("-lpt").to_owned()
                    } else {
                        o.to_owned()
                    };
                    map.entry(o).or_insert(pl.spec);
                }
            } else {
                let Some(spec) = map.get(w[0]) else { continue };
                for (p, r) in own.iter_mut().zip(&w[1..]) {
                    if let Ok(r) = r.parse::<f64>() {
                        let pass = if kind == "bwd" { Pass::BACKWARD } else { Pass::Forward };
                        let ms = p.problem.flops(pass) / r / 1e9;
                        p.ks.push((spec.clone(), ms));
                    }
                }
            }
        }
        ps.append(&mut own);
        ps.retain(|p| p.weight > 0.0 && p.ks.len() > 1);
        let _ = head;
    }
    let base = CostConstants::of(Arch::Sm90);
    let mut value = serde_json::to_value(base).unwrap();
    let get = |v: &serde_json::Value, n: &str| -> f64 {
        v.pointer(&format!("/{}", n.replace('.', "/"))).unwrap_or_else(|| panic!("{n}")).as_f64().unwrap()
    };
    let of = |v: &serde_json::Value| -> CostConstants { serde_json::from_value(v.clone()).unwrap() };
    let mut preds = Vec::new();
    eval(&ps, &of(&value), &mut preds);
    let fitset: Option<usize> = std::env::var("FIT").ok().map(|v| v.parse().unwrap());
    let recent = |p: &P| p.weight == 1.0 && p.set != 2;
    let isfit = |p: &P| fitset.is_none_or(|s| p.set == s || p.set == 2);
    let held = |p: &P| fitset.is_some_and(|s| p.set != s && p.set != 2);
    show("all", &score(&ps, &preds, &|_| true));
    show("recent", &score(&ps, &preds, &recent));
    show("drawn", &score(&ps, &preds, &|p| p.set != 2));
    show("old", &score(&ps, &preds, &|p| p.set == 2));
    if fitset.is_some() {
        show("fit", &score(&ps, &preds, &isfit));
        show("held", &score(&ps, &preds, &held));
    }
    let mut best = score(&ps, &preds, &isfit).j;
    let mut step: HashMap<&str, f64> = names.iter().map(|n| (n.as_str(), 1.12)).collect();
    for round in 0..rounds {
        let mut moved = false;
        for n in &names {
            let s = step[n.as_str()];
            let mut ok = false;
            for f in [s, 1.0 / s] {
                let mut v = value.clone();
                let x = get(&v, n) * f;
                *v.pointer_mut(&format!("/{}", n.replace('.', "/"))).unwrap() = serde_json::json!(x);
                eval(&ps, &of(&v), &mut preds);
                let j = score(&ps, &preds, &isfit).j;
                if j < best - 1e-6 {
                    best = j;
                    value = v;
                    ok = true;
                    moved = true;
                    break;
                }
            }
            let e = step.get_mut(n.as_str()).unwrap();
            *e = if ok { (*e - 1.0) * 1.3 + 1.0 } else { (*e - 1.0) * 0.6 + 1.0 };
        }
        if round % 4 == 3 || !moved {
            println!("round {round} J {best:.5}");
        }
        if !moved && step.values().all(|s| *s < 1.01) {
            break;
        }
    }
    eval(&ps, &of(&value), &mut preds);
    show("all", &score(&ps, &preds, &|_| true));
    show("recent", &score(&ps, &preds, &recent));
    show("drawn", &score(&ps, &preds, &|p| p.set != 2));
    show("old", &score(&ps, &preds, &|p| p.set == 2));
    if fitset.is_some() {
        show("fit", &score(&ps, &preds, &isfit));
        show("held", &score(&ps, &preds, &held));
    }
    for n in &names {
        println!("  {n}: {:.4} -> {:.4}", get(&serde_json::to_value(base).unwrap(), n), get(&value, n));
    }
    if std::env::var_os("MISSES").is_some() {
        for (p, pr) in ps.iter().zip(&preds) {
            let b = (0..pr.len()).min_by(|&a, &b| p.ks[a].1.total_cmp(&p.ks[b].1)).unwrap();
            let i = (0..pr.len()).min_by(|&a, &b| pr[a].total_cmp(&pr[b])).unwrap();
            if p.ks[b].1 / p.ks[i].1 < 1.0 / 1.03 {
                println!(
                    "{} {:.3} {}x{}:{}x{},{} {:?}\n    chosen {} {:.4} pred {:.4}\n    best   {} {:.4} pred {:.4}",
                    p.id,
                    p.ks[b].1 / p.ks[i].1,
                    p.problem.lengths.sequences(),
                    p.problem.heads_q,
                    p.problem.heads_kv,
                    p.problem.lengths.max_q(),
                    p.problem.lengths.max_k(),
                    p.problem.mask.to_string(),
                    p.ks[i].0,
                    p.ks[i].1,
                    pr[i],
                    p.ks[b].0,
                    p.ks[b].1,
                    pr[b]
                );
            }
        }
    }
}

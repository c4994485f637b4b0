//! Planning one problem: candidates, account, predicted time, order. Mark: a few milliseconds.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use fa_core::{Arch, Dtype, Mask, Problem};
use fa_planner::plan::{PlanOptions, plan};

fn plans(c: &mut Criterion) {
    for (name, mask) in [("full", Mask::FULL), ("causal", Mask::CAUSAL), ("window", Mask::window(1024, 1024))]
    {
        for seqlen in [4096, 1 << 17] {
            let problem = Problem::square(1, seqlen, 16, 128, mask, Dtype::Bf16);
            for arch in [Arch::Sm80, Arch::Sm90] {
                c.bench_function(&format!("plan/{arch}/{name}/{seqlen}"), |b| {
                    b.iter(|| plan(black_box(&problem), arch, &PlanOptions::default()).expect("plans").len());
                });
            }
        }
    }
}

criterion_group!(benches, plans);
criterion_main!(benches);

//! Planning one problem: candidates, account, predicted time, order. Marks: a few milliseconds for all
//! kernels, a quarter of one for the best of a decode step, which is planned for every length of a cache that
//! grows.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use fa_core::{Arch, Dtype, Lengths, Mask, Problem};
use fa_planner::plan::{PlanOptions, best, plan};

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
    let square = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16);
    for (batch, keys) in [(1, 4097), (8, 4097), (1, 1 << 16)] {
        let problem = square.with_heads_kv(8).with_lengths(Lengths::uniform(batch, 1, keys));
        for arch in [Arch::Sm80, Arch::Sm90] {
            c.bench_function(&format!("best/{arch}/decode/{batch}x{keys}"), |b| {
                b.iter(|| best(black_box(&problem), arch, &PlanOptions::default()).expect("a plan"));
            });
        }
    }
}

criterion_group!(benches, plans);
criterion_main!(benches);

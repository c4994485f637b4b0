//! The guide's search over the head dims in use, both directions. Mark: all of them together in under 10 ms.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use fa_planner::guide::search::{Tiles, search};
use fa_planner::{HeadDims, Mode};

const HEAD_DIMS: [HeadDims; 6] = [
    HeadDims::square(64),
    HeadDims::square(96),
    HeadDims::square(128),
    HeadDims::square(192),
    HeadDims::square(256),
    HeadDims { head_dim: 192, head_dim_v: 128 },
];

fn searches(c: &mut Criterion) {
    let tiles = Tiles::default();
    let run = |dims: HeadDims| search(dims, Mode::Both, &tiles).expect("head dims in range");
    c.bench_function("search/all six", |b| {
        b.iter(|| HEAD_DIMS.map(|dims| run(black_box(dims)).bwd.len()));
    });
    for dims in HEAD_DIMS {
        c.bench_function(&format!("search/{dims}"), |b| b.iter(|| run(black_box(dims))));
    }
}

criterion_group!(benches, searches);
criterion_main!(benches);

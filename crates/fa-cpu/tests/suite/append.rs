//! Appending, beside a loop over elements: caches that lie in any order of axes, pages that are named twice,
//! both kinds of pairs, and enough rows for all threads.

use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use fa_core::{Append, Dtype, QueryPositions, Rotary, RotaryPairs, RotaryQueries, Side, Strides};
use fa_cpu::{AppendExtras, AppendTensors, Element, Table, TensorMut, TensorRef, append};
use half::bf16;

const ROOM: usize = 96;
const HEADS: [usize; 2] = [4, 2];
/// Elements of a key, and how many of them are turned.
const DIMS: [usize; 2] = [64, 32];

fn values<T: Element>(count: usize, seed: usize) -> Vec<T> {
    (0..count).map(|i| T::from_f32(((i * 7919 + seed * 101) % 509) as f32 / 128.0 - 2.0)).collect()
}

/// How the axes `[batch, rows, heads, dim]` of a tensor lie, the innermost last, and what lies between the
/// elements of the innermost.
fn strides(shape: [usize; 4], order: [usize; 4], step: usize) -> (Strides, usize) {
    let (mut own, mut next) = ([0; 4], step);
    for axis in order.into_iter().rev() {
        own[axis] = next as i64;
        next *= shape[axis];
    }
    (Strides { batch: own[0], seq: own[1], head: own[2], dim: own[3] }, next)
}

/// Appends `lens` rows behind `before` keys and compares every element of what was written with the loop's.
fn check<T: Element + PartialEq + std::fmt::Debug>(
    page: Option<usize>,
    pairs: RotaryPairs,
    (order, step): ([usize; 4], usize),
    twice: bool,
    [head_dim, turned_dim]: [usize; 2],
) {
    let (before, lens) = ([3, 0, 40, 17], [50usize, 30, 0, 60]);
    let batch = before.len();
    let columns = page.map_or(0, |page| ROOM.div_ceil(page));
    let pages = batch * columns;
    let total: usize = lens.iter().sum();
    let new = Side::packed(total, 64);
    let of_cache = page.map_or(Side::padded(ROOM), |page| Side::paged(page, pages, ROOM));
    let queries = RotaryQueries { rows: new, heads: HEADS[0], positions: QueryPositions::Following };
    let rotary =
        Rotary { dim: turned_dim, pairs, positions: ROOM, table: Dtype::F32, queries: Some(queries) };
    let what = Append {
        sequences: batch,
        new,
        cache: Side { used: false, ..of_cache },
        heads_kv: HEADS[1],
        head_dim,
        head_dim_v: head_dim,
        dtype: T::DTYPE.unwrap(),
        codes: None,
        rotary: Some(rotary),
    };
    let shapes = [what.new_shape(head_dim), what.cache_shape(head_dim), what.query_shape()];
    let [(of_new, room_new), (of_cached, room_cached), (of_q, room_q)] =
        shapes.map(|shape| strides(shape, order, step));
    let news = [1, 2].map(|seed| values::<T>(room_new, seed));
    let caches = [3, 4].map(|seed| values::<T>(room_cached, seed));
    let q = values::<T>(room_q, 5);
    let [cos, sin] = [6, 7].map(|seed| values::<f32>(ROOM * turned_dim / 2, seed));
    let cu: Vec<i32> = (0..=batch).map(|b| lens[..b].iter().sum::<usize>() as i32).collect();
    // Pages in disorder; `twice`: the last sequence's are the first's.
    let mut table: Vec<i32> = (0..pages).map(|i| (i * 5 % pages.max(1)) as i32).collect();
    if twice {
        table.copy_within(..columns, (batch - 1) * columns);
    }

    let (mut want, mut want_q) = (caches.clone(), q.clone());
    let turned = |row: &dyn Fn(usize) -> f32, position: usize, dim: usize| {
        let half = turned_dim / 2;
        let (pair, upper, other) = match pairs {
            RotaryPairs::Halves => (dim % half, dim >= half, (dim + half) % turned_dim),
            RotaryPairs::Neighbours => (dim / 2, dim % 2 == 1, dim ^ 1),
        };
        if dim >= turned_dim {
            return T::from_f32(row(dim));
        }
        let (cos, sin) = (cos[position * half + pair], sin[position * half + pair]);
        let (own, other) = (row(dim) * cos, row(other) * sin);
        T::from_f32(if upper { own + other } else { own - other })
    };
    for sequence in 0..batch {
        for t in 0..lens[sequence] {
            let (position, from) = (before[sequence] as usize + t, cu[sequence] as usize + t);
            let (block, row) = match page {
                Some(page) => (table[sequence * columns + position / page] as usize, position % page),
                None => (sequence, position),
            };
            for dim in 0..head_dim {
                for head in 0..HEADS[1] {
                    let at = |dim| of_new.offset(0, from, head, dim) as usize;
                    let to = of_cached.offset(block, row, head, dim) as usize;
                    want[0][to] = turned(&|dim| news[0][at(dim)].to_f32(), position, dim);
                    want[1][to] = news[1][at(dim)];
                }
                for head in 0..HEADS[0] {
                    let at = |dim| of_q.offset(0, from, head, dim) as usize;
                    want_q[at(dim)] = turned(&|dim| q[at(dim)].to_f32(), position, dim);
                }
            }
        }
    }

    let ([mut keys, mut cached], mut got_q) = (caches, q.clone());
    let mut used_out = vec![0; batch];
    let mut extras = AppendExtras {
        cu_new: Some(&cu),
        seqused_k: Some(&before),
        page_table: page.map(|_| &table[..]),
        cu_seqlens_q: Some(&cu),
        used_out: Some(&mut used_out),
        ..AppendExtras::default()
    };
    let mut tensors = AppendTensors {
        k_new: TensorRef::new("k_new", &news[0], shapes[0], of_new).unwrap(),
        v_new: TensorRef::new("v_new", &news[1], shapes[0], of_new).unwrap(),
        k_cache: TensorMut::new("k_cache", &mut keys, shapes[1], of_cached).unwrap().into(),
        v_cache: TensorMut::new("v_cache", &mut cached, shapes[1], of_cached).unwrap().into(),
        q: Some(TensorMut::new("q", &mut got_q, shapes[2], of_q).unwrap()),
        tables: Some([Table::F32(&cos), Table::F32(&sin)]),
    };
    assert_eq!(append::append(&what, &mut extras, &mut tensors), Ok(0));
    let name = format!(
        "page {page:?}, {pairs:?}, order {order:?}, step {step}, twice {twice}, dims {head_dim} {turned_dim}"
    );
    assert!(keys == want[0], "keys, {name}");
    assert!(cached == want[1], "values, {name}");
    assert!(got_q == want_q, "queries, {name}");
    let ends: Vec<i32> = before.iter().zip(lens).map(|(&before, len)| before + len as i32).collect();
    assert_eq!(used_out, ends);
}

#[test]
fn every_element_is_where_a_loop_puts_it() {
    for page in [None, Some(16), Some(7), Some(1)] {
        for pairs in [RotaryPairs::Halves, RotaryPairs::Neighbours] {
            // Rows before heads, heads before rows, rows innermost, and gaps between elements.
            for order in [([0, 1, 2, 3], 1), ([0, 2, 1, 3], 1), ([0, 2, 3, 1], 1), ([0, 1, 2, 3], 2)] {
                check::<bf16>(page, pairs, order, false, DIMS);
                check::<f32>(page, pairs, order, false, DIMS);
            }
        }
    }
}

#[test]
fn of_rows_with_one_place_the_last_stays() {
    for order in [[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1]] {
        check::<bf16>(Some(8), RotaryPairs::Halves, (order, 1), true, DIMS);
    }
}

#[test]
fn rows_of_any_length_are_turned() {
    for dims in [[2, 2], [7, 6], [59, 20], [300, 300]] {
        for order in [([0, 1, 2, 3], 1), ([0, 2, 3, 1], 1)] {
            for pairs in [RotaryPairs::Halves, RotaryPairs::Neighbours] {
                check::<bf16>(Some(7), pairs, order, false, dims);
                check::<f32>(None, pairs, order, false, dims);
            }
        }
    }
}

/// Threads of the pool that are busy with something else are not waited for: the caller does all.
#[test]
fn a_pool_that_is_busy_keeps_no_call_waiting() {
    let threads = rayon::current_num_threads();
    let [all_busy, release] = [0, 1].map(|_| Arc::new(Barrier::new(threads + 1)));
    for _ in 0..threads {
        let [all_busy, release] = [&all_busy, &release].map(Arc::clone);
        rayon::spawn(move || _ = (all_busy.wait(), release.wait()));
    }
    all_busy.wait();
    let (done, is_done) = mpsc::channel();
    let call = thread::spawn(move || {
        // 140 rows of 4 heads of 256 are more than a thread takes at a time.
        check::<bf16>(None, RotaryPairs::Halves, ([0, 1, 2, 3], 1), false, [256, 256]);
        done.send(()).unwrap();
    });
    let came = is_done.recv_timeout(Duration::from_secs(20));
    release.wait();
    call.join().unwrap();
    assert_eq!(came, Ok(()));
}

//! The two products of attention for a few queries, which read K and V as they lie, in any element type:
//! lanes lie along the head dim.
//!
//! Arrays of registers are filled in loops: of `core::array::from_fn` the compiler makes a dozen functions
//! for each use in each block. What a block's sizes rule out is behind an `if const`: behind any other
//! condition it is compiled first and dropped then.
#![allow(unsafe_code)]

use half::{bf16, f16};

use super::ahead::{Ahead, follow};
use super::row_set::RowSet;
use super::rows::{Lanes, Stored};
use super::vector::Vector;

/// A number type whose rows are factors of products. f64 is not: the oracle's tensors alone have it.
pub(crate) trait Factor: Stored {
    /// `count` numbers, at most `LANES`, and zeros.
    ///
    /// # Safety
    /// As [`Stored::load`], for so many.
    unsafe fn load_part<V: Lanes>(from: *const Self, count: usize) -> V;
    /// The products for this type.
    fn products(table: &ProductTables) -> &ProductTable<Self>;
}

/// The products of one instruction set and element type.
pub(crate) struct ProductTable<T> {
    pub(super) dots: unsafe fn(&RawDots<'_, T>),
    pub(super) accumulate: unsafe fn(&RawAccumulate<'_, T>),
}

/// The products of one instruction set.
pub(crate) struct ProductTables {
    pub(super) f32: ProductTable<f32>,
    pub(super) bf16: ProductTable<bf16>,
    pub(super) f16: ProductTable<f16>,
}

macro_rules! factor {
    ($type:ident, $part:ident) => {
        impl Factor for $type {
            #[inline(always)]
            unsafe fn load_part<V: Lanes>(from: *const Self, count: usize) -> V {
                // SAFETY: the caller's.
                unsafe { V::$part(from.cast(), count) }
            }
            fn products(table: &ProductTables) -> &ProductTable<Self> {
                &table.$type
            }
        }
    };
}

factor!(f32, load_part);
factor!(bf16, load_part_bf16);
factor!(f16, load_part_f16);

/// `S[query][key] = K[key] . Q[query]`.
///
/// # Safety
/// Rows of `keys` have `dims` values; `q` has `queries` rows of `dims` at stride `ldq`, `s` as many of
/// `keys.len()` at stride `lds`.
pub(super) struct RawDots<'a, T> {
    pub keys: RowSet<'a, T>,
    pub ahead: Ahead<'a, T>,
    pub dims: usize,
    pub queries: usize,
    pub q: *const f32,
    pub ldq: usize,
    pub s: *mut f32,
    pub lds: usize,
}

/// `O[query] += sum over keys of P[query][key] V[key]`.
///
/// # Safety
/// Rows of `values` have `dims` values; `p` has `queries` rows of `values.len()` at stride `ldp`, `o` as many
/// of `dims` at stride `ldo`.
pub(super) struct RawAccumulate<'a, T> {
    pub values: RowSet<'a, T>,
    pub ahead: Ahead<'a, T>,
    pub dims: usize,
    pub queries: usize,
    pub p: *const f32,
    pub ldp: usize,
    pub o: *mut f32,
    pub ldo: usize,
}

/// Scores of a few queries. Each sum is taken in one order, whatever the blocks.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, T: Factor>(call: &RawDots<'_, T>) {
    let mut query = 0;
    // SAFETY: `RawDots`'s contract; blocks stay within the queries.
    unsafe {
        if const { V::LANES == 16 } {
            while call.queries - query >= 4 {
                dots_of::<V, T, 4, 4, 16>(call, query);
                query += 4;
            }
            while call.queries - query >= 2 {
                dots_of::<V, T, 8, 2, 16>(call, query);
                query += 2;
            }
            if query < call.queries {
                dots_of::<V, T, 16, 1, 16>(call, query);
            }
            return;
        }
        while call.queries - query >= 2 {
            dots_of::<V, T, 4, 2, 8>(call, query);
            query += 2;
        }
        if query < call.queries {
            dots_of::<V, T, 8, 1, 8>(call, query);
        }
    }
}

/// All keys for `QUERIES` queries, in blocks of `KEYS`: `SUMS` sums, their product.
#[inline(always)]
unsafe fn dots_of<V: Vector, T: Factor, const KEYS: usize, const QUERIES: usize, const SUMS: usize>(
    call: &RawDots<'_, T>,
    query: usize,
) {
    const { assert!(SUMS == KEYS * QUERIES) }
    let ahead = if query == 0 { call.ahead } else { Ahead::Nothing };
    let (distance, mut parts) =
        (ahead.distance(&call.keys, call.dims), ahead.parts(call.keys.len().div_ceil(KEYS)));
    for key in (0..call.keys.len()).step_by(KEYS) {
        // SAFETY: `RawDots`'s contract; blocks begin within the keys.
        unsafe {
            parts.fetch::<V>();
            if V::PREFETCHES && distance.is_some() {
                dots_block::<V, T, KEYS, QUERIES, SUMS>(call, key, query, distance);
            } else {
                dots_block::<V, T, KEYS, QUERIES, SUMS>(call, key, query, None);
            }
        }
    }
}

/// Keys of a block at a time, whose addresses stay in registers.
const ROWS: usize = 8;

/// One block. Beyond the last key its row is read again, and the result dropped.
#[inline(always)]
unsafe fn dots_block<V: Vector, T: Factor, const KEYS: usize, const QUERIES: usize, const SUMS: usize>(
    call: &RawDots<'_, T>,
    key: usize,
    query: usize,
    distance: Option<isize>,
) {
    const { assert!(KEYS <= 2 * ROWS) }
    // SAFETY: `RawDots`'s contract; the block lies within keys and queries.
    unsafe {
        let count = KEYS.min(call.keys.len() - key);
        let mut sums = [V::splat(0.0); SUMS];
        // One after the other, no loop: the sums stay in registers.
        Sums::<V, KEYS, QUERIES, 0> { sums: &mut sums }.rows(call, key, query, distance);
        if const { KEYS > ROWS } {
            Sums::<V, KEYS, QUERIES, ROWS> { sums: &mut sums }.rows(call, key, query, distance);
        }
        let sums = V::sums(sums);
        for (j, sums) in sums.chunks(KEYS).enumerate() {
            let to = call.s.add((query + j) * call.lds + key);
            core::ptr::copy_nonoverlapping(sums.as_ptr(), to, count);
        }
    }
}

/// Sums of a block of keys and queries, of which the keys from `FIRST` on are at hand.
struct Sums<'a, V, const KEYS: usize, const QUERIES: usize, const FIRST: usize> {
    sums: &'a mut [V],
}

impl<V: Vector, const KEYS: usize, const QUERIES: usize, const FIRST: usize>
    Sums<'_, V, KEYS, QUERIES, FIRST>
{
    /// Adds the products of [`ROWS`] keys along their whole rows.
    #[inline(always)]
    unsafe fn rows<T: Factor>(
        &mut self,
        call: &RawDots<'_, T>,
        key: usize,
        query: usize,
        distance: Option<isize>,
    ) {
        // SAFETY: the caller's: the block lies within keys and queries.
        unsafe {
            let last = call.keys.len() - 1;
            let mut rows = [core::ptr::null(); ROWS];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = call.keys.row((key + FIRST + i.min(KEYS - 1)).min(last));
            }
            let rows = &rows[..ROWS.min(KEYS)];
            let (q, ldq) = (call.q.add(query * call.ldq), call.ldq);
            let whole = call.dims / V::LANES * V::LANES;
            // Along each row as far as Q fits the registers: memory is read in the order of its addresses.
            let mut d = 0;
            if const { QUERIES == 1 } {
                while whole - d >= 4 * V::LANES {
                    self.add::<T, 4>(rows, q, ldq, d, distance);
                    d += 4 * V::LANES;
                }
            }
            if const { QUERIES <= 2 } {
                while whole - d >= 2 * V::LANES {
                    self.add::<T, 2>(rows, q, ldq, d, distance);
                    d += 2 * V::LANES;
                }
            }
            while d < whole {
                self.add::<T, 1>(rows, q, ldq, d, distance);
                d += V::LANES;
            }
            if whole < call.dims {
                self.add_rest::<T>(rows, q, ldq, whole, call.dims - whole);
            }
        }
    }

    /// Adds the products of `REGISTERS` registers of each row from `d` on, and fetches what is at `distance`.
    #[inline(always)]
    unsafe fn add<T: Factor, const REGISTERS: usize>(
        &mut self,
        rows: &[*const T],
        q: *const f32,
        ldq: usize,
        d: usize,
        distance: Option<isize>,
    ) {
        // SAFETY: the caller's: rows and queries reach as far.
        unsafe {
            let mut of_queries = [[V::splat(0.0); REGISTERS]; QUERIES];
            for (j, of_query) in of_queries.iter_mut().enumerate() {
                for (r, register) in of_query.iter_mut().enumerate() {
                    *register = V::load(q.add(j * ldq + d + r * V::LANES));
                }
            }
            for (i, row) in rows.iter().enumerate() {
                let row = row.add(d);
                if let Some(distance) = distance {
                    follow::<V, T>(row, distance, REGISTERS * V::LANES);
                }
                for r in 0..REGISTERS {
                    let k = T::load::<V>(row.add(r * V::LANES));
                    for (j, of_query) in of_queries.iter().enumerate() {
                        let sum = &mut self.sums[j * KEYS + FIRST + i];
                        *sum = k.mul_add(of_query[r], *sum);
                    }
                }
            }
        }
    }

    /// The same for the `rest` columns from `d` on, which do not fill a register.
    #[inline(always)]
    unsafe fn add_rest<T: Factor>(
        &mut self,
        rows: &[*const T],
        q: *const f32,
        ldq: usize,
        d: usize,
        rest: usize,
    ) {
        // SAFETY: the caller's: rows and queries reach as far.
        unsafe {
            let mut of_queries = [V::splat(0.0); QUERIES];
            for (j, of_query) in of_queries.iter_mut().enumerate() {
                *of_query = V::load_part(q.add(j * ldq + d), rest);
            }
            for (i, row) in rows.iter().enumerate() {
                let k = T::load_part::<V>(row.add(d), rest);
                for (j, &of_query) in of_queries.iter().enumerate() {
                    let sum = &mut self.sums[j * KEYS + FIRST + i];
                    *sum = k.mul_add(of_query, *sum);
                }
            }
        }
    }
}

/// Adds weighted values for a few queries. Each sum is taken in the keys' order, whatever the blocks.
#[inline(always)]
pub(super) unsafe fn accumulate<V: Vector, T: Factor>(call: &RawAccumulate<'_, T>) {
    let mut query = 0;
    // SAFETY: `RawAccumulate`'s contract; blocks stay within the queries.
    unsafe {
        if const { V::LANES == 16 } {
            while call.queries - query >= 4 {
                accumulate_of::<V, T, 4, 4>(call, query);
                query += 4;
            }
        }
        while call.queries - query >= 2 {
            accumulate_of::<V, T, 2, 4>(call, query);
            query += 2;
        }
        if query < call.queries {
            accumulate_of::<V, T, 1, 8>(call, query);
        }
    }
}

#[inline(always)]
unsafe fn accumulate_of<V: Vector, T: Factor, const QUERIES: usize, const REGISTERS: usize>(
    call: &RawAccumulate<'_, T>,
    query: usize,
) {
    let mut column = 0;
    // SAFETY: `RawAccumulate`'s contract; blocks stay within the columns.
    unsafe {
        while call.dims - column >= REGISTERS * V::LANES {
            accumulate_block::<V, T, QUERIES, REGISTERS>(call, query, column);
            column += REGISTERS * V::LANES;
        }
        if const { REGISTERS > 4 } && call.dims - column >= 4 * V::LANES {
            accumulate_block::<V, T, QUERIES, 4>(call, query, column);
            column += 4 * V::LANES;
        }
        while call.dims - column >= 2 * V::LANES {
            accumulate_block::<V, T, QUERIES, 2>(call, query, column);
            column += 2 * V::LANES;
        }
        while call.dims - column >= V::LANES {
            accumulate_block::<V, T, QUERIES, 1>(call, query, column);
            column += V::LANES;
        }
        if column < call.dims {
            accumulate_rest::<V, T, QUERIES>(call, query, column);
        }
    }
}

#[inline(always)]
unsafe fn accumulate_block<V: Vector, T: Factor, const QUERIES: usize, const REGISTERS: usize>(
    call: &RawAccumulate<'_, T>,
    query: usize,
    column: usize,
) {
    // SAFETY: `RawAccumulate`'s contract; the block lies within queries and columns.
    unsafe {
        let (p, o) = (call.p.add(query * call.ldp), call.o.add(query * call.ldo + column));
        let mut sums = [[V::splat(0.0); REGISTERS]; QUERIES];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(o.add(i * call.ldo + r * V::LANES));
            }
        }
        // With `Follow` each column block fetches; otherwise rows are fetched once.
        let of_columns = column == 0 || matches!(call.ahead, Ahead::Follow);
        let ahead = if query == 0 && of_columns { call.ahead } else { Ahead::Nothing };
        let (distance, mut parts) = (ahead.distance(&call.values, call.dims), ahead.parts(call.values.len()));
        for key in 0..call.values.len() {
            let row = call.values.row(key).add(column);
            if let Some(distance) = distance {
                follow::<V, T>(row, distance, REGISTERS * V::LANES);
            }
            parts.fetch::<V>();
            let mut values = [V::splat(0.0); REGISTERS];
            for (r, value) in values.iter_mut().enumerate() {
                *value = T::load::<V>(row.add(r * V::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let p = V::splat(*p.add(i * call.ldp + key));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = p.mul_add(value, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (r, &sum) in sums.iter().enumerate() {
                sum.store(o.add(i * call.ldo + r * V::LANES));
            }
        }
    }
}

/// The columns that do not fill a register.
#[inline(always)]
unsafe fn accumulate_rest<V: Vector, T: Factor, const QUERIES: usize>(
    call: &RawAccumulate<'_, T>,
    query: usize,
    column: usize,
) {
    // SAFETY: `RawAccumulate`'s contract; no register has more than 16 lanes.
    unsafe {
        let rest = call.dims - column;
        let (p, o) = (call.p.add(query * call.ldp), call.o.add(query * call.ldo + column));
        let mut sums = [V::splat(0.0); QUERIES];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = V::load_part(o.add(i * call.ldo), rest);
        }
        for key in 0..call.values.len() {
            let value = T::load_part::<V>(call.values.row(key).add(column), rest);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = V::splat(*p.add(i * call.ldp + key)).mul_add(value, *sum);
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            let mut lanes = [0.0; 16];
            sum.store(lanes.as_mut_ptr());
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), o.add(i * call.ldo), rest);
        }
    }
}

//! The host memory of an append: new rows, a cache, tables and lengths drawn at random.

use fa_attn::device::Half;
use fa_attn::{AppendExtras, AppendTensors, Table, TensorLayout};
use fa_core::{Append, Dtype, Side, SideRows};
use fa_cpu::append::CacheMut;
use fa_cpu::{TensorMut, TensorRef};

use crate::error::Result;
use crate::random::Random;

/// Everything that an append reads and writes, tensors packed `[batch, rows, heads, dim]`.
#[derive(Clone, Debug)]
pub struct AppendInputs<T> {
    /// What is appended.
    pub append: Append,
    /// New keys and values, the caches of both (empty where these are of codes), and queries (empty for none).
    pub tensors: [Vec<T>; 5],
    /// The caches of codes; empty for none.
    codes: [Vec<u8>; 2],
    /// Their descales.
    descales: [Option<Vec<f32>>; 2],
    /// Cosines and sines in f32.
    exact: [Vec<f32>; 2],
    /// The same, rounded to the tensors' type.
    same: [Vec<T>; 2],
    /// Starts of packed new keys, and of queries that follow them.
    cu: Option<Vec<i32>>,
    /// New keys and queries in use.
    used: Option<Vec<i32>>,
    /// Keys in the cache before.
    pub seqused_k: Vec<i32>,
    page_table: Option<Vec<i32>>,
    /// Keys in the cache afterwards.
    pub used_out: Vec<i32>,
    /// Rows that the cache had no room for.
    pub dropped: usize,
}

fn shapes(append: &Append) -> [[usize; 4]; 5] {
    [
        append.new_shape(append.head_dim),
        append.new_shape(append.head_dim_v),
        append.cache_shape(append.head_dim),
        append.cache_shape(append.head_dim_v),
        append.query_shape(),
    ]
}

/// A cache as a call takes it.
fn cache<'a, T: Half>(
    name: &'static str,
    (same, codes): (&'a mut [T], &'a mut [u8]),
    shape: [usize; 4],
    of_codes: bool,
) -> Result<CacheMut<'a, T>> {
    let layout = TensorLayout::Bshd;
    Ok(match of_codes {
        true => CacheMut::Codes(TensorMut::packed(name, codes, shape, layout)?),
        false => CacheMut::Same(TensorMut::packed(name, same, shape, layout)?),
    })
}

impl<T: Half> AppendInputs<T> {
    /// Random rows. Some caches are empty and some nearly full, pages are in random order, and about one
    /// table entry in forty names no page.
    pub fn random(append: &Append, seed: u64) -> AppendInputs<T> {
        let mut random = Random::new(seed);
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let shapes = shapes(append);
        let of_codes = append.codes.is_some();
        let tensors = [0, 1, 2, 3, 4].map(|i| {
            let len = if of_codes && matches!(i, 2 | 3) { 0 } else { count(shapes[i]) };
            (0..len).map(|_| T::from_f32(random.normal())).collect()
        });
        let codes = [2, 3].map(|i| {
            let len = if of_codes { count(shapes[i]) } else { 0 };
            (0..len).map(|_| random.below(256) as u8).collect()
        });
        let [k, v] = [append.descales().k, append.descales().v].map(|form| append.descale_shape(form));
        let descales = [k, v].map(|shape| {
            let len = shape?.iter().product::<usize>();
            Some((0..len).map(|i| [0.01, 0.004, 0.0, 1e-30][(i + random.below(2)) % 4]).collect::<Vec<f32>>())
        });
        let entries = append.rotary.map_or(0, |rotary| rotary.positions * rotary.dim / 2);
        let half = append.rotary.map_or(1, |rotary| rotary.dim / 2);
        let angle = |i: usize| {
            let (position, pair) = (i / half, i % half);
            position as f32 * 10_000f32.powf(-(pair as f32) / half as f32)
        };
        let exact: [Vec<f32>; 2] =
            [f32::cos, f32::sin].map(|of| (0..entries).map(|i| of(angle(i))).collect());
        let same = [0, 1].map(|table: usize| exact[table].iter().map(|&value| T::from_f32(value)).collect());

        let (batch, room, most) = (append.sequences, append.cache.max(), append.new.max());
        let cu = match append.new.rows {
            SideRows::Packed { total, .. } => {
                let mut starts: Vec<i32> = (0..batch).map(|_| random.below(total + 1) as i32).collect();
                starts.sort_unstable();
                starts[0] = 0;
                // No sequence is longer than the bound; some rows follow the last one.
                for i in 1..batch {
                    starts[i] = starts[i].min(starts[i - 1] + most as i32);
                }
                let end = (starts[batch - 1] + most as i32).min(total as i32);
                starts.push(end);
                Some(starts)
            }
            SideRows::Padded { .. } | SideRows::Paged { .. } => None,
        };
        let used = append.new.used.then(|| (0..batch).map(|_| random.below(most + 1) as i32).collect());
        let seqused_k = (0..batch)
            .map(|sequence| match sequence % 4 {
                0 => 0,
                1 => room - most.min(room) / 2,
                _ => random.below(room),
            } as i32)
            .collect();
        let page_table = match append.cache.rows {
            SideRows::Paged { pages, .. } => {
                let order = random.order(pages);
                let entry = |i: usize| match random.below(40) {
                    0 => [-1, pages as i32][i % 2],
                    _ => order[i] as i32,
                };
                Some((0..batch * append.table_columns()).map(entry).collect())
            }
            SideRows::Padded { .. } | SideRows::Packed { .. } => None,
        };
        AppendInputs {
            append: *append,
            tensors,
            codes,
            descales,
            exact,
            same,
            cu,
            used,
            seqused_k,
            page_table,
            used_out: vec![0; batch],
            dropped: 0,
        }
    }

    /// Random rows that all fit: equal packed sequences, room behind each cache's keys, every page named
    /// once.
    pub fn fitting(append: &Append, seed: u64) -> AppendInputs<T> {
        let mut inputs = AppendInputs::random(append, seed);
        let mut random = Random::new(!seed);
        let (batch, room) = (append.sequences, append.cache.max());
        let most = append.new.max();
        if let Some(cu) = &mut inputs.cu {
            let total = append.new.total(batch);
            *cu = (0..=batch).map(|i| (i * total / batch) as i32).collect();
        }
        inputs.seqused_k = (0..batch).map(|_| random.below(room - most + 1) as i32).collect();
        if let (Some(table), SideRows::Paged { pages, .. }) = (&mut inputs.page_table, append.cache.rows) {
            let order = random.order(pages);
            table.iter_mut().zip(order).for_each(|(entry, page)| *entry = page as i32);
        }
        inputs
    }

    /// Calls `act` on views of the tensors, and keeps the number of dropped rows that it returns.
    ///
    /// # Errors
    /// Those of `act`, and tensors that are not of their shapes.
    pub fn with(
        &mut self,
        act: impl FnOnce(&mut AppendExtras<'_>, &mut AppendTensors<'_, T>) -> Result<usize>,
    ) -> Result<()> {
        let AppendInputs { append, tensors, codes, descales, exact, same, cu, used, .. } = self;
        let (seqused_k, used_out, dropped) = (&self.seqused_k, &mut self.used_out, &mut self.dropped);
        let [k_descale, v_descale] = descales;
        let is_packed = |side: Side| matches!(side.rows, SideRows::Packed { .. });
        let of_q = append.queries().map(|queries| queries.rows);
        let mut extras = AppendExtras {
            cu_new: cu.as_deref(),
            used_new: used.as_deref(),
            seqused_k: Some(seqused_k),
            page_table: self.page_table.as_deref(),
            cu_seqlens_q: cu.as_deref().filter(|_| of_q.is_some_and(is_packed)),
            seqused_q: used.as_deref().filter(|_| of_q.is_some_and(|side| side.used)),
            used_out: Some(used_out),
            k_descale: k_descale.as_deref_mut(),
            v_descale: v_descale.as_deref_mut(),
        };
        let is_f32 = append.rotary.is_some_and(|rotary| rotary.table == Dtype::F32);
        let tables = [0, 1]
            .map(|table: usize| if is_f32 { Table::F32(&exact[table]) } else { Table::Same(&same[table]) });
        let (shapes, layout) = (shapes(append), TensorLayout::Bshd);
        let [k_new, v_new, k_cache, v_cache, q] = tensors;
        let [k_codes, v_codes] = codes;
        let of_codes = append.codes.is_some();
        let q = append.queries().map(|_| TensorMut::packed("q", q, shapes[4], layout)).transpose()?;
        let mut tensors = AppendTensors {
            k_new: TensorRef::packed("k_new", k_new, shapes[0], layout)?,
            v_new: TensorRef::packed("v_new", v_new, shapes[1], layout)?,
            k_cache: cache("k_cache", (k_cache, k_codes), shapes[2], of_codes)?,
            v_cache: cache("v_cache", (v_cache, v_codes), shapes[3], of_codes)?,
            q,
            tables: append.rotary.map(|_| tables),
        };
        *dropped += act(&mut extras, &mut tensors)?;
        Ok(())
    }

    /// Appends on the CPU.
    ///
    /// # Errors
    /// None: the inputs are of the append's shapes.
    pub fn on_cpu(&mut self) -> Result<()> {
        let append = self.append;
        self.with(|extras, tensors| Ok(fa_attn::append(&append, extras, tensors)?))
    }

    /// The first bit difference from the results of another run, in words.
    pub fn difference(&self, other: &AppendInputs<T>) -> Option<String> {
        for (index, name) in [(2, "k_cache"), (3, "v_cache"), (4, "q")] {
            let (have, need) = (T::bits(&other.tensors[index]), T::bits(&self.tensors[index]));
            if have != need {
                let wrong = have.iter().zip(need).filter(|(have, need)| have != need).count();
                let first = have.iter().zip(need).position(|(have, need)| have != need).unwrap_or(0);
                let row = first / shapes(&self.append)[index][3];
                return Some(format!("{wrong} elements of {name} differ, the first in row {row}"));
            }
        }
        for (i, name) in ["k_cache", "v_cache"].into_iter().enumerate() {
            let (have, need) = (&other.codes[i], &self.codes[i]);
            if let Some(first) = have.iter().zip(need).position(|(have, need)| have != need) {
                let row = first / shapes(&self.append)[2 + i][3];
                return Some(format!("codes of {name} differ, the first in row {row}"));
            }
            let bits = |of: &Option<Vec<f32>>| -> Vec<u32> {
                of.iter().flatten().map(|value| value.to_bits()).collect()
            };
            let (have, need) = (bits(&other.descales[i]), bits(&self.descales[i]));
            if let Some(first) = have.iter().zip(&need).position(|(have, need)| have != need) {
                return Some(format!("descales of {name} differ, the first is {first}"));
            }
        }
        if self.used_out != other.used_out {
            return Some(format!("the lengths afterwards are {:?}, not {:?}", other.used_out, self.used_out));
        }
        let (have, need) = (other.dropped, self.dropped);
        (have != need).then(|| format!("{have} rows without a place were counted, not {need}"))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::grid::{Extent, serving};

    #[test]
    fn inputs_fit_their_appends_and_differ_where_a_bit_does() {
        let cases = serving(Extent::Full, 2);
        let appends: Vec<Append> = cases.iter().filter_map(|case| case.append).collect();
        assert!(appends.len() > 40, "{}", appends.len());
        let mut dropped = 0;
        let of_codes = appends.iter().filter(|append| append.codes.is_some()).count();
        assert!(of_codes > 12, "{of_codes}");
        for append in appends.iter().filter(|append| append.dtype == Dtype::Bf16) {
            let before = AppendInputs::<bf16>::random(append, 7);
            let mut after = before.clone();
            after.on_cpu().unwrap_or_else(|error| panic!("{append:?}: {error}"));
            dropped += after.dropped;
            assert!(before.difference(&after).is_some(), "{append:?} appends nothing");
            let mut again = before.clone();
            again.on_cpu().expect("as before");
            assert_eq!(after.difference(&again), None);
            if append.codes.is_some() {
                *again.codes[1].last_mut().expect("a cache") ^= 1;
                assert!(after.difference(&again).is_some_and(|text| text.contains("codes of v_cache")));
                continue;
            }
            let last = again.tensors[3].len() - 1;
            again.tensors[3][last] = bf16::from_bits(again.tensors[3][last].to_bits() ^ 1);
            assert!(after.difference(&again).is_some_and(|text| text.contains("1 elements of v_cache")));
        }
        assert!(dropped > 0, "some rows have no place");
    }
}

//! The location of each sequence's rows: lengths, starts and page table of a call, checked once.

use fa_core::program::{Inputs, Interned, Point};
use fa_core::{Alibi, DescaleForm, Extra, Pass, Problem, Side, SideRows};

use crate::check::{k_shape, q_shape};
use crate::error::CpuError;
use crate::extras::{Arguments, Extras, Within, check_extras};

/// Consecutive rows of a tensor `[batch, seqlen, heads, dim]` that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First index of the tensor: the sequence, 0 where sequences are packed. Unused for pages.
    pub batch: usize,
    /// Second index of the sequence's first row.
    pub first: usize,
    /// Rows of the sequence.
    pub len: usize,
}

/// The rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Rows of Q, O and their gradients.
    pub q: Span,
    /// Rows of K, V and their gradients.
    pub k: Span,
}

/// The sequences of a call.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// One for each sequence of the problem; none where all are of the same lengths and have no rows.
    pub sequences: Vec<Sequence>,
    pages: Option<Pages<'a>>,
    slopes: Option<(&'a [f32], usize)>,
    sinks: Option<&'a [f32]>,
    dlse: Option<Dlse<'a>>,
    program: Option<(Interned, Inputs<'a>)>,
    within: Within,
    /// Of each sequence the row of the page table, where it is another than its own.
    rows: Option<Vec<usize>>,
}

/// The gradient of the LSE.
#[derive(Clone, Copy, Debug)]
struct Dlse<'a> {
    values: &'a [f32],
    heads: usize,
    /// Rows of a head in the LSE.
    seqlen: usize,
}

/// The pages of all sequences.
#[derive(Clone, Copy, Debug)]
struct Pages<'a> {
    table: &'a [i32],
    /// Entries of a sequence.
    columns: usize,
    /// Rows of a page.
    page: usize,
}

impl<'a> Batch<'a> {
    /// Lengths and first rows of `problem`'s sequences, of a forward or a backward.
    ///
    /// # Errors
    /// Those of [`check_extras`]; [`CpuError::Sink`], [`CpuError::Descale`]; [`CpuError::Descending`],
    /// [`CpuError::Beyond`] and [`CpuError::Page`] for values that point outside the tensors;
    /// [`CpuError::Memory`].
    pub fn new(problem: &Problem, arguments: impl Into<Arguments<'a>>) -> Result<Batch<'a>, CpuError> {
        let arguments = arguments.into();
        let extras = &arguments.extras;
        let program = arguments.of_program(problem)?;
        check_extras(problem, Pass::BACKWARD, extras)?;
        check_sinks(extras.sinks.unwrap_or_default())?;
        let lengths = &problem.lengths;
        let count = lengths.sequences();
        // A tensor without elements may claim any number of sequences.
        let is_empty = lengths.is_uniform() && lengths.max_q() == 0 && lengths.max_k() == 0;
        let listed = if is_empty { 0 } else { count };
        let q = spans(
            lengths.q(),
            listed,
            [Extra::CuSeqlensQ, Extra::SequsedQ],
            [extras.cu_seqlens_q, extras.seqused_q],
        )?;
        let k = spans(
            lengths.k(),
            listed,
            [Extra::CuSeqlensK, Extra::SequsedK],
            [extras.cu_seqlens_k, extras.seqused_k],
        )?;
        let pages = match (lengths.k().rows, extras.page_table) {
            (SideRows::Paged { page, pages, .. }, Some(table)) => {
                let found = Pages { table, columns: lengths.table_columns(), page };
                found.check(&k, pages)?;
                Some(found)
            }
            _ => None,
        };
        let stride = if problem.score.alibi == Some(Alibi::PerSequenceHead) { problem.heads_q } else { 0 };
        let slopes = extras.alibi_slopes.map(|slopes| (slopes, stride));
        let [_, seqlen, heads, _] = q_shape(problem);
        let dlse = extras.dlse.map(|values| Dlse { values, heads, seqlen });
        let mut sequences = room(q.len())?;
        sequences.extend(q.into_iter().zip(k).map(|(q, k)| Sequence { q, k }));
        let batch = Batch {
            sequences,
            pages,
            slopes,
            sinks: extras.sinks,
            dlse,
            program,
            within: arguments.within,
            rows: None,
        };
        batch.check_descales(problem, extras)?;
        Ok(batch)
    }

    /// Descales are finite and not negative; of those of each row the rows that sequences have.
    fn check_descales(&self, problem: &Problem, extras: &Extras<'_>) -> Result<(), CpuError> {
        check_descales(Extra::QDescale.name(), extras.q_descale.unwrap_or_default(), 0)?;
        let (heads, [_, inner, ..]) = (problem.heads_kv, k_shape(problem));
        let forms = [
            (Extra::KDescale, problem.descales.k, extras.k_descale),
            (Extra::VDescale, problem.descales.v, extras.v_descale),
        ];
        for (extra, form, values) in forms {
            let values = values.unwrap_or_default();
            if form != DescaleForm::TokenHead {
                check_descales(extra.name(), values, 0)?;
                continue;
            }
            for (sequence, own) in self.sequences.iter().enumerate() {
                for (outer, at) in (0..own.k.len).map(|key| self.key(sequence, key)) {
                    let first = (outer * inner + at) * heads;
                    check_descales(extra.name(), &values[first..first + heads], first)?;
                }
            }
        }
        Ok(())
    }

    /// Other sequences over the same rows of K and V: with each the one whose keys it has some of.
    pub(crate) fn of_sequences(&self, sequences: Vec<Sequence>, rows: Vec<usize>) -> Batch<'a> {
        Batch { sequences, rows: Some(rows), ..self.clone() }
    }

    /// Whether all sequences are of the same lengths.
    pub fn is_even(&self) -> bool {
        let lengths = |sequence: &Sequence| (sequence.q.len, sequence.k.len);
        self.sequences.windows(2).all(|pair| lengths(&pair[0]) == lengths(&pair[1]))
    }

    /// Whether keys lie in pages.
    pub fn is_paged(&self) -> bool {
        self.pages.is_some()
    }

    /// First and second index, in the tensors of K and V, of a key of sequence `sequence`.
    pub fn key(&self, sequence: usize, key: usize) -> (usize, usize) {
        match &self.pages {
            Some(Pages { table, columns, page }) => {
                let row = self.rows.as_ref().map_or(sequence, |rows| rows[sequence]);
                (table[row * columns + key / page] as usize, key % page)
            }
            None => {
                let span = self.sequences[sequence].k;
                (span.batch, span.first + key)
            }
        }
    }

    /// The slope of a query head; 0 without ALiBi.
    pub fn slope(&self, sequence: usize, head: usize) -> f32 {
        self.slopes.map_or(0.0, |(slopes, stride)| slopes[sequence * stride + head])
    }

    /// The mask and change of scores of the caller's own, with what it reads.
    pub fn program(&self) -> Option<(Interned, &Inputs<'a>)> {
        self.program.as_ref().map(|(program, inputs)| (*program, inputs))
    }

    /// Where a head of a sequence is for a program: at its first query and key. `offset` is the mask's.
    pub(crate) fn point(&self, sequence: usize, [head, kv_head]: [usize; 2], offset: i64) -> Point {
        let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let Sequence { q, k, .. } = &self.sequences[sequence];
        let [sq, sk] = self.within.lengths.unwrap_or([q.len, k.len]).map(count);
        let [first, first_head, first_kv, first_q] = self.within.first.map(count);
        Point {
            b: first.wrapping_add(count(sequence)),
            h: first_head.wrapping_add(count(head)),
            hk: first_kv.wrapping_add(count(kv_head)),
            q: first_q,
            sq,
            sk,
            // The mask's offset counts from the queries of this part.
            off: count(k.len).wrapping_sub(count(q.len)).wrapping_add(offset as i32).wrapping_sub(first_q),
            ..Point::default()
        }
    }

    /// Where the problem is a part of a larger one.
    pub fn within(&self) -> Within {
        self.within
    }

    /// The sink of a query head.
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }

    /// The gradient of the LSE of a query head's rows of a sequence, where there is one.
    pub fn dlse(&self, sequence: usize, head: usize) -> Option<&'a [f32]> {
        let Dlse { values, heads, seqlen } = self.dlse?;
        let Span { batch, first, len } = self.sequences[sequence].q;
        let start = (batch * heads + head) * seqlen + first;
        Some(&values[start..start + len])
    }
}

impl Pages<'_> {
    /// The pages in use exist.
    fn check(&self, spans: &[Span], pages: usize) -> Result<(), CpuError> {
        for (sequence, span) in spans.iter().enumerate() {
            let row = &self.table[sequence * self.columns..][..span.len.div_ceil(self.page)];
            let outside = |&page: &i32| usize::try_from(page).map_or(true, |page| page >= pages);
            if let Some(entry) = row.iter().position(outside) {
                return Err(CpuError::Page { sequence, entry, page: row[entry], pages });
            }
        }
        Ok(())
    }
}

/// An empty list with room for `count` entries.
fn room<T>(count: usize) -> Result<Vec<T>, CpuError> {
    let mut list = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    list.try_reserve_exact(count).map_err(|_| CpuError::Memory { sequences: count, bytes })?;
    Ok(list)
}

/// Checks descales of which the first is element `first` of their tensor.
pub(crate) fn check_descales(name: &'static str, descales: &[f32], first: usize) -> Result<(), CpuError> {
    let is_refused = |descale: &f32| !(*descale >= 0.0 && descale.is_finite());
    let refused = descales.iter().position(is_refused);
    refused.map_or(Ok(()), |at| Err(CpuError::Descale { name, index: first + at, value: descales[at] }))
}

/// Checks that no sink is +inf, of which softmax has no value: every probability is 0 and so is its gradient.
pub(crate) fn check_sinks(sinks: &[f32]) -> Result<(), CpuError> {
    let refused = sinks.iter().position(|&sink| sink == f32::INFINITY);
    refused.map_or(Ok(()), |index| Err(CpuError::Sink { index }))
}

/// The rows of every sequence on one side, whose `cu` and `used` are as long as the problem says.
fn spans(
    side: Side,
    count: usize,
    names: [Extra; 2],
    [cu, used]: [Option<&[i32]>; 2],
) -> Result<Vec<Span>, CpuError> {
    let [cu_name, used_name] = names.map(Extra::name);
    let mut spans: Vec<Span> = match (side.rows, cu) {
        (SideRows::Packed { total, .. }, Some(cu)) => {
            let beyond = |index, limit| CpuError::Beyond { name: cu_name, index, value: cu[index], limit };
            if cu[0] < 0 {
                return Err(beyond(0, total));
            }
            let mut spans = room(count)?;
            for (index, pair) in cu.windows(2).enumerate() {
                let (first, end) = (pair[0] as usize, pair[1] as usize);
                if pair[1] < pair[0] {
                    let [before, after] = [pair[0], pair[1]];
                    return Err(CpuError::Descending { name: cu_name, index, before, after });
                }
                if end > total {
                    return Err(beyond(index + 1, total));
                }
                spans.push(Span { batch: 0, first, len: end - first });
            }
            if cu[0] as usize > total {
                return Err(beyond(0, total));
            }
            spans
        }
        _ => {
            let mut spans = room(count)?;
            spans.extend((0..count).map(|batch| Span { batch, first: 0, len: side.max() }));
            spans
        }
    };
    if let Some(used) = used {
        for (index, (span, &value)) in spans.iter_mut().zip(used).enumerate() {
            match usize::try_from(value) {
                Ok(len) if len <= span.len => span.len = len,
                _ => return Err(CpuError::Beyond { name: used_name, index, value, limit: span.len }),
            }
        }
    }
    // The bound is one on the rows in use: starts may leave room for more.
    let max = side.max();
    if let Some((sequence, span)) = spans.iter().enumerate().find(|(_, span)| span.len > max) {
        let name = if used.is_some() { used_name } else { cu_name };
        return Err(CpuError::TooLong { name, sequence, len: span.len, max });
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use fa_core::{Descales, Dtype, Lengths, Mask, ScoreMod, Types};

    use super::*;

    fn problem(lengths: Lengths) -> Problem {
        Problem::square(1, 1, 2, 4, Mask::FULL, Dtype::F32).with_lengths(lengths)
    }

    #[test]
    fn packed_sequences_start_where_cu_seqlens_says() {
        let packed = problem(Lengths::packed(3, 10, 8, 5, 6));
        let extras =
            Extras { cu_seqlens_q: Some(&[0, 4, 4, 9]), cu_seqlens_k: Some(&[1, 1, 7, 8]), ..Extras::NONE };
        let batch = Batch::new(&packed, &extras).unwrap();
        let span = |first, len| Span { batch: 0, first, len };
        let expected = [(span(0, 4), span(1, 0)), (span(4, 0), span(1, 6)), (span(4, 5), span(7, 1))];
        assert_eq!(batch.sequences, expected.map(|(q, k)| Sequence { q, k }));
        assert_eq!(batch.key(1, 5), (0, 6));
        let refused = |cu_seqlens_q: &[i32]| {
            Batch::new(&packed, &Extras { cu_seqlens_q: Some(cu_seqlens_q), ..extras }).unwrap_err()
        };
        assert_eq!(refused(&[0, 4, 9]), CpuError::Length { buffer: "cu_seqlens_q", got: 3, need: 4 });
        assert_eq!(
            refused(&[0, 4, 3, 9]),
            CpuError::Descending { name: "cu_seqlens_q", index: 1, before: 4, after: 3 }
        );
        assert_eq!(
            refused(&[0, 4, 9, 11]),
            CpuError::Beyond { name: "cu_seqlens_q", index: 3, value: 11, limit: 10 }
        );
        assert_eq!(
            refused(&[-1, 4, 8, 9]),
            CpuError::Beyond { name: "cu_seqlens_q", index: 0, value: -1, limit: 10 }
        );
        assert_eq!(
            refused(&[0, 6, 8, 9]),
            CpuError::TooLong { name: "cu_seqlens_q", sequence: 0, len: 6, max: 5 }
        );
        assert_eq!(
            Batch::new(&packed, &Extras { cu_seqlens_q: None, ..extras }).unwrap_err(),
            CpuError::Extra { name: "cu_seqlens_q", asked: true }
        );
        assert_eq!(
            Batch::new(&packed, &Extras { sinks: Some(&[0.0; 2]), ..extras }).unwrap_err(),
            CpuError::Extra { name: "sinks", asked: false }
        );
    }

    #[test]
    fn the_bound_is_one_on_the_rows_in_use() {
        let packed = problem(Lengths::of(2, Side::packed(12, 5).with_used(), Side::packed(8, 6)));
        let with = |used: &[i32]| {
            let starts = (Some(&[0, 7, 12][..]), Some(&[0, 4, 8][..]));
            let extras = Extras { cu_seqlens_q: starts.0, cu_seqlens_k: starts.1, ..Extras::NONE };
            Batch::new(&packed, &Extras { seqused_q: Some(used), ..extras })
                .map(|batch| batch.sequences.iter().map(|sequence| sequence.q.len).collect::<Vec<_>>())
        };
        assert_eq!(with(&[5, 4]), Ok(vec![5, 4]));
        assert_eq!(with(&[6, 4]), Err(CpuError::TooLong { name: "seqused_q", sequence: 0, len: 6, max: 5 }));
        assert_eq!(with(&[5, 6]), Err(CpuError::Beyond { name: "seqused_q", index: 1, value: 6, limit: 5 }));
    }

    #[test]
    fn sequences_without_rows_take_no_memory() {
        let claimed = problem(Lengths::uniform(1 << 44, 0, 0));
        assert_eq!(claimed.check(), Ok(()));
        assert!(Batch::new(&claimed, &Extras::NONE).unwrap().sequences.is_empty());
        assert_eq!(
            Batch::new(&claimed, &Extras { seqused_q: Some(&[]), ..Extras::NONE }).unwrap_err(),
            CpuError::Extra { name: "seqused_q", asked: false }
        );
    }

    #[test]
    fn used_lengths_and_pages_are_checked_as_far_as_they_are_used() {
        let paged = problem(Lengths::of(2, Side::padded(1), Side::paged(4, 3, 9)));
        let table = [2, 0, -7, 1, 99, 99];
        let extras = Extras { seqused_k: Some(&[7, 4]), page_table: Some(&table), ..Extras::NONE };
        let batch = Batch::new(&paged, &extras).unwrap();
        assert_eq!([batch.key(0, 3), batch.key(0, 5), batch.key(1, 0)], [(2, 3), (0, 1), (1, 0)]);
        let used = |used: &[i32]| {
            Batch::new(&paged, &Extras { seqused_k: Some(used), page_table: Some(&table), ..extras })
                .unwrap_err()
        };
        assert_eq!(used(&[9, 4]), CpuError::Page { sequence: 0, entry: 2, page: -7, pages: 3 });
        assert_eq!(used(&[7, 5]), CpuError::Page { sequence: 1, entry: 1, page: 99, pages: 3 });
        assert_eq!(used(&[7, 10]), CpuError::Beyond { name: "seqused_k", index: 1, value: 10, limit: 9 });
        assert_eq!(used(&[-1, 4]), CpuError::Beyond { name: "seqused_k", index: 0, value: -1, limit: 9 });
        assert_eq!(
            Batch::new(&paged, &Extras { page_table: Some(&table[..5]), ..extras }).unwrap_err(),
            CpuError::Length { buffer: "page_table", got: 5, need: 6 }
        );
    }

    #[test]
    fn descales_are_finite_and_not_negative() {
        let types = Types::same(Dtype::F32).with_kv(Dtype::E4m3);
        let paged = problem(Lengths::of(1, Side::padded(1), Side::paged(2, 2, 4))).with_types(types);
        let extras = Extras { seqused_k: Some(&[3]), page_table: Some(&[1, 0]), ..Extras::NONE };
        let made = |problem: &Problem, k: &[f32], v: &[f32]| {
            let extras = Extras { k_descale: Some(k), v_descale: Some(v), ..extras };
            Batch::new(problem, &extras).map(|_| ())
        };
        let refused = |name, index, value| Err(CpuError::Descale { name, index, value });
        let of_heads = paged.with_descales(Descales::both(DescaleForm::Head));
        let fine = [0.0, 1e-40];
        assert_eq!(made(&of_heads, &fine, &fine), Ok(()));
        assert_eq!(made(&of_heads, &[1.0, -0.5], &fine), refused("k_descale", 1, -0.5));
        assert_eq!(made(&of_heads, &fine, &[f32::INFINITY, 1.0]), refused("v_descale", 0, f32::INFINITY));
        let nan = made(&of_heads, &[f32::NAN, 1.0], &fine).expect_err("NaN");
        assert_eq!(
            nan.to_string(),
            "k_descale[0] = NaN: a descale is a finite number of 0 or more; move a sign to the codes"
        );
        // Of each row: key 2 is row 0 of page 0, whose row 1 no sequence has.
        let of_rows = paged.with_descales(Descales::both(DescaleForm::TokenHead));
        let mut rows = [1.0; 8];
        (rows[2], rows[3]) = (f32::NAN, -1.0);
        assert_eq!(made(&of_rows, &rows, &[1.0; 8]), Ok(()));
        rows[1] = -3.0;
        assert_eq!(made(&of_rows, &rows, &[1.0; 8]), refused("k_descale", 1, -3.0));
    }

    #[test]
    fn slopes_and_sinks_have_a_value_per_head() {
        let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        let problem = problem(Lengths::uniform(2, 1, 1)).with_score(score);
        let extras =
            Extras { alibi_slopes: Some(&[1.0, 2.0, 3.0, 4.0]), sinks: Some(&[5.0, 6.0]), ..Extras::NONE };
        let batch = Batch::new(&problem, &extras).unwrap();
        assert_eq!((batch.slope(1, 0), batch.sink(1)), (3.0, Some(6.0)));
        let endless = [f32::NEG_INFINITY, f32::INFINITY];
        for (sinks, refused) in [([f32::NEG_INFINITY, 6.0], None), (endless, Some(1))] {
            let made = Batch::new(&problem, &Extras { sinks: Some(&sinks), ..extras });
            assert_eq!(made.err(), refused.map(|index| CpuError::Sink { index }));
        }
        let per_head = problem.with_score(score.with_alibi(Some(Alibi::PerHead)));
        assert_eq!(
            Batch::new(&per_head, &extras).unwrap_err(),
            CpuError::Length { buffer: "alibi_slopes", got: 4, need: 2 }
        );
        assert_eq!(
            Batch::new(&problem, &Extras::NONE).unwrap_err(),
            CpuError::Extra { name: "alibi_slopes", asked: true }
        );
    }
}

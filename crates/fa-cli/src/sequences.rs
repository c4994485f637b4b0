//! A file's tensors besides q, k and v: packed sequences, lengths in use, pages, slopes, sinks and descales.

use fa_core::extras::{Axis, Extra, Extras, HostExtras, OwnedExtras, Value};
use fa_core::{Alibi, DescaleForm, Descales, Lengths, Pass, Problem, ScoreMod, Side, SideRows, TensorLayout};
use fa_cpu::CpuError;
use fa_cpu::batch::{Batch, Span};

use crate::named_rows::{INDICES, NamedRows};
use crate::names::USED_K;
use crate::safetensors::{NewTensor, Plain, TensorFile};
use crate::term::failure::InputError;

/// The tensors beside q, k and v, as the file has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SideTensors {
    /// Lengths, pages, slopes and sinks; `seqused_k` may be called `cache_seqlens`.
    pub values: OwnedExtras,
    /// Which of the two names it has.
    used_k_name: &'static str,
    /// Their shapes.
    shapes: Extras<Vec<usize>>,
    /// Whether each query names the rows that it sees, as a sequence of its own with pages of one row.
    pub named: bool,
}

impl SideTensors {
    /// Reads those that the file has.
    ///
    /// # Errors
    /// [`InputError`] for a tensor of a wrong type or rank, and for tensors that do not go together.
    pub(crate) fn read(file: &TensorFile, layout: TensorLayout) -> Result<SideTensors, InputError> {
        let named = NamedRows::read(file, layout)?;
        let seqused_k = match USED_K.map(|name| file.has(name)) {
            [true, true] => {
                return Err(InputError::Usage(
                    "the file has seqused_k and cache_seqlens, two names of the same tensor: leave one out"
                        .to_owned(),
                ));
            }
            [false, true] => USED_K[1],
            _ => USED_K[0],
        };
        if file.has("page_table") && file.has("cu_seqlens_k") {
            return Err(InputError::Usage(
                "the file has page_table and cu_seqlens_k: keys are in pages or packed, not both".to_owned(),
            ));
        }
        if file.has("page_table") && !file.has(seqused_k) {
            return Err(InputError::Usage(
                "the file has page_table, but no cache_seqlens (or seqused_k), i32 [batch]: keys in pages \
                 need their lengths"
                    .to_owned(),
            ));
        }
        let found = Extras::try_of(
            |extra| read_extra::<i32>(file, extra, name_of(extra, seqused_k)),
            |extra| read_extra::<f32>(file, extra, name_of(extra, seqused_k)),
        )?;
        let mut sides = SideTensors {
            used_k_name: seqused_k,
            shapes: found.as_ref().map(|_, (_, shape)| shape.clone(), |_, (_, shape)| shape.clone()),
            values: found.map(|_, (values, _)| values, |_, (values, _)| values),
            named: named.is_some(),
        };
        if let Some(named) = named {
            sides.name_rows(named);
        }
        Ok(sides)
    }

    /// Describes queries that name their rows as sequences in pages of one row.
    fn name_rows(&mut self, NamedRows { table, most, used, starts }: NamedRows) {
        self.shapes.cu_seqlens_q = Some(vec![starts.len()]);
        self.shapes.page_table = Some(vec![used.len(), most]);
        self.shapes.seqused_k = Some(vec![used.len()]);
        self.values.cu_seqlens_q = Some(starts);
        self.values.page_table = Some(table);
        self.values.seqused_k = Some(used);
        // Of each row of the cache.
        for shape in [&mut self.shapes.k_descale, &mut self.shapes.v_descale].into_iter().flatten() {
            if let [pages, page, heads] = shape[..] {
                *shape = vec![pages.saturating_mul(page), 1, heads];
            }
        }
    }

    /// The tensor that makes queries packed.
    pub(crate) fn starts_of_q(&self) -> &'static str {
        if self.named { INDICES } else { "cu_seqlens_q" }
    }

    /// The shape of a cache `[pages, page, heads, dim]` as the problem has it.
    pub(crate) fn of_cache(&self, [pages, page, heads, dim]: [usize; 4]) -> [usize; 4] {
        if self.named { [pages.saturating_mul(page), 1, heads, dim] } else { [pages, page, heads, dim] }
    }

    /// Takes out `k_descale`, of one element where there is one.
    ///
    /// # Errors
    /// [`InputError`] for more elements, and for a number that is no descale.
    pub(crate) fn take_k_descale(&mut self) -> Result<Option<f32>, InputError> {
        let (shape, values) = (self.shapes.k_descale.take(), self.values.k_descale.take());
        match (shape, values.as_deref()) {
            (Some(_), Some(&[one])) if one.is_finite() && one >= 0.0 => Ok(Some(one)),
            (Some(_), Some(&[one])) => Err(InputError::Usage(format!(
                "tensor 'k_descale': it is {one}, it must be finite and not negative"
            ))),
            (Some(got), Some(_)) => {
                let need = "beside packed rows it must be one number, [1]".to_owned();
                Err(InputError::Shape { name: "k_descale".to_owned(), got, need })
            }
            (_, None) | (None, _) => Ok(None),
        }
    }

    /// Those of a problem of equal lengths for timing: its descales, and its pages in order.
    pub(crate) fn even(problem: &Problem) -> SideTensors {
        SideTensors { values: OwnedExtras::even(problem), ..SideTensors::default() }
    }

    /// As arguments of a call.
    pub(crate) fn extras(&self) -> HostExtras<'_> {
        self.values.view()
    }

    /// The name of one of the file's tensors.
    fn name_of(&self, extra: Extra) -> &'static str {
        name_of(extra, self.used_k_name)
    }

    /// Starts, lengths and pages, as tensors of a file.
    pub(crate) fn lengths_and_pages(&self) -> Vec<NewTensor> {
        let integers = self.values.iter().filter_map(|(extra, values)| match values {
            Value::I32(values) => Some((extra, values)),
            Value::F32(_) => None,
        });
        let found = integers.filter_map(|(extra, values)| {
            let shape = self.shapes.get(extra)?.into_inner();
            Some(NewTensor::new(self.name_of(extra), shape, values))
        });
        found.collect()
    }

    /// Whether queries and keys are `[batch, seqlen, heads, head_dim]`.
    pub(crate) fn are_padded(&self) -> bool {
        self.values.cu_seqlens_q.is_none()
            && self.values.cu_seqlens_k.is_none()
            && self.values.page_table.is_none()
    }

    /// Slopes and sinks are those of `heads_q` heads.
    ///
    /// # Errors
    /// [`InputError::Shape`].
    pub(crate) fn check_heads(&self, heads_q: usize) -> Result<(), InputError> {
        for (extra, shape) in self.shapes.iter() {
            let shape = shape.into_inner();
            let axes = extra.axes(shape.len()).unwrap_or_default();
            if axes.last() == Some(&Axis::HeadsQ) && shape.last() != Some(&heads_q) {
                let need = format!("its last axis must be {heads_q}, the heads of q");
                return Err(InputError::Shape { name: extra.name().to_owned(), got: shape.clone(), need });
            }
        }
        Ok(())
    }

    /// The descales, as tensors of a file.
    pub(crate) fn descale_tensors(&self) -> Vec<NewTensor> {
        let descales = self.values.iter().filter_map(|(extra, values)| match values {
            Value::F32(values) if is_descale(extra) => Some((extra, values)),
            Value::F32(_) | Value::I32(_) => None,
        });
        let found = descales.filter_map(|(extra, values)| {
            let shape = self.shapes.get(extra)?.into_inner();
            Some(NewTensor::new(extra.name(), shape, values))
        });
        found.collect()
    }

    /// The forms of the descales that there are.
    pub(crate) fn descales(&self, lengths: &Lengths) -> Descales {
        let form = |shape: &Option<Vec<usize>>| {
            let of = |shape: &Vec<usize>| DescaleForm::of_shape(shape, lengths.k(), lengths.sequences());
            shape.as_ref().map_or(DescaleForm::None, of)
        };
        let of_q = self.shapes.q_descale.as_ref().map_or(DescaleForm::None, |shape| match shape[..] {
            [] | [_] => DescaleForm::Head,
            _ => DescaleForm::SequenceHead,
        });
        Descales::new(form(&self.shapes.k_descale), form(&self.shapes.v_descale)).with_q(of_q)
    }

    /// The descales are of the problem's keys and heads.
    ///
    /// # Errors
    /// [`InputError::Shape`].
    pub(crate) fn check_descales(&self, problem: &Problem) -> Result<(), InputError> {
        for (extra, shape) in self.shapes.iter().filter(|(extra, _)| is_descale(*extra)) {
            let got = shape.into_inner();
            let axes = extra.axes_of(problem).unwrap_or_default();
            let need: Vec<usize> = axes.iter().map(|axis| axis.len(problem)).collect();
            if *got != need {
                let named: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
                let need = format!("it must be {need:?}, [{}]", named.join(", "));
                return Err(InputError::Shape { name: extra.name().to_owned(), got: got.clone(), need });
            }
        }
        Ok(())
    }

    /// The changes of scores that the tensors ask for, beside a soft cap.
    pub(crate) fn score(&self, softcap: Option<f64>) -> ScoreMod {
        let alibi = self.shapes.alibi_slopes.as_ref().map(|shape| match shape.len() {
            1 => Alibi::PerHead,
            _ => Alibi::PerSequenceHead,
        });
        ScoreMod::NONE.with_softcap(softcap).with_alibi(alibi).with_sinks(self.values.sinks.is_some())
    }

    /// The lengths of the problem, whose Q and K have the shapes `q` and `k` as [`shape_of`] gives them.
    ///
    /// # Errors
    /// [`InputError::Shape`] for tensors that contradict each other about the batch.
    pub(crate) fn lengths(&self, q: [usize; 4], k: [usize; 4]) -> Result<Lengths, InputError> {
        let refuse =
            |name: &str, got: Vec<usize>, need| Err(InputError::Shape { name: name.to_owned(), got, need });
        // The batch, and the tensor that says so.
        let (batch, from) = match self.values.cu_seqlens_q.as_deref() {
            Some([]) => {
                return refuse("cu_seqlens_q", vec![0], "it must have batch + 1 entries".to_owned());
            }
            Some(starts) => (starts.len() - 1, "cu_seqlens_q"),
            None => (q[0], "q"),
        };
        let wrong = |name: &str, got: &[usize], need: usize| {
            let need = format!("its first axis must be {need}: {from} gives a batch of {batch}");
            refuse(name, got.to_vec(), need)
        };
        for (extra, shape) in self.shapes.iter() {
            let shape = shape.into_inner();
            // Of descales the form depends on these lengths.
            if is_descale(extra) {
                continue;
            }
            let axes = extra.axes(shape.len()).unwrap_or_default();
            let need = match axes.first() {
                Some(Axis::Starts) => batch + 1,
                Some(Axis::Batch) => batch,
                Some(
                    Axis::Pages
                    | Axis::HeadsQ
                    | Axis::SeqlenQ
                    | Axis::TotalQ
                    | Axis::HeadsKv
                    | Axis::SeqlenK
                    | Axis::TotalK
                    | Axis::CachePages
                    | Axis::Page,
                )
                | None => continue,
            };
            if shape[0] != need {
                return wrong(self.name_of(extra), shape, need);
            }
        }
        if self.values.cu_seqlens_k.is_none() && self.values.page_table.is_none() && k[0] != batch {
            return wrong("k", &k, batch);
        }
        let side = |cu: Option<&[i32]>, [_, rows, ..]: [usize; 4]| match cu {
            Some(starts) => Side::packed(rows, longest(starts)),
            None => Side::padded(rows),
        };
        let used = |side: Side, used: bool| if used { side.with_used() } else { side };
        let keys = match self.shapes.page_table.as_deref() {
            Some(&[_, columns]) => Side::paged(k[1], k[0], columns.saturating_mul(k[1])),
            _ => side(self.values.cu_seqlens_k.as_deref(), k),
        };
        let queries = side(self.values.cu_seqlens_q.as_deref(), q);
        Ok(Lengths::of(
            batch,
            used(queries, self.values.seqused_q.is_some()),
            used(keys, self.values.seqused_k.is_some()),
        ))
    }

    /// Where the sequences of `problem` lie, checked: the device's kernels trust these tensors.
    ///
    /// # Errors
    /// [`InputError::Usage`] for starts, lengths and pages that point outside the tensors.
    pub(crate) fn sequences(&self, problem: &Problem) -> Result<Sequences, InputError> {
        // What a program reads says nothing about sequences.
        let plain = problem.with_score(problem.score.with_program(None));
        let batch = Batch::new(&plain, &self.extras()).map_err(|error| self.named(&error))?;
        let lengths = &problem.lengths;
        Ok(Sequences {
            counts: batch.sequences.iter().map(|sequence| [sequence.q.len, sequence.k.len]).collect(),
            q_rows: in_use(lengths.sequences(), lengths.q(), batch.sequences.iter().map(|one| one.q)),
            k_rows: in_use(lengths.sequences(), lengths.k(), batch.sequences.iter().map(|one| one.k)),
        })
    }

    /// An error about an argument of a call, with the name of the file's tensor.
    fn named(&self, error: &CpuError) -> InputError {
        let argument = match error {
            CpuError::Descending { name, .. }
            | CpuError::Beyond { name, .. }
            | CpuError::TooLong { name, .. }
            | CpuError::Descale { name, .. }
            | CpuError::Extra { name, .. } => name,
            CpuError::Length { buffer, .. } => buffer,
            CpuError::Page { .. } => "page_table",
            CpuError::Sink { .. } => "sinks",
            CpuError::Problem(_)
            | CpuError::Program(_)
            | CpuError::Append(_)
            | CpuError::Shape { .. }
            | CpuError::Dtype { .. }
            | CpuError::Codes { .. }
            | CpuError::OutOfBounds { .. }
            | CpuError::Overlap { .. }
            | CpuError::Memory { .. }
            | CpuError::LatentBackward
            | CpuError::PagedBackward
            | CpuError::Range { .. }
            | CpuError::Isa { .. } => return InputError::Usage(error.to_string()),
        };
        let tensor = if argument == Extra::SequsedK.name() { self.used_k_name } else { argument };
        InputError::Usage(format!("tensor '{tensor}': {error}"))
    }
}

/// The sequences of a file's problem; the default is that of a batch of equal lengths.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sequences {
    /// Queries and keys of each.
    pub counts: Vec<[usize; 2]>,
    /// For each row of the tensor of queries, whether it belongs to a sequence; `None` where all do.
    pub q_rows: Option<Vec<bool>>,
    /// The same of keys; `None` for a cache in pages as well.
    pub k_rows: Option<Vec<bool>>,
}

impl Sequences {
    /// The sum of `work` over the sequences.
    pub(crate) fn sum(&self, problem: &Problem, work: fn(&Problem) -> f64) -> f64 {
        if problem.lengths.is_uniform() {
            return work(problem);
        }
        let one = |&[q, k]: &[usize; 2]| work(&problem.with_lengths(Lengths::uniform(1, q, k)));
        // Not `sum`, which is -0 for an empty iterator.
        self.counts.iter().map(one).fold(0.0, |all, one| all + one)
    }
}

fn is_descale(extra: Extra) -> bool {
    matches!(extra, Extra::QDescale | Extra::KDescale | Extra::VDescale)
}

/// Rows of the longest of packed sequences.
fn longest(starts: &[i32]) -> usize {
    let rows = starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
    rows.filter_map(|rows| usize::try_from(rows).ok()).max().unwrap_or(0)
}

/// Which rows of a side's tensor belong to a sequence.
fn in_use(batch: usize, side: Side, spans: impl Iterator<Item = Span>) -> Option<Vec<bool>> {
    let rows_per_entry = match side.rows {
        SideRows::Padded { .. } if !side.used => return None,
        SideRows::Padded { len } => len,
        SideRows::Packed { .. } => 0,
        SideRows::Paged { .. } => return None,
    };
    let mut rows = vec![false; side.total(batch)];
    for span in spans {
        rows[span.batch * rows_per_entry + span.first..][..span.len].fill(true);
    }
    Some(rows)
}

/// Writes `value` over the rows of a tensor that are not in use. `shape` is `[batch, seqlen, heads, dim]`,
/// whatever the layout; `rows` are those of `[batch, seqlen]`.
pub(crate) fn blank<T: Copy>(
    values: &mut [T],
    shape: [usize; 4],
    layout: TensorLayout,
    rows: Option<&[bool]>,
    value: T,
) {
    let [_, seqlen, heads, dim] = shape;
    let strides = layout.strides(seqlen, heads, dim);
    let unused = rows.unwrap_or_default().iter().enumerate().filter(|(_, used)| !**used);
    for (row, _) in unused {
        for head in 0..heads {
            let at = strides.offset(row / seqlen, row % seqlen, head, 0) as usize;
            values[at..at + dim].fill(value);
        }
    }
}

/// A tensor's values and shape.
type Ranked<T> = (Vec<T>, Vec<usize>);

/// The name of a tensor in a file that calls the lengths of keys `seqused_k`.
fn name_of(extra: Extra, seqused_k: &'static str) -> &'static str {
    if extra == Extra::SequsedK { seqused_k } else { extra.name() }
}

/// A tensor called `name`, if the file has it: its values and shape.
fn read_extra<T: Plain>(
    file: &TensorFile,
    extra: Extra,
    name: &str,
) -> Result<Option<Ranked<T>>, InputError> {
    // The gradient of the LSE is not among a file's tensors.
    if !file.has(name) || !extra.is_read_by(Pass::Forward) {
        return Ok(None);
    }
    let shape = file.entry(name)?.shape.clone();
    if extra.axes(shape.len()).is_none() {
        let form = |axes: &&[Axis]| {
            format!("[{}]", axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(", "))
        };
        let forms: Vec<String> = extra.forms().iter().map(form).collect();
        let need = format!("it must be {}", forms.join(" or "));
        return Err(InputError::Shape { name: name.to_owned(), got: shape, need });
    }
    Ok(Some((file.read::<T>(name)?, shape)))
}

/// A tensor's `[batch, seqlen, heads, dim]`: `[1, total, heads, dim]` where `packed` names the tensor that
/// holds the sequences' starts, which makes the tensor one of rank 3.
///
/// # Errors
/// [`InputError::Shape`] for a tensor of another rank.
pub(crate) fn shape_of(
    file: &TensorFile,
    name: &str,
    layout: TensorLayout,
    starts: &'static str,
) -> Result<[usize; 4], InputError> {
    let shape = &file.entry(name)?.shape;
    let refuse = |need: String| InputError::Shape { name: name.to_owned(), got: shape.clone(), need };
    let rank = shape.len();
    let (batch, [first, second], dim) = match (file.has(starts), shape.as_slice()) {
        (true, &[first, second, dim]) => (1, [first, second], dim),
        (false, &[batch, first, second, dim]) => (batch, [first, second], dim),
        (true, _) => {
            let form = match layout {
                TensorLayout::Bshd => "[total, heads, dim]",
                TensorLayout::Bhsd => "[heads, total, dim]",
            };
            return Err(refuse(format!("its rank is {rank}, with {starts} it must be 3, {form}")));
        }
        (false, &[_, _, _]) => {
            let need = format!("its rank is 3, it must be 4, {layout}, or the file needs {starts}");
            return Err(refuse(need));
        }
        (false, _) => return Err(refuse(format!("its rank is {rank}, it must be 4, {layout}"))),
    };
    Ok(match layout {
        TensorLayout::Bshd => [batch, first, second, dim],
        TensorLayout::Bhsd => [batch, second, first, dim],
    })
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    fn sides(values: OwnedExtras) -> SideTensors {
        let shapes = values.as_ref().map(|_, values| vec![values.len()], |_, values| vec![values.len()]);
        SideTensors { values, shapes, ..SideTensors::default() }
    }

    fn problem(sides: &SideTensors, q: [usize; 4], k: [usize; 4]) -> Problem {
        let lengths = sides.lengths(q, k).unwrap();
        let square = Problem::square(1, 1, q[2], q[3], Mask::CAUSAL, Dtype::F32);
        square.with_lengths(lengths).with_heads_kv(k[2]).with_score(sides.score(None))
    }

    #[test]
    fn sequences_say_which_rows_they_use() {
        let packed = sides(OwnedExtras { cu_seqlens_q: Some(vec![0, 3, 3, 5]), ..OwnedExtras::NONE });
        let posed = problem(&packed, [1, 7, 2, 8], [3, 4, 2, 8]);
        assert_eq!((posed.lengths.q(), posed.lengths.k()), (Side::packed(7, 3), Side::padded(4)));
        let found = packed.sequences(&posed).unwrap();
        assert_eq!(found.counts, [[3, 4], [0, 4], [2, 4]]);
        assert_eq!(found.q_rows.as_deref().unwrap(), [true, true, true, true, true, false, false]);
        assert_eq!(found.k_rows, None);
        // Causal, 3 queries on 4 keys and 2 on 4, 2 heads: 2 + 3 + 4 and 3 + 4 pairs a head.
        assert_eq!(found.sum(&posed, Problem::pairs), 32.0);
        let none = sides(OwnedExtras {
            cu_seqlens_q: Some(vec![0]),
            cu_seqlens_k: Some(vec![0]),
            ..OwnedExtras::NONE
        });
        let posed = problem(&none, [1, 7, 2, 8], [1, 4, 2, 8]);
        let work = none.sequences(&posed).unwrap().sum(&posed, Problem::pairs);
        assert_eq!(work.to_bits(), 0f64.to_bits());

        let used = sides(OwnedExtras { seqused_q: Some(vec![1, 0, 2]), ..packed.values });
        let found = used.sequences(&problem(&used, [1, 7, 2, 8], [3, 4, 2, 8])).unwrap();
        assert_eq!(found.q_rows.unwrap(), [true, false, false, true, true, false, false]);

        let padded = sides(OwnedExtras { seqused_k: Some(vec![3, 4]), ..OwnedExtras::NONE });
        let found = padded.sequences(&problem(&padded, [2, 1, 2, 8], [2, 4, 2, 8])).unwrap();
        assert_eq!((found.counts, found.q_rows), (vec![[1, 3], [1, 4]], None));
        assert_eq!(found.k_rows.unwrap(), [true, true, true, false, true, true, true, true]);
    }

    #[test]
    fn a_cache_in_pages_reaches_as_far_as_its_table() {
        let with_keys = |seqused_k: [i32; 2]| SideTensors {
            values: OwnedExtras {
                seqused_k: Some(seqused_k.to_vec()),
                page_table: Some(vec![4, -1, -1, 0, 1, 2]),
                ..OwnedExtras::NONE
            },
            used_k_name: "cache_seqlens",
            shapes: Extras { seqused_k: Some(vec![2]), page_table: Some(vec![2, 3]), ..Extras::NONE },
            named: false,
        };
        let paged = with_keys([3, 40]);
        let posed = problem(&paged, [2, 1, 2, 8], [5, 16, 2, 8]);
        assert_eq!(posed.lengths.k(), Side::paged(16, 5, 48));
        assert_eq!(paged.sequences(&posed).unwrap().counts, [[1, 3], [1, 40]]);
        let error = paged.lengths([3, 1, 2, 8], [5, 16, 2, 8]).unwrap_err().to_string();
        assert!(error.contains("its first axis must be 3: q gives a batch of 3"), "{error}");
        let longer = with_keys([17, 40]);
        let error = longer.sequences(&posed).unwrap_err().to_string();
        assert!(error.contains("tensor 'page_table': entry 1 of sequence 0"), "{error}");
        let longer = with_keys([49, 40]);
        let error = longer.sequences(&posed).unwrap_err().to_string();
        assert!(error.contains("tensor 'cache_seqlens': ") && error.contains("49"), "{error}");
    }

    #[test]
    fn rows_that_are_nobodys_are_blanked_in_either_layout() {
        let rows = [true, false];
        let mut values = [1; 8];
        blank(&mut values, [1, 2, 2, 2], TensorLayout::Bshd, Some(&rows), 0);
        assert_eq!(values, [1, 1, 1, 1, 0, 0, 0, 0]);
        let mut values = [1; 8];
        blank(&mut values, [1, 2, 2, 2], TensorLayout::Bhsd, Some(&rows), 0);
        assert_eq!(values, [1, 1, 0, 0, 1, 1, 0, 0]);
        blank(&mut values, [1, 2, 2, 2], TensorLayout::Bhsd, None, 7);
        assert_eq!(values, [1, 1, 0, 0, 1, 1, 0, 0]);
    }
}

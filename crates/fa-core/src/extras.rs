//! The tensors of a call besides Q, K, V and O, in one table. Whatever checks, copies or passes them goes
//! through the table.

use std::convert::Infallible;

use crate::{Alibi, DescaleForm, Pass, Problem, Side, SideRows};

/// Picks the argument for an element type.
macro_rules! of_elem {
    (I32, $i32:expr, $f32:expr) => {
        $i32
    };
    (F32, $i32:expr, $f32:expr) => {
        $f32
    };
}

/// Declares the table, from rows `variant field: element type, axes of each form, which form a problem has`.
macro_rules! table {
    ($($(#[$doc:meta])+ $extra:ident $field:ident: $elem:ident $($axes:expr),+ => $form:expr;)+) => {
        /// One of the tensors of a call that only some problems have: the name of a field of [`Extras`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Extra {
            $($(#[$doc])+ $extra,)+
        }

        impl Extra {
            /// All, in the order of the fields of [`Extras`].
            pub const ALL: [Extra; [$(Extra::$extra),+].len()] = [$(Extra::$extra),+];

            /// The name of the field, and of the argument in errors.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Extra::$extra => stringify!($field),)+
                }
            }

            /// Its axes, in each of the forms that it may have; elements lie end to end.
            pub const fn forms(self) -> &'static [&'static [Axis]] {
                match self {
                    $(Extra::$extra => &[$(&$axes),+],)+
                }
            }

            /// Which of its forms it has in calls of `problem`; `None` where these take none.
            fn form_of(self, problem: &Problem) -> Option<usize> {
                let form: fn(&Problem) -> Option<usize> = match self {
                    $(Extra::$extra => $form,)+
                };
                form(problem)
            }
        }

        /// The tensors of a call that only some problems have, as values of type `I32` where elements are
        /// i32 and `F32` where they are f32: slices, device memory, addresses. A call takes exactly those
        /// that its problem names ([`crate::Lengths`], [`crate::ScoreMod`]).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Extras<I32, F32 = I32> {
            $($(#[$doc])+ pub $field: Option<$elem>,)+
        }

        impl<I32, F32> Extras<I32, F32> {
            /// None, for a problem of equal lengths without slopes and sinks.
            pub const NONE: Extras<I32, F32> = Extras { $($field: None),+ };

            /// Those that the functions make, one for each element type.
            ///
            /// # Errors
            /// The first of the functions.
            pub fn try_of<E>(
                mut i32s: impl FnMut(Extra) -> Result<Option<I32>, E>,
                mut f32s: impl FnMut(Extra) -> Result<Option<F32>, E>,
            ) -> Result<Extras<I32, F32>, E> {
                Ok(Extras { $($field: of_elem!($elem, i32s, f32s)(Extra::$extra)?),+ })
            }

            /// References to them.
            pub const fn as_ref(&self) -> Extras<&I32, &F32> {
                Extras { $($field: self.$field.as_ref()),+ }
            }

            /// References by which they can be changed.
            pub const fn as_mut(&mut self) -> Extras<&mut I32, &mut F32> {
                Extras { $($field: self.$field.as_mut()),+ }
            }

            /// What the functions make of each that there is.
            ///
            /// # Errors
            /// The first of the functions.
            pub fn try_map<I, F, E>(
                self,
                mut i32s: impl FnMut(Extra, I32) -> Result<I, E>,
                mut f32s: impl FnMut(Extra, F32) -> Result<F, E>,
            ) -> Result<Extras<I, F>, E> {
                Ok(Extras {
                    $($field: match self.$field {
                        Some(value) => Some(of_elem!($elem, i32s, f32s)(Extra::$extra, value)?),
                        None => None,
                    },)+
                })
            }

            /// Each that is in either, from both.
            pub fn zip<I, F>(
                self,
                other: Extras<I, F>,
            ) -> Extras<(Option<I32>, Option<I>), (Option<F32>, Option<F>)> {
                Extras {
                    $($field: match (self.$field, other.$field) {
                        (None, None) => None,
                        pair => Some(pair),
                    },)+
                }
            }

            /// Those that a pass reads.
            #[must_use]
            pub fn read_by(self, pass: Pass) -> Extras<I32, F32> {
                Extras { $($field: self.$field.filter(|_| Extra::$extra.is_read_by(pass)),)+ }
            }

            /// All in order, also those that there are not.
            pub fn entries(self) -> [(Extra, Option<Value<I32, F32>>); Extra::ALL.len()] {
                [$((Extra::$extra, self.$field.map(Value::$elem))),+]
            }
        }
    };
}

table! {
    /// First row of Q of each packed sequence, and where the last one ends: `[batch + 1]`, ascending.
    CuSeqlensQ cu_seqlens_q: I32 [Axis::Starts] => |problem| first_if(problem.lengths.q().is_packed());
    /// The same of K and V.
    CuSeqlensK cu_seqlens_k: I32 [Axis::Starts] => |problem| first_if(problem.lengths.k().is_packed());
    /// Queries in use of each sequence: `[batch]`.
    SequsedQ seqused_q: I32 [Axis::Batch] => |problem| first_if(problem.lengths.q().used);
    /// Keys in use of each sequence: `[batch]`; required where keys lie in pages.
    SequsedK seqused_k: I32 [Axis::Batch] => |problem| first_if(problem.lengths.k().used);
    /// Pages of each sequence, in order: `[batch, ceil(max_k / page)]`. Entries behind a sequence's last page
    /// may hold anything.
    PageTable page_table: I32 [Axis::Batch, Axis::Pages] => |problem| {
        first_if(problem.lengths.page().is_some())
    };
    /// ALiBi's slopes: `[heads_q]` or `[batch, heads_q]`.
    AlibiSlopes alibi_slopes: F32 [Axis::HeadsQ], [Axis::Batch, Axis::HeadsQ] => |problem| {
        problem.score.alibi.map(|alibi| usize::from(alibi == Alibi::PerSequenceHead))
    };
    /// A logit per query head, in natural units: `[heads_q]`; -inf for none, and never +inf.
    Sinks sinks: F32 [Axis::HeadsQ] => |problem| first_if(problem.score.sinks);
    /// The gradient of the LSE, in its shape, `[batch, heads_q, seqlen_q]` or `[heads_q, total_q]`: for a
    /// backward, and optional for every problem. Rows with an LSE of -inf have none.
    Dlse dlse: F32 [Axis::Batch, Axis::HeadsQ, Axis::SeqlenQ], [Axis::HeadsQ, Axis::TotalQ] => |problem| {
        Some(usize::from(problem.lengths.q().is_packed()))
    };
    /// What the codes of an fp8 Q are multiplied by, per K/V head: `[heads_kv]` or `[batch, heads_kv]`.
    QDescale q_descale: F32 [Axis::HeadsKv], [Axis::Batch, Axis::HeadsKv] => |problem| {
        descale_form(problem, problem.descales.q)
    };
    /// What the codes of K are multiplied by: `[heads_kv]`, `[batch, heads_kv]`, or for each row of
    /// each head in the layout of K, `[batch, seqlen_k, heads_kv]`, `[total_k, heads_kv]` or `[pages, page,
    /// heads_kv]` ([`DescaleForm`]).
    KDescale k_descale: F32 [Axis::HeadsKv], [Axis::Batch, Axis::HeadsKv],
        [Axis::Batch, Axis::SeqlenK, Axis::HeadsKv], [Axis::TotalK, Axis::HeadsKv],
        [Axis::CachePages, Axis::Page, Axis::HeadsKv] => |problem| descale_form(problem, problem.descales.k);
    /// The same of V.
    VDescale v_descale: F32 [Axis::HeadsKv], [Axis::Batch, Axis::HeadsKv],
        [Axis::Batch, Axis::SeqlenK, Axis::HeadsKv], [Axis::TotalK, Axis::HeadsKv],
        [Axis::CachePages, Axis::Page, Axis::HeadsKv] => |problem| descale_form(problem, problem.descales.v);
}

fn first_if(is_needed: bool) -> Option<usize> {
    is_needed.then_some(0)
}

/// The place of a descale's form in the table.
fn descale_form(problem: &Problem, form: DescaleForm) -> Option<usize> {
    match (form, problem.lengths.k().rows) {
        (DescaleForm::None, _) => None,
        (DescaleForm::Head, _) => Some(0),
        (DescaleForm::SequenceHead, _) => Some(1),
        (DescaleForm::TokenHead, SideRows::Padded { .. }) => Some(2),
        (DescaleForm::TokenHead, SideRows::Packed { .. }) => Some(3),
        (DescaleForm::TokenHead, SideRows::Paged { .. }) => Some(4),
    }
}

/// An axis of one of the [`Extras`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// The sequences.
    Batch,
    /// The first rows of the sequences, and the end of the last.
    Starts,
    /// Entries of a sequence in the page table.
    Pages,
    /// Query heads.
    HeadsQ,
    /// Queries of a sequence.
    SeqlenQ,
    /// Rows of packed queries.
    TotalQ,
    /// Key and value heads.
    HeadsKv,
    /// Keys of a padded sequence.
    SeqlenK,
    /// Rows of packed keys.
    TotalK,
    /// Pages of a cache.
    CachePages,
    /// Rows of a page.
    Page,
}

/// Slices in host memory.
pub type HostExtras<'a> = Extras<&'a [i32], &'a [f32]>;

/// [`HostExtras`] that own their elements.
pub type OwnedExtras = Extras<Vec<i32>, Vec<f32>>;

/// A tensor that a call of a problem takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its name.
    pub name: &'static str,
    /// Its elements.
    pub len: usize,
    /// Whether a call may leave it out.
    pub is_optional: bool,
}

/// The value of one of [`Extras`], by its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<I32, F32 = I32> {
    /// Elements are i32.
    I32(I32),
    /// Elements are f32.
    F32(F32),
}

impl Axis {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Batch => "batch",
            Axis::Starts => "batch + 1",
            Axis::Pages => "pages of a sequence",
            Axis::HeadsQ => "heads_q",
            Axis::SeqlenQ => "seqlen_q",
            Axis::TotalQ => "total_q",
            Axis::HeadsKv => "heads_kv",
            Axis::SeqlenK => "seqlen_k",
            Axis::TotalK => "total_k",
            Axis::CachePages => "pages",
            Axis::Page => "page",
        }
    }

    /// Its length in tensors of `problem`.
    pub fn len(self, problem: &Problem) -> usize {
        let lengths = &problem.lengths;
        match self {
            Axis::Batch => lengths.sequences(),
            Axis::Starts => lengths.sequences().saturating_add(1),
            Axis::Pages => lengths.table_columns(),
            Axis::HeadsQ => problem.heads_q,
            Axis::SeqlenQ => lengths.max_q(),
            Axis::TotalQ => lengths.q().total(lengths.sequences()),
            Axis::HeadsKv => problem.heads_kv,
            Axis::SeqlenK => lengths.max_k(),
            Axis::TotalK => lengths.k().total(lengths.sequences()),
            Axis::CachePages => match lengths.k().rows {
                SideRows::Paged { pages, .. } => pages,
                SideRows::Padded { .. } | SideRows::Packed { .. } => 0,
            },
            Axis::Page => lengths.page().unwrap_or(0),
        }
    }
}

impl Extra {
    /// Its axes in calls of `problem`; `None` where these take none.
    pub fn axes_of(self, problem: &Problem) -> Option<&'static [Axis]> {
        self.form_of(problem).map(|form| self.forms()[form])
    }

    /// What a call of `problem` takes of it; `None` where it takes none.
    pub fn need(self, problem: &Problem, pass: Pass) -> Option<Need> {
        let axes = self.axes_of(problem).filter(|_| self.is_read_by(pass))?;
        let len = axes.iter().fold(1, |len: usize, axis| len.saturating_mul(axis.len(problem)));
        Some(Need { name: self.name(), len, is_optional: self == Extra::Dlse })
    }

    /// Its axes where it has `rank` of them; `None` where it never has.
    pub fn axes(self, rank: usize) -> Option<&'static [Axis]> {
        self.forms().iter().find(|axes| axes.len() == rank).copied()
    }

    /// Whether a pass has a use for it.
    pub fn is_read_by(self, pass: Pass) -> bool {
        pass.is_backward() || self != Extra::Dlse
    }
}

impl<I32, F32> Extras<I32, F32> {
    /// Those that the functions make, one for each element type.
    pub fn of(
        mut i32s: impl FnMut(Extra) -> Option<I32>,
        mut f32s: impl FnMut(Extra) -> Option<F32>,
    ) -> Extras<I32, F32> {
        let Ok(made) = Extras::try_of(|extra| Ok::<_, Infallible>(i32s(extra)), |extra| Ok(f32s(extra)));
        made
    }

    /// What the functions make of each that there is.
    pub fn map<I, F>(
        self,
        mut i32s: impl FnMut(Extra, I32) -> I,
        mut f32s: impl FnMut(Extra, F32) -> F,
    ) -> Extras<I, F> {
        let Ok(made) = self.try_map(
            |extra, value| Ok::<_, Infallible>(i32s(extra, value)),
            |extra, value| Ok(f32s(extra, value)),
        );
        made
    }

    /// Those that there are, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Extra, Value<&I32, &F32>)> {
        self.as_ref().entries().into_iter().filter_map(|(extra, value)| Some((extra, value?)))
    }

    /// One of them.
    pub fn get(&self, extra: Extra) -> Option<Value<&I32, &F32>> {
        self.iter().find(|(own, _)| *own == extra).map(|(_, value)| value)
    }
}

// Not derived: the types of the values need no default.
impl<I32, F32> Default for Extras<I32, F32> {
    fn default() -> Extras<I32, F32> {
        Extras::NONE
    }
}

impl<T> Value<T> {
    /// The value, of whichever type its elements are.
    pub fn into_inner(self) -> T {
        match self {
            Value::I32(value) | Value::F32(value) => value,
        }
    }
}

impl OwnedExtras {
    /// As an argument of a call.
    pub fn view(&self) -> HostExtras<'_> {
        self.as_ref().map(|_, values| values.as_slice(), |_, values| values.as_slice())
    }

    /// The extras that `problem` names, for timing: sequences of equal length within the problem's bounds,
    /// pages in order, slopes from 1/2 down, sinks of 0, descales of 1.
    pub fn even(problem: &Problem) -> OwnedExtras {
        let lengths = &problem.lengths;
        let batch = lengths.sequences();
        let (q, k) = (lengths.q(), lengths.k());
        let starts = |side: Side| match side.rows {
            SideRows::Packed { .. } => Some((0..=batch).map(|i| count(i * even_len(side, batch))).collect()),
            SideRows::Padded { .. } | SideRows::Paged { .. } => None,
        };
        let used = |side: Side| side.used.then(|| vec![count(even_len(side, batch)); batch]);
        let table = |pages: usize| {
            let entries = 0..batch * lengths.table_columns();
            entries.map(|entry| count(entry % pages.max(1))).collect()
        };
        let page_table = match k.rows {
            SideRows::Paged { pages, .. } => Some(table(pages)),
            SideRows::Padded { .. } | SideRows::Packed { .. } => None,
        };
        let alibi_slopes = problem.score.alibi.map(|alibi| {
            let slope = |i: usize| 0.5f32.powi((i % problem.heads_q % 16) as i32 + 1);
            (0..alibi.count(batch, problem.heads_q)).map(slope).collect()
        });
        let ones = |extra: Extra| extra.need(problem, Pass::Forward).map(|need| vec![1.0; need.len]);
        OwnedExtras {
            cu_seqlens_q: starts(q),
            cu_seqlens_k: starts(k),
            seqused_q: used(q),
            seqused_k: used(k),
            page_table,
            alibi_slopes,
            sinks: problem.score.sinks.then(|| vec![0.0; problem.heads_q]),
            dlse: None,
            q_descale: ones(Extra::QDescale),
            k_descale: ones(Extra::KDescale),
            v_descale: ones(Extra::VDescale),
        }
    }
}

/// Rows of each sequence, if all have the same number.
fn even_len(side: Side, batch: usize) -> usize {
    match side.rows {
        SideRows::Padded { len } => len,
        SideRows::Packed { total, max } => (total / batch.max(1)).min(max),
        SideRows::Paged { page, pages, max } => (page.saturating_mul(pages) / batch.max(1)).min(max),
    }
}

/// The device's counts are i32; a checked problem's fit.
fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Descales, Dtype, Lengths, Mask, ScoreMod, Types};

    #[test]
    fn a_call_takes_what_its_problem_names() {
        let square = Problem::square(3, 16, 4, 64, Mask::FULL, Dtype::F16);
        let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        let packed = Lengths::packed(3, 20, 100, 7, 30);
        let paged = Lengths::of(3, Side::padded(7).with_used(), Side::paged(4, 5, 38));
        let (forward, backward) = (Pass::Forward, Pass::BACKWARD);
        let cache = square
            .with_heads_kv(2)
            .with_types(Types::same(Dtype::F16).with_kv(Dtype::E4m3))
            .with_descales(Descales::new(DescaleForm::Head, DescaleForm::TokenHead));
        let per_sequence = DescaleForm::SequenceHead;
        let fp8 = square.with_heads_kv(2).with_types(Types::fp8(Dtype::Bf16));
        for (problem, pass, expected) in [
            (square, forward, vec![]),
            (square, backward, vec![("dlse", 192)]),
            (square.with_score(score), forward, vec![("alibi_slopes", 12), ("sinks", 4)]),
            (square.with_lengths(packed), forward, vec![("cu_seqlens_q", 4), ("cu_seqlens_k", 4)]),
            (
                square.with_lengths(packed),
                backward,
                vec![("cu_seqlens_q", 4), ("cu_seqlens_k", 4), ("dlse", 80)],
            ),
            (
                square.with_lengths(paged),
                forward,
                vec![("seqused_q", 3), ("seqused_k", 3), ("page_table", 30)],
            ),
            (cache, forward, vec![("k_descale", 2), ("v_descale", 3 * 16 * 2)]),
            (
                cache.with_lengths(packed).with_descales(Descales::both(DescaleForm::TokenHead)),
                forward,
                vec![("cu_seqlens_q", 4), ("cu_seqlens_k", 4), ("k_descale", 200), ("v_descale", 200)],
            ),
            (
                cache.with_lengths(paged).with_descales(Descales::new(DescaleForm::TokenHead, per_sequence)),
                forward,
                vec![
                    ("seqused_q", 3),
                    ("seqused_k", 3),
                    ("page_table", 30),
                    ("k_descale", 4 * 5 * 2),
                    ("v_descale", 6),
                ],
            ),
            (
                fp8.with_descales(Descales::all(DescaleForm::Head).with_q(per_sequence)),
                forward,
                vec![("q_descale", 6), ("k_descale", 2), ("v_descale", 2)],
            ),
        ] {
            let needs = Extra::ALL.into_iter().filter_map(|extra| extra.need(&problem, pass));
            let needs: Vec<Need> = needs.collect();
            assert_eq!(needs.iter().map(|need| (need.name, need.len)).collect::<Vec<_>>(), expected);
            assert!(needs.iter().all(|need| need.is_optional == (need.name == "dlse")));
            let given = OwnedExtras::even(&problem);
            let found = given.iter().map(|(extra, values)| match values {
                Value::I32(values) => (extra.name(), values.len()),
                Value::F32(values) => (extra.name(), values.len()),
            });
            let expected: Vec<_> = expected.into_iter().filter(|(name, _)| *name != "dlse").collect();
            assert_eq!(found.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn each_value_keeps_its_name_and_type() {
        let given = Extras::of(|extra| Some(extra.name()), |extra| Some(extra.forms().len()));
        assert_eq!((given.cu_seqlens_k, given.page_table), (Some("cu_seqlens_k"), Some("page_table")));
        assert_eq!((given.alibi_slopes, given.sinks, given.dlse), (Some(2), Some(1), Some(2)));
        assert_eq!(Extra::AlibiSlopes.axes(2), Some([Axis::Batch, Axis::HeadsQ].as_slice()));
        assert_eq!(Extra::Sinks.axes(2), None);
        assert_eq!(given.get(Extra::SequsedQ), Some(Value::I32(&"seqused_q")));
        assert_eq!(given.iter().map(|(extra, _)| extra).collect::<Vec<_>>(), Extra::ALL);
        assert_eq!(given.read_by(Pass::Forward), Extras { dlse: None, ..given });
        assert_eq!(given.read_by(Pass::BACKWARD), given);

        let one = Extras { cu_seqlens_q: Some(1), ..Extras::NONE };
        let other = Extras { cu_seqlens_q: Some(2), sinks: Some(3), ..Extras::NONE };
        let pairs =
            Extras { cu_seqlens_q: Some((Some(1), Some(2))), sinks: Some((None, Some(3))), ..Extras::NONE };
        assert_eq!(one.zip(other), pairs);
        assert_eq!(other.iter().map(|(_, value)| *value.into_inner()).collect::<Vec<_>>(), [2, 3]);
        let failing = |extra: Extra, value| if value == 3 { Err(extra) } else { Ok(value) };
        assert_eq!(other.try_map(failing, failing), Err(Extra::Sinks));
        assert_eq!(one.try_map(failing, failing), Ok(one));
    }
}

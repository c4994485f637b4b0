//! The append kernel against the CPU's, bit by bit: caches in one piece and in pages, both kinds of pairs,
//! tables of both types, queries turned in place, rows that have no place.

use fa_core::quantize::Codes;
use fa_core::{
    Append, Arch, CacheCodes, DescaleForm, Descales, Dtype, QueryPositions, Rotary, RotaryPairs,
    RotaryQueries, Side, SideRows, TensorLayout,
};
use fa_cpu::append::CacheMut;
use fa_cpu::{AppendExtras, AppendTensors, Element, Table, TensorMut, TensorRef};
use fa_emu::append::AppendCall;
use fa_emu::{Emulator, Options};
use fa_kernels::{AppendLaunch, Headers};
use half::{bf16, f16};

use crate::emulator;

/// A 16-bit type by its bits.
trait Half: Element {
    fn bits(self) -> u16;
}

impl Half for f16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

impl Half for bf16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

fn values<T: Element>(seed: usize, count: usize) -> Vec<T> {
    (0..count).map(|i| T::from_f32(((i * 37 + seed * 101) % 251) as f32 / 64.0 - 1.9)).collect()
}

fn bits<T: Half>(values: &[T]) -> Vec<u16> {
    values.iter().map(|value| value.bits()).collect()
}

/// Lengths, starts and pages of three sequences, of which the last has no new keys.
struct Words {
    seqused_k: Vec<i32>,
    cu: Vec<i32>,
    page_table: Vec<i32>,
}

fn check<T: Half>(emulator: &Emulator, append: &Append, words: &Words, dropped: u32) {
    let headers = Headers::current().unwrap();
    let kind = append.codes.map(|codes| codes.kind);
    let unit = emulator.append_unit(kind, Arch::Sm80, &headers).unwrap();
    let count = |shape: [usize; 4]| shape.iter().product::<usize>();
    let shapes = [
        append.new_shape(append.head_dim),
        append.new_shape(append.head_dim_v),
        append.cache_shape(append.head_dim),
        append.cache_shape(append.head_dim_v),
        append.query_shape(),
    ];
    let mut host: Vec<Vec<T>> = (0..5).map(|i| values(i, count(shapes[i]))).collect();
    let mut codes = [0, 1].map(|i| vec![0x5au8; append.codes.map_or(0, |_| count(shapes[2 + i]))]);
    let descales = append.descales();
    let mut descales = [descales.k, descales.v].map(|form| {
        let shape = append.descale_shape(form)?;
        Some(
            (0..shape.iter().product())
                .map(|i: usize| [0.01, 0.004, 0.0, 1e-30][i % 4])
                .collect::<Vec<f32>>(),
        )
    });
    if append.codes.is_some() {
        // Numbers beyond the largest code, and NaN, which integers have none for.
        (host[0][3], host[0][7]) = (T::from_f32(f32::NAN), T::from_f32(f32::INFINITY));
    }
    let rotary = append.rotary;
    let entries = rotary.map_or(0, |rotary| rotary.positions * rotary.dim / 2);
    let angle = |i: usize| (i as f32) * 0.37;
    let exact: [Vec<f32>; 2] =
        [(0..entries).map(|i| angle(i).cos()).collect(), (0..entries).map(|i| angle(i).sin()).collect()];
    let same: [Vec<T>; 2] = [0, 1].map(|t| exact[t].iter().map(|&value| T::from_f32(value)).collect());
    let is_f32 = rotary.is_some_and(|rotary| rotary.table == Dtype::F32);

    let is_packed = |side: Side| matches!(side.rows, SideRows::Packed { .. });
    let queries = append.queries();
    let given = |asked: bool, words: &[i32]| asked.then(|| words.to_vec());
    let is_paged = matches!(append.cache.rows, SideRows::Paged { .. });
    let mut call = AppendCall {
        tensors: [0, 1, 2, 3, 4].map(|i| bits(&host[i])),
        codes: codes.clone(),
        descales: descales.clone(),
        tables: [0, 1].map(|t| {
            if is_f32 {
                exact[t].iter().flat_map(|value| value.to_ne_bytes()).collect()
            } else {
                same[t].iter().flat_map(|value| value.bits().to_ne_bytes()).collect()
            }
        }),
        words: [
            given(is_packed(append.new), &words.cu),
            None,
            Some(words.seqused_k.clone()),
            given(is_paged, &words.page_table),
            given(queries.is_some_and(|queries| is_packed(queries.rows)), &words.cu),
            None,
        ],
        used_out: vec![0; append.sequences],
        dropped: 0,
    };
    let launch = AppendLaunch::new(append, 4).unwrap();
    let faults = unit.run(&launch, &mut call, &Options::seed(2)).unwrap();
    assert!(faults.is_empty(), "{append:?}:\n{}", faults.join("\n"));

    let mut used_out = vec![0; append.sequences];
    let [cu_new, _, seqused_k, page_table, cu_seqlens_q, _] = &call.words;
    let [k_descale, v_descale] = &mut descales;
    let mut extras = AppendExtras {
        cu_new: cu_new.as_deref(),
        seqused_k: seqused_k.as_deref(),
        page_table: page_table.as_deref(),
        cu_seqlens_q: cu_seqlens_q.as_deref(),
        used_out: Some(&mut used_out),
        k_descale: k_descale.as_deref_mut(),
        v_descale: v_descale.as_deref_mut(),
        ..AppendExtras::default()
    };
    let layout = TensorLayout::Bshd;
    let [k_new, v_new, k_cache, v_cache, q] = &mut host[..] else { unreachable!() };
    let tables = [0, 1].map(|t| if is_f32 { Table::F32(&exact[t]) } else { Table::Same(&same[t][..]) });
    let [k_codes, v_codes] = &mut codes;
    let mut tensors = AppendTensors {
        k_new: TensorRef::packed("k_new", k_new, shapes[0], layout).unwrap(),
        v_new: TensorRef::packed("v_new", v_new, shapes[1], layout).unwrap(),
        k_cache: match append.codes {
            Some(_) => CacheMut::Codes(TensorMut::packed("k_cache", k_codes, shapes[2], layout).unwrap()),
            None => TensorMut::packed("k_cache", k_cache, shapes[2], layout).unwrap().into(),
        },
        v_cache: match append.codes {
            Some(_) => CacheMut::Codes(TensorMut::packed("v_cache", v_codes, shapes[3], layout).unwrap()),
            None => TensorMut::packed("v_cache", v_cache, shapes[3], layout).unwrap().into(),
        },
        q: queries.map(|_| TensorMut::packed("q", q, shapes[4], layout).unwrap()),
        tables: rotary.map(|_| tables),
    };
    let left_out = fa_cpu::append::append(append, &mut extras, &mut tensors).unwrap();
    assert_eq!((left_out as u32, call.dropped), (dropped, dropped), "{append:?}");
    assert_eq!(used_out, call.used_out, "{append:?}");
    for (i, name) in ["k_cache", "v_cache"].into_iter().enumerate() {
        let wrong = call.codes[i].iter().zip(&codes[i]).position(|(a, b)| a != b);
        assert_eq!(wrong.map(|at| (at, call.codes[i][at], codes[i][at])), None, "{name} of {append:?}");
        let of = |values: &Option<Vec<f32>>| -> Option<Vec<u32>> {
            values.as_ref().map(|values| values.iter().map(|value| value.to_bits()).collect())
        };
        assert_eq!(of(&call.descales[i]), of(&descales[i]), "descales of {name} of {append:?}");
    }
    for (i, name) in ["k_cache", "v_cache", "q"].into_iter().enumerate() {
        let (have, need) = (&call.tensors[i + 2], bits(&host[i + 2]));
        let wrong = have.iter().zip(&need).position(|(a, b)| a != b);
        assert_eq!((have.len(), wrong), (need.len(), None), "{name} of {append:?}");
    }
}

fn words() -> Words {
    // Pages of 5 in no order; sequence 1 names one that does not exist for its last keys.
    let page_table = vec![7, 2, 0, 9, 4, 1, 3, 100, 5, 6, 8, -1];
    Words { seqused_k: vec![3, 13, 0], cu: vec![0, 6, 11, 11], page_table }
}

#[test]
#[ignore = "emulation"]
fn rows_are_appended_to_a_cache_in_one_piece() {
    let emulator = emulator();
    let append = Append {
        sequences: 3,
        new: Side::padded(4),
        cache: Side::padded(20),
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 40,
        dtype: Dtype::F16,
        codes: None,
        rotary: None,
    };
    check::<f16>(emulator, &append, &words(), 0);
    // The second sequence has room for two more keys.
    check::<f16>(emulator, &Append { cache: Side::padded(15), ..append }, &words(), 2);
}

#[test]
#[ignore = "emulation"]
fn keys_and_queries_are_turned_on_their_way_to_pages() {
    let emulator = emulator();
    let rows = Side::packed(12, 6);
    let queries = |positions| Some(RotaryQueries { rows, heads: 4, positions });
    let rotary = Rotary {
        dim: 32,
        pairs: RotaryPairs::Halves,
        positions: 64,
        table: Dtype::F32,
        queries: queries(QueryPositions::Following),
    };
    let append = Append {
        sequences: 3,
        new: rows,
        cache: Side::paged(5, 10, 20),
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 64,
        dtype: Dtype::Bf16,
        codes: None,
        rotary: Some(rotary),
    };
    // Keys 15 to 17 of the second sequence are in the page that does not exist.
    check::<bf16>(emulator, &append, &words(), 3);
    let neighbours = Rotary { pairs: RotaryPairs::Neighbours, table: Dtype::Bf16, ..rotary };
    check::<bf16>(emulator, &Append { rotary: Some(neighbours), ..append }, &words(), 3);
    let same = Rotary { dim: 64, queries: queries(QueryPositions::Same), ..rotary };
    check::<bf16>(emulator, &Append { rotary: Some(same), new: Side::padded(1), ..append }, &words(), 0);
    // Tables of 16 positions: keys and queries beyond them are left out.
    let short = Rotary { positions: 16, table: Dtype::F16, pairs: RotaryPairs::Neighbours, ..rotary };
    let padded = Append { rotary: Some(short), cache: Side::padded(32), dtype: Dtype::F16, ..append };
    check::<f16>(emulator, &padded, &words(), 4);
}

#[test]
#[ignore = "emulation"]
fn rows_are_quantised_on_their_way_to_a_cache_of_codes() {
    let emulator = emulator();
    let rows = Side::packed(12, 6);
    let queries = Some(RotaryQueries { rows, heads: 4, positions: QueryPositions::Following });
    let rotary = Rotary { dim: 32, pairs: RotaryPairs::Halves, positions: 64, table: Dtype::F32, queries };
    let forms = [
        Descales::NONE,
        Descales::new(DescaleForm::Head, DescaleForm::SequenceHead),
        Descales::both(DescaleForm::TokenHead),
    ];
    for (turn, descales) in forms.into_iter().enumerate() {
        for kind in Codes::ALL {
            let append = Append {
                sequences: 3,
                new: rows,
                cache: Side::paged(5, 10, 20),
                heads_kv: 2,
                head_dim: 64,
                head_dim_v: if kind == Codes::Int4 { 96 } else { 80 },
                dtype: Dtype::Bf16,
                codes: Some(CacheCodes { kind, descales }),
                rotary: Some(rotary),
            };
            check::<bf16>(emulator, &append, &words(), 3);
            let pairs = if turn == 0 { RotaryPairs::Neighbours } else { RotaryPairs::Halves };
            let rotary = Some(Rotary { pairs, queries: None, ..rotary });
            let (new, cache) = (Side::padded(4), Side::padded(15));
            check::<f16>(emulator, &Append { new, cache, dtype: Dtype::F16, rotary, ..append }, &words(), 2);
        }
    }
}

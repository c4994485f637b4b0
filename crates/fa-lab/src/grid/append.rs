//! New keys and values for a cache, keys and queries rotated by their positions.

use fa_core::quantize::Codes;
use fa_core::{
    Append, CacheCodes, DescaleForm, Descales, Dtype, QueryPositions, Rotary, RotaryPairs, RotaryQueries,
    Side, Types,
};

use super::case::{Action, BASE, Case, Extent, case};

/// Positions of the tables: fewer than the longest caches hold, so that some rows have no rotation.
const POSITIONS: usize = 700;

/// Sequences of an append.
const SEQUENCES: usize = 5;

/// The most new keys, and queries, of a sequence.
const NEW: usize = 23;

/// Keys that a sequence's cache has room for.
const ROOM: usize = 720;

/// Appends to caches of all kinds, with and without rotary embedding.
pub(super) fn append(extent: Extent) -> Vec<Case> {
    let packed = Side::packed(SEQUENCES * NEW - 7, NEW);
    let news = [
        ("packed", packed),
        ("padded", Side::padded(NEW)),
        ("padded in use", Side::padded(NEW).with_used()),
        ("one token", Side::padded(1)),
    ];
    let pages: &[usize] =
        if extent == Extent::Full { &[1, 3, 8, 16, 24, 64, 128, 256] } else { &[1, 16, 24] };
    let mut caches = vec![("contiguous", Side::padded(ROOM))];
    // A few pages more than the sequences fill.
    caches.extend(
        pages.iter().map(|&page| ("pages", Side::paged(page, SEQUENCES * ROOM.div_ceil(page) + 3, ROOM))),
    );
    let dims = [(128, 128), (64, 64), (192, 128), (256, 256), (96, 40)];
    let mut cases = Vec::new();
    for (of_cache, (what_cache, cache)) in caches.into_iter().enumerate() {
        for (of_new, (_, new)) in news.into_iter().enumerate() {
            let turn = 4 * of_cache + of_new;
            let (head_dim, head_dim_v) = dims[turn % dims.len()];
            let dtype = [Dtype::Bf16, Dtype::F16][turn % 2];
            let (heads, heads_kv) = [(8, 2), (4, 4), (6, 1)][turn % 3];
            let queries = RotaryQueries {
                rows: new,
                heads,
                positions: [QueryPositions::Following, QueryPositions::Same][turn / 2 % 2],
            };
            let rotary = Rotary {
                dim: if turn % 5 < 3 { head_dim / 16 * 16 } else { 32 },
                pairs: [RotaryPairs::Halves, RotaryPairs::Neighbours][turn / 3 % 2],
                positions: POSITIONS,
                table: [Dtype::F32, dtype][turn % 3 % 2],
                queries: (turn % 4 != 1).then_some(queries),
            };
            let rotary = (turn % 7 != 5).then_some(rotary);
            let append = Append {
                sequences: SEQUENCES,
                new,
                cache,
                heads_kv,
                head_dim,
                head_dim_v,
                dtype,
                codes: None,
                rotary,
            };
            let problem = BASE.with_heads(heads, heads_kv).with_head_dims(head_dim, head_dim_v);
            let problem = problem.with_types(Types::same(dtype));
            let of =
                |action| Case { what: what_cache, append: Some(append), action, ..case("append", problem) };
            cases.push(of(Action::Once));
            if turn % 3 == 0 {
                cases.push(of(Action::Relength));
            }
        }
    }
    cases
}

/// Descales of caches of codes: read, written per row, none.
const DESCALES: [Descales; 3] = [
    Descales::both(DescaleForm::TokenHead),
    Descales::new(DescaleForm::Head, DescaleForm::SequenceHead),
    Descales::NONE,
];

/// Appends to caches of codes, those of [`append`] with head dims whose rows of codes are aligned.
pub(super) fn append_codes(extent: Extent) -> Vec<Case> {
    let mut all = append_kinds(extent, &[Codes::E4m3, Codes::Int8]);
    all.extend(append_kinds(extent, &[Codes::Int4]));
    all
}

fn append_kinds(extent: Extent, kinds: &[Codes]) -> Vec<Case> {
    let of_16_bits = append(extent).into_iter().filter_map(|case| Some((case.append?, case)));
    let whole = 16 * kinds[0].per_byte();
    let aligned = of_16_bits.filter(|(append, _)| {
        [append.head_dim, append.head_dim_v].iter().all(|dim| dim.is_multiple_of(whole))
    });
    let of = |(turn, (append, case)): (usize, (Append, Case))| {
        let kind = kinds[turn % kinds.len()];
        let codes = CacheCodes { kind, descales: DESCALES[turn / 2 % DESCALES.len()] };
        Case { append: Some(Append { codes: Some(codes), ..append }), ..case }
    };
    aligned.enumerate().map(of).collect()
}

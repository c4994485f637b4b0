//! What the kernels beside attention launch, as data: rows appended to a cache, partial results merged.

use fa_core::quantize::Codes;
use fa_core::{
    Append, Arch, Dtype, Merge, QueryPositions, Rotary, RotaryPairs, RotaryQueries, Side, TensorLayout,
};
use fa_kernels::{
    AppendLaunch, Headers, MergeLaunch, RawAppendArgs, RawMergeArgs, RawPartialResult, RawTensor, Source,
};

const SMS: u32 = 132;

#[test]
fn an_append_is_one_launch_whose_memory_is_checked() {
    let queries =
        RotaryQueries { rows: Side::packed(90, 60), heads: 8, positions: QueryPositions::Following };
    let rotary = Rotary {
        dim: 64,
        pairs: RotaryPairs::Halves,
        positions: 4096,
        table: Dtype::F32,
        queries: Some(queries),
    };
    let append = Append {
        sequences: 3,
        new: Side::packed(90, 60),
        cache: Side::paged(16, 20, 100),
        heads_kv: 2,
        head_dim: 128,
        head_dim_v: 64,
        dtype: Dtype::Bf16,
        codes: None,
        rotary: Some(rotary),
    };
    let launch = AppendLaunch::new(&append, SMS).unwrap();
    assert_eq!((launch.grid, launch.threads), (180, 256));
    let raw = |i: u64, shape: &fa_kernels::launch::Shape| {
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim);
        RawTensor { address: i << 32, strides }
    };
    let tensors = launch.tensors();
    let at = |i: usize| raw(i as u64 + 1, &tensors[i].0);
    let args = RawAppendArgs {
        k_new: at(0),
        v_new: at(1),
        k_cache: at(2),
        v_cache: at(3),
        q: Some(at(4)),
        q_out: None,
        tables: Some([1 << 40, 1 << 41]),
        cu_new: Some(64),
        used_new: None,
        seqused_k: Some(128),
        page_table: Some(256),
        k_descale: None,
        v_descale: None,
        cu_seqlens_q: Some(64),
        seqused_q: None,
        used_out: Some(192),
        dropped: None,
    };
    launch.check(&args).unwrap();
    let params = launch.params(&args);
    assert_eq!((params.rows_new, params.rows_q, params.table_stride, params.q_columns), (90, 90, 7, 64));
    assert_eq!((params.k_new.strides.batch, params.k_cache.strides.batch), (0, 16 * 2 * 128));
    let refused = |args: RawAppendArgs, part: &str| {
        let text = launch.check(&args).expect_err("must be refused").to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    };
    refused(RawAppendArgs { page_table: None, ..args }, "page_table is missing");
    refused(RawAppendArgs { seqused_q: Some(64), ..args }, "seqused_q was given");
    refused(RawAppendArgs { used_out: args.seqused_k, ..args }, "used_out is seqused_k");
    refused(RawAppendArgs { tables: Some([8, 16]), ..args }, "cos starts at 0x8");
    let empty = Append { sequences: 0, new: Side::packed(0, 0), rotary: None, ..append };
    assert_eq!(AppendLaunch::new(&empty, SMS).unwrap().grid, 0);
}

/// Arrays without elements have no memory: libraries give all of them one address, mostly 0.
#[test]
fn an_append_of_nothing_takes_empty_arrays() {
    let some = Append {
        sequences: 2,
        new: Side::padded(0),
        cache: Side::padded(64),
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 64,
        dtype: Dtype::Bf16,
        codes: None,
        rotary: None,
    };
    let packed = Side::packed(0, 0);
    let queries = RotaryQueries { rows: Side::padded(0), heads: 4, positions: QueryPositions::Following };
    let rotary = Rotary {
        dim: 64,
        pairs: RotaryPairs::Halves,
        positions: 8,
        table: Dtype::Bf16,
        queries: Some(queries),
    };
    for (append, grid) in [
        (Append { sequences: 0, ..some }, 0),
        (Append { sequences: 0, new: Side::padded(1), ..some }, 0),
        (Append { sequences: 0, new: packed, ..some }, 0),
        (Append { sequences: 0, cache: Side::paged(16, 0, 0), ..some }, 0),
        (Append { sequences: 0, cache: Side::paged(16, 8, 64), ..some }, 0),
        (Append { sequences: 0, rotary: Some(rotary), ..some }, 0),
        // Sequences without new rows: their lengths are written all the same.
        (some, 1),
        (Append { new: packed, ..some }, 1),
        (Append { cache: Side::paged(16, 0, 0), ..some }, 1),
        (Append { cache: Side::paged(16, 8, 0), ..some }, 1),
        (Append { rotary: Some(rotary), ..some }, 1),
    ] {
        let launch = AppendLaunch::new(&append, SMS).unwrap_or_else(|error| panic!("{append:?}: {error}"));
        assert_eq!(launch.grid, grid, "{append:?}");
        let is_empty = append.sequences == 0;
        let strides = TensorLayout::Bshd.strides(0, append.heads_kv, 64);
        let at = |address| RawTensor { address, strides };
        let cache = TensorLayout::Bshd.strides(64, append.heads_kv, 64);
        let has_cache = append.cache_shape(64).iter().all(|&len| len > 0);
        let cache = RawTensor { address: if has_cache { 1 << 20 } else { 0 }, strides: cache };
        let is_paged = matches!(append.cache.rows, fa_core::lengths::SideRows::Paged { .. });
        let has_rows = |side: Side| matches!(side.rows, fa_core::lengths::SideRows::Packed { .. });
        let args = RawAppendArgs {
            k_new: at(0),
            v_new: at(0),
            k_cache: cache,
            v_cache: cache,
            q: append.rotary.map(|_| at(0)),
            q_out: append.rotary.map(|_| at(0)),
            tables: append.rotary.map(|_| [1 << 21, 1 << 22]),
            cu_new: has_rows(append.new).then_some(64),
            used_new: None,
            seqused_k: Some(if is_empty { 0 } else { 128 }),
            page_table: is_paged.then_some(0),
            k_descale: None,
            v_descale: None,
            cu_seqlens_q: None,
            seqused_q: None,
            used_out: Some(if is_empty { 0 } else { 192 }),
            dropped: None,
        };
        launch.check(&args).unwrap_or_else(|error| panic!("{append:?}: {error}"));
        if !is_empty {
            let same = RawAppendArgs { used_out: args.seqused_k, ..args };
            assert!(
                launch.check(&same).is_err_and(|error| error.to_string().contains("used_out is seqused_k"))
            );
        }
    }
}

#[test]
fn a_merge_is_one_launch_whose_memory_is_checked() {
    let merge = Merge {
        parts: 2,
        batch: 3,
        seqlen: 5,
        heads: 4,
        dim: 64,
        part: Dtype::Bf16,
        out: Dtype::F32,
        sinks: true,
    };
    let launch = MergeLaunch::new(&merge, SMS).unwrap();
    // 60 rows, 4 warps.
    assert_eq!((launch.grid, launch.threads), (15, 128));
    let strides = fa_core::TensorLayout::Bshd.strides(5, 4, 64);
    let part = |address: u64| RawPartialResult { out: RawTensor { address, strides }, lse: address + 4 };
    let parts = [part(0x1000), part(0x9000)];
    let out = RawTensor { address: 0x20000, strides };
    let args = RawMergeArgs { parts: &parts, out, lse: Some(64), sinks: Some(128) };
    launch.check(&args).unwrap();
    let params = launch.params(&args);
    assert_eq!((params.count, params.part_type, params.out_type), (2, 2, 0));
    assert_eq!((params.parts.0[1].lse.0, params.parts.0[2].lse.0), (0x9004, 0));
    let refused = |args: RawMergeArgs<'_>, part: &str| {
        let text = launch.check(&args).expect_err("must be refused").to_string();
        assert!(text.contains(part), "{text} does not say {part}");
    };
    refused(RawMergeArgs { parts: &parts[..1], ..args }, "1 parts were given, the merge is bound to 2");
    refused(RawMergeArgs { sinks: None, ..args }, "sinks is missing");
    refused(RawMergeArgs { out: RawTensor { address: 8, strides }, ..args }, "out starts at 0x8");
    refused(RawMergeArgs { lse: Some(2), ..args }, "lse starts at 0x2");
    let without = MergeLaunch::new(&Merge { sinks: false, ..merge }, SMS).unwrap();
    assert!(without.check(&args).is_err_and(|error| error.to_string().contains("sinks was given")));
    assert_eq!(MergeLaunch::new(&Merge { seqlen: 0, ..merge }, SMS).unwrap().grid, 0);
    let many = MergeLaunch::new(&Merge { parts: 17, ..merge }, SMS).expect_err("too many").to_string();
    assert!(many.contains("parts = 17: must be 1 to 16"), "{many}");
}

#[test]
fn kernels_that_all_problems_share_compile() {
    for arch in [Arch::Sm80, Arch::Sm90] {
        let headers = Headers::embedded();
        let kinds = [None, Some(Codes::Int8), Some(Codes::Int4)];
        let appends = kinds.map(|codes| Source::append(codes, arch, &headers).unwrap());
        for source in appends.into_iter().chain([Source::merge(arch, &headers).unwrap()]) {
            let compiled = crate::nvrtc().compile(&source).unwrap_or_else(|_| panic!("{arch}"));
            assert_eq!(compiled.report.fault(), None, "{arch}: {}", compiled.report);
        }
    }
}

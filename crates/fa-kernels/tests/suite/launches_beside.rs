//! What the kernels beside attention launch, as data: rows appended to a cache, partial results merged.

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
        for source in [Source::append(arch, &headers).unwrap(), Source::merge(arch, &headers).unwrap()] {
            let compiled = crate::nvrtc().compile(&source).unwrap_or_else(|_| panic!("{arch}"));
            assert_eq!(compiled.report.fault(), None, "{arch}: {}", compiled.report);
        }
    }
}

//! The machine's tensor memory: a unit that uses it as the PTX ISA asks, and the same with one statement
//! changed.

use fa_core::Arch;
use fa_kernels::{Headers, Source};

use crate::compiler::{Compiler, default_root};
use crate::error::Error;
use crate::machine::{Access, Machine};
use crate::options::Options;
use crate::single::{Shape, Single};

const UNIT: &str = include_str!("../tests/units/tensor_memory.cu");
const SHAPE: Shape = Shape { grid: 2, threads: 160, smem: (128 + 64) * 128 + 1024 };

#[repr(C)]
struct Params {
    a: u64,
    b: u64,
    out: u64,
}

/// A statement of the unit, what stands in its place, and how the finding begins: one of these.
type Fault = (&'static str, &'static str, &'static str, &'static [&'static str]);

const FAULTS: &[Fault] = &[
    ("loads are not waited for", "tcgen05::wait_load();  // of the scores", "", &["register hazard"]),
    ("P is not waited for", "tcgen05::wait_store();", "", &["data race"]),
    ("no fence before P is signalled", "tcgen05::fence_before();  // of P", "", &["data race"]),
    ("no fence after P", "tcgen05::fence_after();  // of the products", "", &["missing tcgen05.fence"]),
    ("no fence after S", "tcgen05::fence_after();  // of the scores", "", &["missing tcgen05.fence"]),
    ("no fence after O", "tcgen05::fence_after();  // of O", "", &["missing tcgen05.fence"]),
    ("S is not waited for", "mbarrier_wait(smem.s_full, 0);", "", &["data race"]),
    (
        "P is multiplied before it is there",
        "mbarrier_wait(smem.p_full, 0);",
        "",
        &["uninitialised read", "data race"],
    ),
    ("O is not waited for", "mbarrier_wait(smem.o_full, 0);", "", &["data race", "uninitialised read"]),
    ("S is not committed", "tcgen05::commit(smem.s_full);", "", &["deadlock"]),
    (
        "a commit comes before its products",
        "tcgen05::commit(smem.o_full);\n        }\n        warp_sync();",
        "\
     }\n        warp_sync();",
        &["deadlock"],
    ),
    ("the next warp's lanes", "u32(32 * warp) << 16", "u32(32 * ((warp + 1) % 4)) << 16", &["tensor memory"]),
    (
        "lanes give different addresses",
        "tcgen05::store(own + kP, p)",
        "tcgen05::store(own + kP + lane_index() % 2, p)",
        &["tensor memory"],
    ),
    ("columns beyond the allocation", "kP = 64", "kP = 240", &["tensor memory"]),
    (
        "tensor memory is not freed",
        "if (warp == 4) tcgen05::dealloc(base, kColumns);",
        "",
        &["leaked tensor memory"],
    ),
    ("it is freed while others use it", "cta_sync();              // at the end", "", &["data race"]),
    ("it is freed without a fence", "tcgen05::fence_after();  // of the end", "", &["missing tcgen05.fence"]),
    ("others do not tell before it is freed", "tcgen05::fence_before();  // of the end", "", &["data race"]),
    ("no power of two", "kColumns = 256", "kColumns = 192", &["tensor memory"]),
    ("more than there is", "kColumns = 256", "kColumns = 1024", &["tensor memory"]),
    (
        "an allocation after the permit is gone",
        "tcgen05::relinquish();",
        "tcgen05::relinquish();\n\
     tcgen05::alloc(smem.tensor, 32); tcgen05::dealloc(smem.tensor, 32); smem.tensor = 0;",
        &["tensor memory"],
    ),
    (
        "allocations that never end",
        "tcgen05::relinquish();",
        "tcgen05::alloc(smem.tensor, 256);\n\
     tcgen05::alloc(smem.tensor, 256);",
        &["deadlock"],
    ),
    ("a descriptor of SM90", "kVersion = 1u << 14", "kVersion = 0", &["bad descriptor"]),
    ("64 rows", "128u / 16 << 24", "64u / 16 << 24", &["bad descriptor"]),
    ("f16 beside bf16", "1u << 7 | 1u << 10", "1u << 7", &["bad descriptor"]),
    ("operands are not made visible", "fence_async_shared();", "", &["missing proxy fence"]),
    (
        "sums of nothing",
        "kInstruction,\n                                k != 0",
        "kInstruction,\n true",
        &["uninitialised read"],
    ),
    (
        "S is overwritten while it is loaded",
        "tcgen05::wait_load();  // of the scores",
        "tcgen05::store(own + kS, p); tcgen05::wait_load();",
        &["data race"],
    ),
    ("O over the P that it is made of", "kO = 128", "kO = 64", &["wrong values"]),
    (
        "registers of a load in flight",
        "tcgen05::wait_load();  // of the scores",
        "s[0][0] = 0; tcgen05::wait_load();",
        &["register hazard"],
    ),
];

/// P V still reads P when another S is written over it.
const S_OVER_P: (&str, &str) = (
    "// Another S goes here.",
    "for (int k = 0; k < 64; k += 16) tcgen05::mma_ss(base + kP, a.at(A::column_offset(k)), \
     b.at(B::column_offset(k)), kInstruction, k != 0);",
);

fn compiler(test: &str) -> Option<Compiler> {
    let root = default_root().unwrap_or_else(|| std::env::temp_dir().join("fa-emulator"));
    match Compiler::find(&root) {
        Ok(compiler) => Some(compiler),
        Err(error @ (Error::NoCompiler { .. } | Error::Host { .. })) => {
            eprintln!("skipped: {test}: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn load(compiler: &Compiler, unit: &str) -> Single {
    let machine = Machine::load(compiler).expect("the machine compiles").into();
    let headers = Headers::embedded();
    let headers = headers.reachable(unit).expect("the unit's headers are here");
    let headers = headers.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    let source = Source { unit: unit.to_owned(), headers, target: "sm_100f".into() };
    Single::load(compiler, machine, Arch::Sm100, &source, "probe").expect("the unit compiles")
}

/// Small whole numbers: every sum is exact.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + i / 13 + seed) % 5) as f32 - 2.0).collect()
}

fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn expected(a: &[f32], b: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; 128 * 64];
    for row in 0..128 {
        for key in 0..64 {
            let s: f32 = (0..64).map(|k| a[row * 64 + k] * b[key * 64 + k]).sum();
            assert!(s.abs() <= 256.0, "S is exact in bf16");
            for column in 0..64 {
                out[row * 64 + column] += s * b[key * 64 + column];
            }
        }
    }
    out
}

/// What a run finds, and wrong values where nothing else was.
fn run(unit: &Single, options: &Options<'_>) -> Vec<String> {
    let (a, b) = (values(128 * 64, 1), values(64 * 64, 3));
    let run = unit.start(options);
    let input = |name, values: &[f32]| run.memory(name, &bf16(values), Access::Input).expect("memory");
    let (of_a, of_b) = (input("a", &a), input("b", &b));
    let out = run.memory("out", &[0xff; 4 * 128 * 64], Access::Written).expect("memory");
    let params = Params { a: of_a.address(), b: of_b.address(), out: out.address() };
    // SAFETY: the unit takes these parameters, and the memory is the run's.
    #[allow(unsafe_code)]
    let mut faults = unsafe { run.launch(&params, &Shape { grid: 1, ..SHAPE }) };
    let found: Vec<f32> =
        out.bytes().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
    if faults.is_empty() && found != expected(&a, &b) {
        faults.push("wrong values".into());
    }
    faults
}

#[test]
fn the_order_that_the_isa_asks_for_is_clean() {
    let Some(compiler) = compiler("tensor memory") else { return };
    // P beside S, and over the half of S that the warp has loaded before.
    for unit in [UNIT.to_owned(), UNIT.replace("kP = 64", "kP = 32")] {
        let unit = load(&compiler, &unit);
        for seed in 0..12 {
            for products_in_order in [false, true] {
                let options = Options { products_in_order, ..Options::seed(seed) };
                assert_eq!(run(&unit, &options), [""; 0], "seed {seed}");
            }
        }
    }
}

#[test]
fn faults_are_found_under_every_schedule() {
    let Some(compiler) = compiler("faults of tensor memory") else { return };
    for (name, old, new, kinds) in FAULTS {
        assert_eq!(UNIT.matches(old).count(), 1, "{name}: the statement is there once");
        let unit = load(&compiler, &UNIT.replace(old, new));
        for seed in [0, 1, 2, 5] {
            let found = run(&unit, &Options::seed(seed));
            let named = |kind: &&&str| found.iter().any(|fault| fault.starts_with(**kind));
            assert!(kinds.iter().find(named).is_some(), "{name}, seed {seed}: {found:#?}");
        }
    }
}

#[test]
fn what_the_pipe_orders_and_the_isa_does_not() {
    let Some(compiler) = compiler("the order of products") else { return };
    let unit = load(&compiler, &UNIT.replace(S_OVER_P.0, S_OVER_P.1));
    for seed in 0..6 {
        let as_built = Options { products_in_order: true, ..Options::seed(seed) };
        assert_eq!(run(&unit, &as_built), [""; 0], "seed {seed}");
        let found = run(&unit, &Options::seed(seed));
        assert!(found.iter().any(|fault| fault.starts_with("data race")), "seed {seed}: {found:#?}");
    }
}

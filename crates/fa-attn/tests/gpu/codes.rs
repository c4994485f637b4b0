//! K and V in codes: the bits of O and LSE are those of the same kernel on the numbers that the codes stand
//! for, in every layout; an append quantises as the CPU does.

use fa_attn::device::{BindOptions, DeviceExtras, DeviceForward, DeviceOutput, Gpu, Placement, shapes};
use fa_attn::quantize::Codes;
use fa_attn::{
    Append, Backend, CacheCodes, CpuOptions, DescaleForm, Descales, Division, Dtype, Engine, Family,
    KernelSpec, Mask, OwnedExtras, Pass, Problem, Side, Tensor, TensorLayout, Types, bf16,
};
use fa_core::Kernel;
use fa_cpu::append::CacheMut;
use fa_cpu::{AppendExtras, AppendTensors, TensorMut, TensorRef};
use fa_kernels::Forward;

use crate::packed::{SQUARE, problems, values};
use crate::{bind_forward, gpu};

const DESCALES: [f32; 2] = [0.5, 2.0];

/// Runs `forward` on Q and on K and V of any type.
macro_rules! run {
    ($gpu:expr, $forward:expr, $extras:expr, $q:expr, $kv:expr) => {{
        let (stream, problem): (_, &Problem) = (&$gpu.stream, $forward.problem());
        let [q, k, v, out] = shapes(problem);
        let layout = TensorLayout::Bshd;
        let q = TensorRef::packed("q", &$q[..], q, layout).unwrap();
        let k = TensorRef::packed("k", &$kv[0][..], k, layout).unwrap();
        let v = TensorRef::packed("v", &$kv[1][..], v, layout).unwrap();
        let (bytes, out) = ($forward.workspace_bytes(), Placement::packed(out, layout));
        let mut device = DeviceForward::upload_with(stream, problem, bytes, &q, [&k, &v], out).unwrap();
        device.extras = DeviceExtras::upload(stream, &$extras.view()).unwrap();
        device.run($forward, stream).unwrap();
        device.read(stream).unwrap()
    }};
}
pub(crate) use run;

/// The kernel of `forward` for K and V of Q's type, with the same tile and parts of keys.
fn alike(gpu: &Gpu, forward: &Forward, plain: &Problem) -> Forward {
    let mut spec = KernelSpec { types: plain.types, ..forward.kernel().spec.clone() };
    if let Kernel::Sm90Fwd(kernel) = &mut spec.kernel {
        kernel.gather = spec.reads.paged;
    }
    let splits = spec.split.then_some(forward.launch_plan().splits);
    let division = Division { splits, ..Division::PLANNED };
    let options = BindOptions::default().with_spec(Some(spec)).with_division(division);
    gpu.bind(plain, Pass::Forward, &options).unwrap().forward().unwrap()
}

fn check(gpu: &Gpu, name: &str, problem: &Problem, extras: &OwnedExtras, kind: Codes, family: Family) {
    // Terms of a soft cap by a polynomial would be those of a descale.
    let plain = problem.with_score(problem.score.with_softcap(None));
    // Rows of codes are whole 16 bytes.
    let whole = |dim: usize| if kind == Codes::Int4 { dim.next_multiple_of(32) } else { dim };
    let plain = plain.with_head_dims(whole(plain.head_dim), whole(plain.head_dim_v));
    let own = plain
        .with_types(Types::same(Dtype::Bf16).with_kv(kind.dtype()))
        .with_descales(Descales::both(DescaleForm::Head));
    let [q, k, v, _] = values(&plain, &extras.view());
    let (scale, small) = match kind {
        Codes::E4m3 | Codes::E5m2 => (1.0, 1.0),
        Codes::Int8 => (50.0, 1.0 / 64.0),
        Codes::Int4 => (3.0, 0.25),
    };
    let codes = [&k, &v].map(|values| -> Vec<u8> {
        kind.pack(&values.iter().map(|value| value.to_f32()).collect::<Vec<_>>(), scale).collect()
    });
    let dims = [plain.head_dim, plain.head_dim_v];
    let numbers = [0, 1].map(|side| -> Vec<bf16> {
        let number = |(i, number): (usize, f32)| number * DESCALES[i / dims[side] % plain.heads_kv] * small;
        kind.numbers(&codes[side]).enumerate().map(number).map(bf16::from_f32).collect()
    });
    let descales = Some(DESCALES.map(|descale| descale * small).to_vec());
    let coded = OwnedExtras { k_descale: descales.clone(), v_descale: descales, ..extras.clone() };
    let forward = bind_forward(gpu, &own, Some(family)).unwrap();
    let spec = &forward.kernel().spec;
    assert_eq!((spec.kernel.family(), spec.types), (family, own.types));
    let found: DeviceOutput<bf16> = run!(gpu, &forward, coded, q, codes);
    let like = alike(gpu, &forward, &plain);
    let expected: DeviceOutput<bf16> = run!(gpu, &like, extras, q, numbers);
    assert!(found.same_bits(&expected), "{name}, {kind:?}: {spec}");
    assert!(found.out.iter().any(|value| value.to_f32().is_finite() && value.to_f32() != 0.0), "{name}");
}

/// All problems by the kernels of `family`, where the GPU runs it.
fn check_all(kind: Codes, family: Family) {
    let gpu = gpu();
    if family.runs_on(gpu.arch()) {
        problems()
            .iter()
            .for_each(|(name, problem, extras)| check(&gpu, name, problem, extras, kind, family));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn e4m3_codes_give_the_bits_of_their_numbers_by_mma_sync() {
    check_all(Codes::E4m3, Family::Sm80);
}

#[test]
#[ignore = "needs a GPU"]
fn e4m3_codes_give_the_bits_of_their_numbers_by_wgmma() {
    check_all(Codes::E4m3, Family::Sm90);
}

#[test]
#[ignore = "needs a GPU"]
fn int8_codes_give_the_bits_of_their_numbers_by_mma_sync() {
    check_all(Codes::Int8, Family::Sm80);
}

#[test]
#[ignore = "needs a GPU"]
fn int8_codes_give_the_bits_of_their_numbers_by_wgmma() {
    check_all(Codes::Int8, Family::Sm90);
}

#[test]
#[ignore = "needs a GPU"]
fn int4_codes_give_the_bits_of_their_numbers_by_mma_sync() {
    check_all(Codes::Int4, Family::Sm80);
}

#[test]
#[ignore = "needs a GPU"]
fn int4_codes_give_the_bits_of_their_numbers_by_wgmma() {
    check_all(Codes::Int4, Family::Sm90);
}

/// Host tensors through the engine, with a descale per row: as the CPU's, within the rounding of a row.
#[test]
#[ignore = "needs a GPU"]
fn host_tensors_in_8_bits_are_computed_as_on_the_cpu() {
    let problem = SQUARE
        .with_lengths(fa_attn::Lengths::uniform(2, 33, 500))
        .with_mask(Mask::CAUSAL)
        .with_types(Types::same(Dtype::Bf16).with_kv(Dtype::E4m3))
        .with_descales(Descales::both(DescaleForm::TokenHead));
    let [q, k, v, _] = shapes(&problem);
    let tensor = |shape: [usize; 4], seed: f32| -> Vec<f32> {
        (0..shape.iter().product()).map(|i: usize| ((i as f32 + 1.0) * seed).sin() * 1.5).collect()
    };
    let made = [(k, 0.73), (v, 0.59)].map(|(shape, seed)| {
        Codes::E4m3.quantize(&tensor(shape, seed), shape, fa_attn::quantize::Scales::TokenHead)
    });
    let queries: Vec<bf16> = tensor(q, 0.37).into_iter().map(bf16::from_f32).collect();
    let q = Tensor::new(q, queries).unwrap();
    let (k, v) =
        (Tensor::new(k, made[0].codes.clone()).unwrap(), Tensor::new(v, made[1].codes.clone()).unwrap());
    let extras = OwnedExtras {
        k_descale: Some(made[0].descales.clone()),
        v_descale: Some(made[1].descales.clone()),
        ..OwnedExtras::default()
    };
    let on = |engine: Engine| engine.forward_codes(&problem, &q, [&k, &v], &extras.view()).unwrap();
    let (gpu, cpu) = (
        on(Engine::with(Backend::Gpu).unwrap()),
        on(Engine::with(Backend::Cpu(CpuOptions::default())).unwrap()),
    );
    for (i, (a, b)) in gpu.out.data.iter().zip(&cpu.out.data).enumerate() {
        assert!((a.to_f32() - b.to_f32()).abs() < 0.02, "{i}: {a} and {b}");
    }
    for (a, b) in gpu.lse.iter().zip(&cpu.lse) {
        assert!((a - b).abs() < 0.02 || a == b, "{a} and {b}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn appended_codes_have_the_bits_of_the_cpus() {
    let engine = Engine::with(Backend::Gpu).unwrap();
    for kind in Codes::ALL {
        let codes = Some(CacheCodes { kind, descales: Descales::both(DescaleForm::TokenHead) });
        let append = Append {
            sequences: 2,
            new: Side::padded(7),
            cache: Side::padded(40),
            heads_kv: 2,
            head_dim: 64,
            head_dim_v: 128,
            dtype: Dtype::Bf16,
            codes,
            rotary: None,
        };
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let new = |dim: usize, seed: f32| -> Vec<bf16> {
            let value = |i: usize| bf16::from_f32(((i as f32 + 1.0) * seed).sin() * 3.0);
            (0..count(append.new_shape(dim))).map(value).collect()
        };
        let (k_new, v_new) = (new(64, 0.31), new(128, 0.77));
        let run = |on_gpu: bool| {
            let mut caches = [64, 128].map(|dim| vec![0x11u8; count(append.cache_shape(dim))]);
            let mut descales = [0, 1].map(|_| vec![7f32; 2 * 40 * 2]);
            let [k, v] = &mut caches;
            let [k_descale, v_descale] = &mut descales;
            let layout = TensorLayout::Bshd;
            let mut tensors = AppendTensors {
                k_new: TensorRef::packed("k_new", &k_new, append.new_shape(64), layout).unwrap(),
                v_new: TensorRef::packed("v_new", &v_new, append.new_shape(128), layout).unwrap(),
                k_cache: CacheMut::Codes(
                    TensorMut::packed("k_cache", k, append.cache_shape(64), layout).unwrap(),
                ),
                v_cache: CacheMut::Codes(
                    TensorMut::packed("v_cache", v, append.cache_shape(128), layout).unwrap(),
                ),
                q: None,
                tables: None,
            };
            let mut extras = AppendExtras {
                seqused_k: Some(&[3, 35]),
                k_descale: Some(k_descale),
                v_descale: Some(v_descale),
                ..AppendExtras::default()
            };
            let dropped = match on_gpu {
                true => engine.append(&append, &mut extras, &mut tensors).unwrap(),
                false => fa_cpu::append::append(&append, &mut extras, &mut tensors).unwrap(),
            };
            assert_eq!(dropped, 2);
            (caches, descales.map(|own| own.into_iter().map(f32::to_bits).collect::<Vec<u32>>()))
        };
        assert_eq!(run(true), run(false), "{kind:?}");
    }
}

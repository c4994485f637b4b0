//! Latent problems, whose keys begin with their values: against the oracle, against the same problem with
//! whole keys, and on the one buffer of rows that serving engines keep.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Strides, TensorLayout, Types};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::reference;
use fa_cpu::tiled::{BackwardInputs, Options, backward_extras, forward_extras};
use fa_cpu::{CpuError, Element, Extras, TensorMut, TensorRef};
use half::bf16;

use crate::inputs::{Inputs, Random, Views, assert_close, bshd};
use crate::varied::{Lie, check_type, inputs, problem};

/// DeepSeek's scale, of heads of 128 and 64 columns.
const SCALE: f64 = 0.072_168_783_648_703_22;

fn latent(heads: usize, dims: (usize, usize), mask: Mask, dtype: Dtype) -> Problem {
    Problem::new(Lengths::uniform(1, 1, 1), (heads, 1), dims, Types::same(dtype))
        .with_latent(true)
        .with_softmax_scale(Some(SCALE))
        .with_mask(mask)
}

/// The same problem and tensors with keys of all columns.
fn whole<T: Element>(problem: &Problem, inputs: &Inputs<T>) -> (Problem, Inputs<T>) {
    let (dims_k, dims_v) = (problem.head_dim_k(), problem.head_dim_v);
    let rows = inputs.v.chunks(dims_v).enumerate();
    let rows = rows.map(|(row, v)| [v, &inputs.k[row * dims_k..][..dims_k]].concat());
    (problem.with_latent(false), Inputs { k: rows.collect::<Vec<_>>().concat(), ..inputs.clone() })
}

/// O and LSE of K and V as they are given.
fn run<T: Element>(
    problem: &Problem,
    extras: &Extras<'_>,
    [q, k, v]: [&TensorRef<'_, T>; 3],
) -> Result<(Vec<f64>, Vec<f32>), CpuError> {
    let shape = out_shape(problem);
    let mut out = vec![T::from_f64(f64::NAN); shape.iter().product()];
    let mut lse = vec![f32::NAN; lse_len(problem)];
    let to = &mut TensorMut::packed("out", &mut out, shape, TensorLayout::Bshd)?;
    forward_extras(Options::default(), problem, extras, q, k, v, to, Some(&mut lse))?;
    Ok((out.into_iter().map(Element::to_f64).collect(), lse))
}

/// Sequences of a speculating server: 1 to 4 queries, no keys, fewer keys than queries, a page and its
/// neighbours, several splits.
const DECODES: [&[(usize, usize)]; 3] =
    [&[(1, 77), (1, 0), (1, 1), (1, 129)], &[(4, 130), (4, 3), (4, 0), (4, 64)], &[(2, 1300), (2, 61)]];

#[test]
fn decodes_of_any_pages_heads_and_types_are_within_tolerance() {
    let mut turn = 0;
    for lens in DECODES {
        for (heads, dims) in [(3, (72, 64)), (16, (576, 512)), (9, (40, 40)), (1, (24, 8))] {
            for lie in [Lie::Padded, Lie::Packed, Lie::Paged(61), Lie::Paged(64), Lie::Paged(2)] {
                turn += 1;
                let dtype = [Dtype::Bf16, Dtype::F32, Dtype::F16][turn % 3];
                let mask = [Mask::CAUSAL, Mask::FULL, Mask::causal_window(50)][turn / 3 % 3];
                let score = ScoreMod::NONE.with_sinks(turn % 4 == 0);
                let score = score.with_softcap([None, Some(20.0)][turn / 2 % 2]);
                // 576 columns in three types and two layouts.
                if dims.0 > 500 && !turn.is_multiple_of(2) {
                    continue;
                }
                let base = latent(heads, dims, mask, dtype).with_score(score);
                let q = [Lie::Padded, Lie::Packed][turn % 2];
                let (problem, owned) = problem(base, lens, [q, lie], turn as u64);
                check_type(&problem, &owned.view(), turn as u64, false);
            }
        }
    }
}

/// As many query heads on one K/V head as make panels of their own, with and without latents.
#[test]
fn many_heads_on_one_row_are_within_tolerance() {
    let mut turn = 0;
    for lens in DECODES {
        for lie in [Lie::Padded, Lie::PackedUsed, Lie::Paged(61), Lie::Paged(16)] {
            for mask in [Mask::CAUSAL, Mask::FULL, Mask::band(None, Some(3)), Mask::CAUSAL.with_offset(-2)] {
                turn += 1;
                let (heads, dims) = [(32, (72, 64)), (50, (40, 40)), (33, (24, 8))][turn % 3];
                let score = ScoreMod::NONE.with_softcap([None, Some(20.0)][turn / 2 % 2]);
                let base = latent(heads, dims, mask, Dtype::Bf16).with_score(score);
                let base = base.with_latent(turn % 2 == 0);
                let q = [Lie::Packed, Lie::Padded][turn / 4 % 2];
                let (problem, owned) = problem(base, lens, [q, lie], turn as u64);
                check_type(&problem, &owned.view(), turn as u64, false);
            }
        }
    }
}

#[test]
fn prefills_are_within_tolerance() {
    let lens = [(130, 200), (33, 33), (7, 300), (0, 5), (40, 20)];
    for (turn, lie) in [Lie::Packed, Lie::Paged(16), Lie::Padded].into_iter().enumerate() {
        for (heads, dims) in [((3, 1), (72, 64)), ((4, 2), (48, 32)), ((2, 1), (64, 64))] {
            let dtype = [Dtype::Bf16, Dtype::F32, Dtype::F16][turn];
            let base = latent(1, dims, Mask::CAUSAL, dtype).with_heads(heads.0, heads.1);
            let (problem, owned) = problem(base, &lens, [Lie::Packed, lie], turn as u64);
            check_type(&problem, &owned.view(), turn as u64, false);
        }
    }
}

/// Head dims beyond the GPU's, with K and V of their own.
#[test]
fn wide_heads_need_no_latents() {
    let lens = [(1, 300), (70, 70), (4, 33)];
    for (turn, dims) in [(512, 512), (320, 256), (576, 512), (512, 64)].into_iter().enumerate() {
        let base = latent(4, dims, Mask::CAUSAL, [Dtype::Bf16, Dtype::F32][turn % 2]);
        let base = base.with_latent(false).with_heads_kv(2).with_softmax_scale(None);
        let (problem, owned) = problem(base, &lens, [Lie::Packed, Lie::Packed], turn as u64);
        check_type(&problem, &owned.view(), turn as u64, turn < 2);
    }
}

#[test]
fn keys_are_values_followed_by_the_other_columns() {
    for (dims, lens) in [((72, 64), (3, 200)), ((64, 64), (40, 90))] {
        let problem =
            latent(8, dims, Mask::CAUSAL, Dtype::F32).with_lengths(Lengths::uniform(2, lens.0, lens.1));
        let given = Inputs::<f32>::random(&problem, 3);
        let (plain, all) = whole(&problem, &given);
        let (of_latent, of_plain) = (given.views(&problem), all.views(&plain));
        let exact = |problem: &Problem, views: &Views<'_, f32>| {
            reference::forward(problem, &views.q, &views.k, &views.v).unwrap()
        };
        assert_eq!(exact(&problem, &of_latent), exact(&plain, &of_plain), "{dims:?}");
        let tiled = |problem: &Problem, views: &Views<'_, f32>| {
            run(problem, &Extras::NONE, [&views.q, &views.k, &views.v]).unwrap()
        };
        let ((out, lse), (want, want_lse)) = (tiled(&problem, &of_latent), tiled(&plain, &of_plain));
        assert_close("out", &out, &want, 1e-6);
        assert_close("lse", &lse.map_f64(), &want_lse.map_f64(), 1e-6);
    }
}

/// Numbers as f64.
trait MapF64 {
    fn map_f64(&self) -> Vec<f64>;
}

impl MapF64 for Vec<f32> {
    fn map_f64(&self) -> Vec<f64> {
        self.iter().copied().map(f64::from).collect()
    }
}

/// K and V as two views of rows `[latent | rotary]`, in pages, give the bits of tensors of their own.
#[test]
fn one_buffer_of_rows_gives_the_bits_of_two_tensors() {
    let base = latent(16, (576, 512), Mask::CAUSAL, Dtype::Bf16);
    let lens = [(2, 150), (2, 64), (2, 0)];
    let (problem, owned) = problem(base, &lens, [Lie::Padded, Lie::Paged(64)], 9);
    let given = inputs::<bf16>(&problem, &owned.view(), 9);
    let Views { q, k, v, .. } = given.views(&problem);
    let want = run(&problem, &owned.view(), [&q, &k, &v]).unwrap();
    let (_, all) = whole(&problem, &given);
    let [pages, page, ..] = k_shape(&problem);
    let strides = Strides { batch: (page * 576) as i64, seq: 576, head: 576, dim: 1 };
    let v = TensorRef::new("v", &all.k, [pages, page, 1, 512], strides).unwrap();
    let k = TensorRef::new("k", &all.k[512..], [pages, page, 1, 64], strides).unwrap();
    let got = run(&problem, &owned.view(), [&q, &k, &v]).unwrap();
    // Rows of no sequence are NaN in both.
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got.0), bits(&want.0));
    assert_eq!(bits(&got.1.map_f64()), bits(&want.1.map_f64()));
    let [_, seqlen, heads, dims] = out_shape(&problem);
    let blind = 2 * seqlen * heads * dims;
    assert_eq!(got.0[blind..][..2 * heads * dims], vec![0.0; 2 * heads * dims], "a sequence without keys");
    assert_eq!(got.1[2 * heads * seqlen..][..2], [f32::NEG_INFINITY; 2]);
}

/// Sums that leave f32 are taken again from both tensors.
#[test]
fn values_near_the_largest_keep_their_means() {
    let problem = latent(2, (24, 16), Mask::FULL, Dtype::F32).with_lengths(Lengths::uniform(1, 1, 40));
    let mut given = Inputs::<f32>::random(&problem, 1);
    let mut random = Random::new(8);
    given.q.iter_mut().enumerate().for_each(|(i, q)| *q = if i % 24 < 16 { 0.0 } else { *q });
    given.v.iter_mut().for_each(|v| *v = 3e38 * (0.9 + 0.1 * random.uniform() as f32));
    let Views { q, k, v, .. } = given.views(&problem);
    let exact = reference::forward(&problem, &q, &k, &v).unwrap();
    let (out, _) = run(&problem, &Extras::NONE, [&q, &k, &v]).unwrap();
    for (got, want) in out.iter().zip(&exact.out) {
        assert!(got.is_finite() && ((got - want) / want).abs() < 1e-5, "{got} for {want}");
    }
}

#[test]
fn what_latents_do_not_have_is_named() {
    let problem = latent(2, (24, 16), Mask::FULL, Dtype::F32).with_lengths(Lengths::uniform(1, 3, 5));
    let given = Inputs::<f32>::random(&problem, 1);
    let Views { q, k, v, dout } = given.views(&problem);
    let refused = |got: Result<(Vec<f64>, Vec<f32>), CpuError>, part: &str| {
        let text = got.unwrap_err().to_string();
        assert!(text.contains(part), "{text} does not name {part}");
    };
    refused(
        run(&problem.with_softmax_scale(None), &Extras::NONE, [&q, &k, &v]),
        "softmax_scale is not given",
    );
    refused(run(&problem, &Extras::NONE, [&q, &v, &v]), "k is [batch, seqlen, heads, dim] = [1, 5, 1, 16]");
    let [mut dq, mut dk, mut dv] =
        [q_shape, k_shape, v_shape].map(|of| vec![0f32; of(&problem).iter().product()]);
    let lse = vec![0f32; lse_len(&problem)];
    let inputs =
        BackwardInputs { q, k, v, out: bshd("out", &given.dout, out_shape(&problem)), lse: &lse, dout };
    let error = backward_extras(
        Options::default(),
        &problem,
        &Extras::NONE,
        &inputs,
        &mut TensorMut::packed("dq", &mut dq, q_shape(&problem), TensorLayout::Bshd).unwrap(),
        &mut TensorMut::packed("dk", &mut dk, k_shape(&problem), TensorLayout::Bshd).unwrap(),
        &mut TensorMut::packed("dv", &mut dv, v_shape(&problem), TensorLayout::Bshd).unwrap(),
        None,
    );
    assert_eq!(error, Err(CpuError::LatentBackward));
    let of_oracle = reference::backward(&problem, &q, &k, &v, &dout).unwrap_err();
    assert!(of_oracle.to_string().contains("before absorption"), "{of_oracle}");
}

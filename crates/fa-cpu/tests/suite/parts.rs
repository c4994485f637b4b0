//! Gradients through a part of the keys, with O and LSE of all of them: a step of ring attention.

use fa_core::{Dtype, Lengths, Mask, Problem, TensorLayout};
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_cpu::tiled::{BackwardInputs, Options, backward_with};
use fa_cpu::{Element, TensorMut};
use half::{bf16, f16};

use crate::inputs::{Inputs, assert_close, bshd};
use crate::tiled::{Results, isas};

fn exact<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// dQ of the parts adds up to that of the whole, dK and dV are those of the whole. Each part has few keys,
/// where a 16-bit O's rounding is avoided, and a part's probabilities do not sum to 1.
fn parts_add_up<T: Element>(dtype: Dtype, tolerance: f64) {
    let whole = Problem::square(1, 9, 2, 32, Mask::FULL, dtype)
        .with_lengths(Lengths::uniform(1, 9, 40))
        .with_heads_kv(1);
    let inputs = Inputs::<T>::random(&whole, 31);
    for isa in isas() {
        let options = Options { isa: Some(isa), threads: Some(1) };
        let want = Results::compute(options, &whole, &inputs, true);
        let mut dq = vec![0f64; want.dq.len()];
        // 3, 16 and 21 keys: rows of dK and dV are 32 wide, of one head.
        for keys in [0..3, 3..19, 19..40] {
            let part = whole.with_lengths(Lengths::uniform(1, 9, keys.len()));
            let rows = 32 * keys.start..32 * keys.end;
            let (k, v) = (&inputs.k[rows.clone()], &inputs.v[rows.clone()]);
            let given = BackwardInputs {
                q: bshd("q", &inputs.q, q_shape(&part)),
                k: bshd("k", k, k_shape(&part)),
                v: bshd("v", v, v_shape(&part)),
                out: bshd("out", &want.out, out_shape(&part)),
                lse: &want.lse,
                dout: bshd("dout", &inputs.dout, out_shape(&part)),
            };
            let shapes = [q_shape(&part), k_shape(&part), v_shape(&part)];
            let mut grads = shapes.map(|shape| vec![T::from_f64(f64::NAN); shape.iter().product()]);
            let mut views = grads.iter_mut().zip(shapes);
            let [mut to_q, mut to_k, mut to_v] = std::array::from_fn(|_| {
                let (grad, shape) = views.next().expect("three of them");
                TensorMut::packed("gradient", grad, shape, TensorLayout::Bshd).expect("its length")
            });
            backward_with(options, &part, &given, &mut to_q, &mut to_k, &mut to_v).unwrap();
            let [part_dq, dk, dv] = grads.map(|grad| exact(&grad));
            dq.iter_mut().zip(part_dq).for_each(|(sum, term)| *sum += term);
            assert_close(&format!("{dtype} dk by {isa}"), &dk, &exact(&want.dk[rows.clone()]), tolerance);
            assert_close(&format!("{dtype} dv by {isa}"), &dv, &exact(&want.dv[rows]), tolerance);
        }
        assert_close(&format!("{dtype} dq by {isa}"), &dq, &exact(&want.dq), tolerance);
    }
}

#[test]
fn gradients_of_parts_of_the_keys_add_up_to_those_of_the_whole() {
    parts_add_up::<f32>(Dtype::F32, 4e-6);
    parts_add_up::<f16>(Dtype::F16, 2e-3);
    parts_add_up::<bf16>(Dtype::Bf16, 1.6e-2);
}

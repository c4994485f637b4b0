//! Tensors that are not packed: strides of every kind, broadcast axes, offsets beyond 31 bits.

use fa_core::{Dtype, Lengths, Strides, TensorLayout, Types};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::tiled::{self, Options};
use fa_cpu::{TensorMut, TensorRef, reference};
use half::bf16;
use half::slice::HalfBitsSliceExt;

use crate::inputs::{Inputs, Views, assert_close, bshd};
use crate::pitfalls::{SMALL, exact};
use crate::tiled::{Expected, Results};

/// Strides that are not packed: gaps that hold NaN, axes in another order, every second element. The gaps of
/// outputs stay as they are.
#[test]
fn strides_of_every_kind() {
    let shapes = [q_shape, k_shape, v_shape, out_shape, q_shape, k_shape, v_shape].map(|shape| shape(&SMALL));
    let names = ["q", "k", "v", "out", "dq", "dk", "dv"];
    let inputs = Inputs::<f32>::random(&SMALL, 3);
    let packed = Results::compute(Options::default(), &SMALL, &inputs, true);
    let strides: [fn([usize; 4]) -> Strides; 4] = [
        // A gap of one element after every row, so that nothing is aligned.
        |[_, s, h, d]| {
            let [s, h, d] = [s, h, d].map(|len| len as i64);
            Strides { batch: s * (h * (d + 1) + 3) + 7, seq: h * (d + 1) + 3, head: d + 1, dim: 1 }
        },
        |[_, s, h, d]| TensorLayout::Bhsd.strides(s, h, d),
        // The dim is not the fastest axis.
        |[b, s, h, _]| {
            let [b, s, h] = [b, s, h].map(|len| len as i64);
            Strides { batch: s * h, seq: h, head: 1, dim: b * s * h + 1 }
        },
        // Every second element.
        |[_, s, h, d]| {
            let [s, h, d] = [s, h, d].map(|len| len as i64);
            Strides { batch: 2 * s * h * d, seq: 2 * d, head: 2 * s * d, dim: 2 }
        },
    ];
    for strides in strides {
        let [mut q, mut k, mut v, mut out, mut dq, mut dk, mut dv] =
            shapes.map(|shape| vec![f32::NAN; reach(shape, &strides(shape))]);
        let mut dout = out.clone();
        for (strided, packed, shape) in [
            (&mut q, &inputs.q, shapes[0]),
            (&mut k, &inputs.k, shapes[1]),
            (&mut v, &inputs.v, shapes[2]),
            (&mut dout, &inputs.dout, shapes[3]),
        ] {
            for (&value, at) in packed.iter().zip(offsets(shape, strides(shape))) {
                strided[at] = value;
            }
        }
        let mut lse = vec![f32::NAN; lse_len(&SMALL)];
        {
            let view = |name, data, shape| TensorRef::new(name, data, shape, strides(shape)).unwrap();
            let (q, k, v) = (view("q", &q, shapes[0]), view("k", &k, shapes[1]), view("v", &v, shapes[2]));
            let writable = |index: usize, data| {
                TensorMut::new(names[index], data, shapes[index], strides(shapes[index])).unwrap()
            };
            let (mut out, mut dq) = (writable(3, &mut out), writable(4, &mut dq));
            let (mut dk, mut dv) = (writable(5, &mut dk), writable(6, &mut dv));
            tiled::forward(&SMALL, &q, &k, &v, &mut out, Some(&mut lse)).unwrap();
            let dout = view("dout", &dout, shapes[3]);
            tiled::backward(&SMALL, &q, &k, &v, &out.as_ref(), &lse, &dout, &mut dq, &mut dk, &mut dv)
                .unwrap();
        }
        assert_eq!(lse, packed.lse);
        for (strided, packed, shape) in [
            (&out, &packed.out, shapes[3]),
            (&dq, &packed.dq, shapes[4]),
            (&dk, &packed.dk, shapes[5]),
            (&dv, &packed.dv, shapes[6]),
        ] {
            let offsets: Vec<usize> = offsets(shape, strides(shape)).collect();
            let got: Vec<f32> = offsets.iter().map(|&at| strided[at]).collect();
            assert_eq!(&got, packed);
            let gaps = strided.iter().filter(|value| value.is_nan()).count();
            assert_eq!(gaps, strided.len() - offsets.len(), "gaps are not written");
        }
    }
}

/// Offsets of a tensor's elements in BSHD order.
fn offsets([b, s, h, d]: [usize; 4], strides: Strides) -> impl Iterator<Item = usize> {
    (0..b * s * h * d)
        .map(move |i| strides.offset(i / (s * h * d), i / (h * d) % s, i / d % h, i % d) as usize)
}

/// Elements of storage that the shape and strides reach over.
fn reach([b, s, h, d]: [usize; 4], strides: &Strides) -> usize {
    strides.offset(b - 1, s - 1, h - 1, d - 1) as usize + 1
}

/// One key head for both, one value row for every key, one dO for all queries, as of a sum over them.
#[test]
fn broadcast_inputs() {
    let inputs = Inputs::<f32>::random(&SMALL, 4);
    let Views { q, k, v, dout } = inputs.views(&SMALL);
    fn again<'a>(name: &'static str, from: TensorRef<'a, f32>, strides: Strides) -> TensorRef<'a, f32> {
        TensorRef::new(name, from.data(), from.shape(), strides).unwrap()
    }
    let k = again("k", k, Strides { head: 0, ..k.strides() });
    let v = again("v", v, Strides { seq: 0, ..v.strides() });
    let dout = again("dout", dout, Strides { batch: 0, seq: 0, ..dout.strides() });
    let expected = reference::forward(&SMALL, &q, &k, &v).unwrap();
    let mut out = vec![f32::NAN; expected.out.len()];
    let mut lse = vec![f32::NAN; expected.lse.len()];
    let mut view = TensorMut::packed("out", &mut out, out_shape(&SMALL), TensorLayout::Bshd).unwrap();
    tiled::forward(&SMALL, &q, &k, &v, &mut view, Some(&mut lse)).unwrap();
    assert_close("out", &exact(&out), &expected.out, 1e-6);
    assert_close("lse", &exact(&lse), &expected.lse, 1e-6);

    let expected = reference::backward(&SMALL, &q, &k, &v, &dout).unwrap();
    let [mut dq, mut dk, mut dv] =
        [&expected.dq, &expected.dk, &expected.dv].map(|values| vec![f32::NAN; values.len()]);
    fn writable<'a>(name: &'static str, data: &'a mut [f32], shape: [usize; 4]) -> TensorMut<'a, f32> {
        TensorMut::packed(name, data, shape, TensorLayout::Bshd).unwrap()
    }
    tiled::backward(
        &SMALL,
        &q,
        &k,
        &v,
        &bshd("out", &out, out_shape(&SMALL)),
        &lse,
        &dout,
        &mut writable("dq", &mut dq, q_shape(&SMALL)),
        &mut writable("dk", &mut dk, k_shape(&SMALL)),
        &mut writable("dv", &mut dv, v_shape(&SMALL)),
    )
    .unwrap();
    assert_close("dq", &exact(&dq), &expected.dq, 1e-5);
    assert_close("dk", &exact(&dk), &expected.dk, 1e-5);
    assert_close("dv", &exact(&dv), &expected.dv, 1e-5);
}

#[test]
fn offsets_past_two_to_the_31_elements() {
    // Storage of 4 GiB each, of which a few pages are touched; a machine without room for them cannot hold
    // such tensors.
    const STRIDE: usize = (1 << 31) + 12345;
    if available_memory().is_none_or(|bytes| bytes < 12 << 30) {
        eprintln!("not enough memory for tensors of 4 GiB: nothing checked");
        return;
    }
    let problem = SMALL
        .with_types(Types::same(Dtype::Bf16))
        .with_heads_kv(4)
        .with_lengths(Lengths::uniform(SMALL.lengths.sequences(), SMALL.lengths.max_q(), 37))
        .with_head_dim_v(13);
    let shape = q_shape(&problem);
    let one = shape[1] * shape[2] * shape[3];
    let inputs = Inputs::<bf16>::random(&problem, 5);
    let strides =
        Strides { batch: STRIDE as i64, ..TensorLayout::Bshd.strides(shape[1], shape[2], shape[3]) };
    let mut data = vec![0u16; STRIDE + 4 * one];
    let data: &mut [bf16] = data.reinterpret_cast_mut();
    for (index, tensor) in [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].into_iter().enumerate() {
        for batch in 0..2 {
            data[batch * STRIDE + index * one..][..one].copy_from_slice(&tensor[batch * one..][..one]);
        }
    }
    let view = |index: usize| TensorRef::new("input", &data[index * one..], shape, strides).unwrap();
    let (q, k, v, dout) = (view(0), view(1), view(2), view(3));
    let mut storage = [(); 4].map(|()| vec![0u16; STRIDE + one]);
    let mut lse = vec![f32::NAN; lse_len(&problem)];
    {
        let mut writable = storage.iter_mut().map(|data| {
            TensorMut::new("output", data.reinterpret_cast_mut::<bf16>(), shape, strides).unwrap()
        });
        let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| writable.next().unwrap());
        tiled::forward(&problem, &q, &k, &v, &mut out, Some(&mut lse)).unwrap();
        tiled::backward(&problem, &q, &k, &v, &out.as_ref(), &lse, &dout, &mut dq, &mut dk, &mut dv).unwrap();
    }
    let packed = Results::compute(Options::default(), &problem, &inputs, true);
    for (far, near) in storage.iter().zip([&packed.out, &packed.dq, &packed.dk, &packed.dv]) {
        let far: &[bf16] = far.reinterpret_cast();
        for batch in 0..2 {
            assert_eq!(far[batch * STRIDE..][..one], near[batch * one..][..one], "batch {batch}");
        }
    }
    let expected = Expected::compute(&problem, &inputs, true);
    assert_eq!(reference::forward(&problem, &q, &k, &v).unwrap(), expected.forward);
    assert_eq!(
        reference::backward(&problem, &q, &k, &v, &dout).unwrap(),
        expected.backward.as_ref().unwrap().0
    );
    let failures = packed.failures("packed", &problem, &inputs, &expected);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Bytes of memory to be had, where the system says.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

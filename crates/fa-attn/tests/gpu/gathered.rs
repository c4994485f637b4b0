//! Gradients of programs' arrays that kernels do not sum, of tensors in device memory and of the host's,
//! beside the CPU's; a captured stream is refused.

use fa_attn::device::{
    BindOptions, DeviceBackward, DeviceExtras, DeviceForward, DeviceTensor, Placement, capture, shapes,
};
use fa_attn::program::{ArrayData, ArrayView, Inputs, Interned, Program, Value};
use fa_attn::{
    Backend, BackwardTensors, CpuOptions, Dtype, Engine, Error, ForwardTensors, Gradients, Lengths, Mask,
    Output, OwnedExtras, Pass, Problem, ScoreMod, Side, Tensor, TensorLayout, bf16,
};
use fa_cpu::Arguments;

use crate::case::normals;
use crate::gpu;

/// Tables by distance and by what another array names, a gain for each head, a bias that no load needs, and
/// an array that no score follows.
const TEXT: &str = "array bias: bf16[_, _, _, _] grad; array c: i32[_]; array g: f32[_] grad; \
                    array t: f32[_, _] grad; array unread: f16[_, _] grad; scalar x: f32; \
                    mask = (q + k) % 7 != 0; \
                    score = s * g[h] + t[h, q - k + off + 4 * b] - x * t[c[k], 2] + bias[b, h, q, k];";

const HEADS: usize = 4;

fn program() -> Interned {
    Program::parse(TEXT).unwrap().intern().unwrap()
}

/// Of one length, packed, and with lengths in use.
fn problems() -> [(Problem, OwnedExtras); 3] {
    let base = Problem::square(1, 1, 2, 64, Mask::FULL, Dtype::Bf16)
        .with_heads_q(HEADS)
        .with_score(ScoreMod::NONE.with_program(Some(program())));
    let packed = OwnedExtras {
        cu_seqlens_q: Some(vec![0, 90, 90, 91, 160]),
        cu_seqlens_k: Some(vec![0, 100, 120, 120, 250]),
        ..OwnedExtras::default()
    };
    let used = OwnedExtras { seqused_k: Some(vec![77, 130]), ..OwnedExtras::default() };
    let half_used = Lengths::of(2, Side::padded(70), Side::padded(130).with_used());
    [
        (base.with_lengths(Lengths::uniform(2, 100, 130)), OwnedExtras::default()),
        (base.with_lengths(Lengths::packed(4, 160, 250, 90, 130)), packed),
        (base.with_lengths(half_used), used),
    ]
}

fn values(shape: [usize; 4], turn: usize) -> Tensor<bf16> {
    Tensor::new(shape, normals(turn, shape)).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_of_arrays_at_any_indices_are_the_cpus() {
    let [uniform, _, _] = problems();
    check(uniform);
}

#[test]
#[ignore = "needs a GPU"]
fn those_of_packed_sequences_are_too() {
    let [_, packed, _] = problems();
    check(packed);
}

#[test]
#[ignore = "needs a GPU"]
fn those_of_lengths_in_use_are_too() {
    let [_, _, used] = problems();
    check(used);
}

/// Host tensors and tensors in device memory beside the CPU.
fn check((problem, extras): (Problem, OwnedExtras)) {
    let gpu = gpu();
    let stream = &gpu.stream;
    let by_cpu = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
    let by_gpu = Engine::with(Backend::Gpu).unwrap();
    let extras = extras.view();
    let (sequences, lengths) = (problem.lengths.sequences(), &problem.lengths);
    let [of_q, of_k, of_v, of_out] = shapes(&problem);
    let (q, k, v, dout) = (values(of_q, 0), values(of_k, 1), values(of_v, 2), values(of_out, 3));
    let index: Vec<i32> = (0..130).map(|i| i * 7 % 5 - 1).collect();
    let gain = [0.5, 1.0, 1.5, -1.0, 9.0, 9.0];
    let table: Vec<f32> = (0..HEADS * 150).map(|i| (i * 31 % 17) as f32 / 17.0).collect();
    // Some arrays go on behind their indices.
    let more = if lengths.is_uniform() { 0 } else { 8 };
    let of_bias = [sequences + more, HEADS + more, lengths.max_q() + more, lengths.max_k() + more];
    let bias: Vec<u16> = values(of_bias, 4).data.iter().map(|value| value.to_bits()).collect();
    let arrays = vec![
        ArrayView::contiguous(ArrayData::Bf16(&bias), &of_bias),
        ArrayView::contiguous(ArrayData::I32(&index), &[130]),
        ArrayView::contiguous(ArrayData::F32(&gain), &[HEADS + more / 4]),
        ArrayView::contiguous(ArrayData::F32(&table), &[HEADS, 150]),
        ArrayView::contiguous(ArrayData::F16(&[0; 35]), &[5, 7]),
    ];
    let inputs = Inputs::new(&program(), arrays, vec![Value::F32(0.25)]).unwrap();

    let mut output = Output::new(&problem, q.layout).unwrap();
    let views = || [&q, &k, &v].map(|own| own.view("q").unwrap());
    let forward = ForwardTensors::of(views(), &mut output, extras).unwrap();
    by_cpu.bind(&problem, Pass::Forward).unwrap().run(forward.with_program(&inputs)).unwrap();
    let backward = |engine: &Engine| {
        let mut gradients = Gradients::new(&problem, q.layout).unwrap();
        let mut darrays = Vec::new();
        let tensors = BackwardTensors::of(views(), &output, &dout, &mut gradients, extras).unwrap();
        let call = engine.bind(&problem, Pass::BACKWARD).unwrap();
        assert_eq!(call.is_on_gpu(), engine.gpu().is_some());
        call.run(tensors.with_program(&inputs, Some(&mut darrays))).unwrap();
        (gradients, darrays)
    };
    let (want, want_arrays) = backward(&by_cpu);
    let (host, host_arrays) = backward(&by_gpu);

    let views = [&q, &k, &v].map(|own| own.view("q").unwrap());
    let placement = Placement::packed(of_out, TensorLayout::Bshd);
    let mut tensors = DeviceForward::upload(stream, &problem, 0, views.each_ref(), placement).unwrap();
    let arguments = Arguments { program: Some(&inputs), ..Arguments::from(&extras) };
    tensors.extras = DeviceExtras::upload(stream, arguments).unwrap();
    tensors.extras.program.as_mut().unwrap().want_gradients(stream, &program()).unwrap();
    tensors.out = DeviceTensor::upload(stream, &output.out.view("out").unwrap()).unwrap();
    tensors.lse = stream.clone_htod(&output.lse).unwrap();
    let gathered = gpu.bind_gathered(&problem, Pass::BACKWARD, &BindOptions::default()).unwrap();
    let gathered = gathered.expect("a table by distance");
    let dout = DeviceTensor::upload(stream, &dout.view("dout").unwrap()).unwrap();
    let mut device = DeviceBackward::new(stream, gathered.backward(), &tensors, dout).unwrap();
    gathered.run(&mut tensors, &mut device, stream).unwrap();
    let found = device.read(stream).unwrap().values;
    let close = |what: &str, found: f32, want: f32, most: f32| {
        assert!(found.is_nan() == want.is_nan(), "{what}: {found}, not {want}");
        assert!(found.is_nan() || (found - want).abs() <= 0.02 * most, "{what}: {found}, not {want}");
    };
    let largest = |all: &[f32]| all.iter().filter(|x| x.is_finite()).fold(0f32, |most, x| most.max(x.abs()));
    let wanted = [&want.dq, &want.dk, &want.dv];
    for ((own, of_host), want) in found.iter().zip([&host.dq, &host.dk, &host.dv]).zip(wanted) {
        let floats = |all: &[bf16]| all.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let (own, of_host, want) = (floats(own), floats(&of_host.data), floats(&want.data));
        let most = largest(&want);
        for ((&own, &of_host), &exact) in own.iter().zip(&of_host).zip(&want) {
            close("device", own, exact, most);
            close("host", of_host, exact, most);
        }
    }
    let own = &tensors.extras.program.as_ref().unwrap().gradients;
    for ((own, of_host), want) in own.iter().zip(&host_arrays).zip(&want_arrays) {
        let own = own.as_ref().map(|own| own.read(stream).unwrap()).unwrap_or_default();
        assert_eq!((own.len(), of_host.len()), (want.len(), want.len()));
        let most = largest(want);
        for ((&own, &of_host), &exact) in own.iter().zip(of_host).zip(want) {
            close("an array in device memory", own, exact, most);
            close("an array of the host", of_host, exact, most);
        }
    }

    let own = &gpu.context().new_stream().unwrap();
    let mut refused = None;
    // SAFETY: nothing is launched; of the graph, which may be none as it is empty, nothing is either.
    let graph = unsafe {
        capture(own, || {
            refused = Some(gathered.run(&mut tensors, &mut device, own));
            Ok(())
        })
    };
    drop(graph);
    assert!(matches!(refused, Some(Err(Error::Captured))), "{refused:?}");
}

/// Where kernels sum all gradients there is nothing to gather.
#[test]
#[ignore = "needs a GPU"]
fn plain_indices_are_the_kernels() {
    let own = Program::parse("array t: f32[_, _] grad; score = s + t[h, k];").unwrap().intern().unwrap();
    let problem = Problem::square(1, 64, 2, 64, Mask::FULL, Dtype::Bf16)
        .with_score(ScoreMod::NONE.with_program(Some(own)));
    assert!(gpu().bind_gathered(&problem, Pass::BACKWARD, &BindOptions::default()).unwrap().is_none());
}

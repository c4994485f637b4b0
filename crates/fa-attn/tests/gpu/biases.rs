//! Biases whose rows are aligned and others, and gradients of biases that go on behind the scores.

use fa_attn::device::{
    BindOptions, DeviceBackward, DeviceExtras, DeviceForward, DeviceGradient, DeviceTensor, Placement,
    fill_with_nan, shapes,
};
use fa_attn::program::{ArrayData, ArrayView, Inputs, Interned, Program};
use fa_attn::{
    Backend, BackwardTensors, CpuOptions, Dtype, Engine, Extras, ForwardTensors, Gradients, Lengths, Mask,
    Output, Pass, Problem, ScoreMod, Tensor, TensorLayout, bf16,
};
use fa_cpu::Arguments;

use crate::case::normals;
use crate::gpu;

fn program() -> Interned {
    let text = "array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k];";
    Program::parse(text).unwrap().intern().unwrap()
}

fn problem(queries: usize, keys: usize) -> Problem {
    Problem::square(2, 1, 4, 128, Mask::CAUSAL, Dtype::Bf16)
        .with_lengths(Lengths::uniform(2, queries, keys))
        .with_score(ScoreMod::NONE.with_program(Some(program())))
}

fn values(shape: [usize; 4], turn: usize) -> Tensor<bf16> {
    Tensor::new(shape, normals(turn, shape)).unwrap()
}

fn bits(shape: [usize; 4]) -> Vec<u16> {
    values(shape, 4).data.iter().map(|value| value.to_bits()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn forwards_of_aligned_rows_have_the_bits_of_others() {
    let problem = problem(150, 136);
    let [of_q, of_k, of_v, _] = shapes(&problem);
    let (q, k, v) = (values(of_q, 0), values(of_k, 1), values(of_v, 2));
    let aligned = bits([2, 4, 150, 136]);
    let other: Vec<u16> = aligned.chunks(136).flat_map(|row| row.iter().copied().chain([0x7fc0])).collect();
    let view = ArrayView::contiguous(ArrayData::Bf16(&aligned), &[2, 4, 150, 136]);
    let strides = [4 * 150 * 137, 150 * 137, 137, 1];
    let engine = Engine::with(Backend::Gpu).unwrap();
    let call = engine.bind(&problem, Pass::Forward).unwrap();
    let run = |view: ArrayView<'_>| {
        let inputs = Inputs::new(&program(), vec![view], Vec::new()).unwrap();
        let mut output = Output::new(&problem, q.layout).unwrap();
        let views = [&q, &k, &v].map(|own| own.view("q").unwrap());
        let forward = ForwardTensors::of(views, &mut output, Extras::NONE).unwrap();
        call.run(forward.with_program(&inputs)).unwrap();
        (output.out.data.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), output.lse)
    };
    let of_aligned = run(view);
    assert_eq!(run(ArrayView { data: ArrayData::Bf16(&other), strides, ..view }), of_aligned);
    assert!(of_aligned.1.iter().any(|lse| lse.is_finite()) && !of_aligned.1.iter().any(|lse| lse.is_nan()));
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_of_longer_biases_have_zeros_behind_the_scores() {
    let (gpu, problem) = (gpu(), problem(150, 139));
    let stream = &gpu.stream;
    let [of_q, of_k, of_v, of_out] = shapes(&problem);
    let (q, k, v, dout) = (values(of_q, 0), values(of_k, 1), values(of_v, 2), values(of_out, 3));
    for extents in [[3, 5, 157, 152], [2, 4, 150, 144], [2, 4, 150, 141]] {
        let bias = bits(extents);
        let array = ArrayView::contiguous(ArrayData::Bf16(&bias), &extents);
        let inputs = Inputs::new(&program(), vec![array], Vec::new()).unwrap();
        let mut output = Output::new(&problem, q.layout).unwrap();
        let views = || [&q, &k, &v].map(|own| own.view("q").unwrap());
        let by_cpu = Engine::with(Backend::Cpu(CpuOptions::default())).unwrap();
        let forward = ForwardTensors::of(views(), &mut output, Extras::NONE).unwrap();
        by_cpu.bind(&problem, Pass::Forward).unwrap().run(forward.with_program(&inputs)).unwrap();
        let mut gradients = Gradients::new(&problem, q.layout).unwrap();
        let mut want = Vec::new();
        let tensors = BackwardTensors::of(views(), &output, &dout, &mut gradients, Extras::NONE).unwrap();
        let call = by_cpu.bind(&problem, Pass::BACKWARD).unwrap();
        call.run(tensors.with_program(&inputs, Some(&mut want))).unwrap();

        let placement = Placement::packed(of_out, TensorLayout::Bshd);
        let mut tensors = DeviceForward::upload(stream, &problem, 0, views().each_ref(), placement).unwrap();
        let arguments = Arguments { program: Some(&inputs), ..Arguments::from(&Extras::NONE) };
        tensors.extras = DeviceExtras::upload(stream, arguments).unwrap();
        let own = tensors.extras.program.as_mut().unwrap();
        own.want_narrow_gradients(stream, &program()).unwrap();
        let Some(DeviceGradient::Bf16(room)) = &mut own.gradients[0] else { panic!("in its own type") };
        fill_with_nan(stream, room).unwrap();
        tensors.out = DeviceTensor::upload(stream, &output.out.view("out").unwrap()).unwrap();
        tensors.lse = stream.clone_htod(&output.lse).unwrap();
        let bound = gpu.bind(&problem, Pass::BACKWARD, &BindOptions::default()).unwrap();
        let bound = bound.backward().unwrap();
        let dout = DeviceTensor::upload(stream, &dout.view("dout").unwrap()).unwrap();
        let mut device = DeviceBackward::new(stream, &bound, &tensors, dout).unwrap();
        device.run(&tensors, &bound, stream).unwrap();
        let found = tensors.extras.program.as_ref().unwrap().gradients[0].as_ref().unwrap();
        let found = found.read(stream).unwrap();
        assert_eq!(found.len(), want[0].len());
        let most = want[0].iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(most > 0.0);
        for (at, (&own, &exact)) in found.iter().zip(&want[0]).enumerate() {
            assert!((own - exact).abs() <= 0.02 * most, "{extents:?}, {at}: {own}, not {exact}");
        }
    }
}

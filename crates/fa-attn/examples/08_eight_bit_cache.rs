//! A server's cache in 8 bits, or 4: each new key and value is quantised as it is appended to a cache in
//! pages, with a descale for each row and head, and attention reads codes and descales. The cache takes half
//! the memory of one in bf16, or a quarter, but for the descales, and steps of a request stay within its
//! rounding.
//!
//! ```text
//! cargo run --release -p fa-attn --example 08_eight_bit_cache
//! ```

use std::error::Error;

use fa_attn::quantize::Codes;
use fa_attn::{
    Append, AppendExtras, AppendTensors, Backend, CacheCodes, CpuOptions, DescaleForm, Descales, Engine,
    Extras, Lengths, Mask, Problem, Side, Tensor, TensorLayout, Types, bf16,
};

/// Requests, rows of a page, pages of the cache, and keys that a request may have.
const REQUESTS: usize = 2;
const PAGE: usize = 16;
const PAGES: usize = 8;
const MOST: usize = 64;
const HEADS: usize = 8;
const HEADS_KV: usize = 2;
const DIM: usize = 64;

const PAGE_TABLE: [i32; 8] = [5, 2, 7, 0, 3, 1, 6, 4];

fn main() -> Result<(), Box<dyn Error>> {
    let steps = 40;
    let exact = serve(steps, None)?;
    for kind in Codes::ALL {
        let outputs = serve(steps, Some(kind))?;
        println!("{}: {steps} tokens, at most {:.4} from bf16", kind.dtype(), farthest(&outputs, &exact));
    }
    Ok(())
}

/// The largest difference between the outputs of two runs.
pub(crate) fn farthest(one: &[Vec<bf16>], other: &[Vec<bf16>]) -> f32 {
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    pairs.map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0.0, f32::max)
}

/// Some values, other ones in each step.
fn values(shape: [usize; 4], seed: usize) -> Tensor<bf16> {
    let wave = |i: usize| bf16::from_f32(((i * 7 + seed * 13) as f32 * 0.37).sin());
    let mut tensor = Tensor::filled(shape, TensorLayout::Bshd, bf16::ZERO);
    tensor.data.iter_mut().enumerate().for_each(|(i, value)| *value = wave(i));
    tensor
}

/// The output of each step, with a cache of these codes or of bf16.
pub(crate) fn serve(steps: usize, codes: Option<Codes>) -> Result<Vec<Vec<bf16>>, fa_attn::Error> {
    let engine = Engine::with(Backend::Cpu(CpuOptions::default()))?;
    let dtype = fa_attn::Dtype::Bf16;
    let descales = codes.map_or(Descales::NONE, |_| Descales::both(DescaleForm::TokenHead));
    let append = Append {
        sequences: REQUESTS,
        new: Side::padded(1),
        cache: Side::paged(PAGE, PAGES, MOST),
        heads_kv: HEADS_KV,
        head_dim: DIM,
        head_dim_v: DIM,
        dtype,
        codes: codes.map(|kind| CacheCodes { kind, descales }),
        rotary: None,
    };
    let lengths = Lengths::of(REQUESTS, Side::padded(1), Side::paged(PAGE, PAGES, MOST));
    let types = Types::same(dtype).with_kv(codes.map_or(dtype, Codes::dtype));
    let problem = Problem::new(lengths, (HEADS, HEADS_KV), (DIM, DIM), types)
        .with_descales(descales)
        .with_mask(Mask::CAUSAL);

    // Of int4 with half as many elements, each of two codes.
    let shape = append.cache_shape(DIM);
    let [mut k, mut v] = [(); 2].map(|()| Tensor::filled(shape, TensorLayout::Bshd, bf16::ZERO));
    let [mut k_codes, mut v_codes] = [(); 2].map(|()| Tensor::filled(shape, TensorLayout::Bshd, 0u8));
    let [mut k_descale, mut v_descale] = [(); 2].map(|()| vec![1.0; PAGES * PAGE * HEADS_KV]);
    let mut keys = [0; REQUESTS];
    let mut outputs = Vec::new();
    for step in 0..steps {
        let new = [REQUESTS, 1, HEADS_KV, DIM];
        let (k_new, v_new) = (values(new, 2 * step), values(new, 2 * step + 1));
        let q = values([REQUESTS, 1, HEADS, DIM], 5 * step);
        let mut after = keys;
        let mut extras = AppendExtras {
            seqused_k: Some(&keys),
            page_table: Some(&PAGE_TABLE),
            used_out: Some(&mut after),
            k_descale: codes.is_some().then_some(&mut k_descale[..]),
            v_descale: codes.is_some().then_some(&mut v_descale[..]),
            ..AppendExtras::default()
        };
        let [k_cache, v_cache] = match codes {
            Some(_) => [k_codes.view_mut("k_cache")?.into(), v_codes.view_mut("v_cache")?.into()],
            None => [k.view_mut("k_cache")?.into(), v.view_mut("v_cache")?.into()],
        };
        let (k_new, v_new) = (k_new.view("k_new")?, v_new.view("v_new")?);
        let mut tensors = AppendTensors { k_new, v_new, k_cache, v_cache, q: None, tables: None };
        let left_out = engine.append(&append, &mut extras, &mut tensors)?;
        assert_eq!(left_out, 0, "the cache is full");
        keys = after;
        let extras = Extras { page_table: Some(&PAGE_TABLE), seqused_k: Some(&keys), ..Extras::NONE };
        let output = match codes {
            Some(_) => {
                let (k_descale, v_descale) = (Some(&k_descale[..]), Some(&v_descale[..]));
                let extras = Extras { k_descale, v_descale, ..extras };
                engine.forward_codes(&problem, &q, [&k_codes, &v_codes], &extras)?
            }
            None => engine.forward(&problem, [&q, &k, &v], &extras)?,
        };
        outputs.push(output.out.data);
    }
    Ok(outputs)
}

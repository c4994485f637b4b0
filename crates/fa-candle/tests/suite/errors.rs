//! What is refused, and by which words.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa_candle::*;

use crate::materialised::values;

#[track_caller]
fn refused(result: Result<Tensor>, parts: &[&str]) {
    let text = result.expect_err("must be refused").to_string();
    for part in parts {
        assert!(text.contains(part), "'{text}' does not say '{part}'");
    }
}

#[test]
fn shapes_types_and_heads_are_named() -> Result<()> {
    let x = values((1, 8, 4, 16), 1);
    refused(flash_attn(&x.squeeze(0)?, &x, &x, 1.0, false), &["q has the shape [8, 4, 16]", "seqlen_q"]);
    let short = x.narrow(1, 0, 7)?;
    refused(flash_attn(&x, &x, &short, 1.0, false), &["v has the shape [1, 7, 4, 16]", "[1, 8, 4, 16]"]);
    let three = values((1, 8, 3, 16), 2);
    refused(flash_attn(&x, &three, &three, 1.0, false), &["heads_q = 4", "heads_kv = 3"]);
    refused(flash_attn(&x, &x, &x.to_dtype(DType::F16)?, 1.0, false), &["v holds F16", "F32"]);
    let double = x.to_dtype(DType::F64)?;
    refused(
        flash_attn(&double, &double, &double, 1.0, false),
        &["q holds F64", "f16, bf16 or f8e4m3", "to_dtype"],
    );
    refused(flash_attn(&x, &x, &x, f32::NAN, false), &["softmax_scale is NaN", "finite"]);
    let capped = flash_attn_alibi_windowed_softcap(&x, &x, &x, None, 1.0, None, None, -1.0);
    refused(capped, &["softcap is -1", "above 0"]);
    let slopes = values(3, 3);
    refused(flash_attn_alibi(&x, &x, &x, &slopes, 1.0, true), &["alibi_slopes has the shape [3]", "[4]"]);
    let slopes = Var::from_tensor(&values(4, 3))?;
    refused(
        flash_attn_alibi(&x, &x, &x, &slopes, 1.0, true),
        &["alibi_slopes requires a gradient", "detach"],
    );
    Ok(())
}

#[test]
fn starts_and_pages_are_checked() -> Result<()> {
    let x = values((8, 4, 16), 1);
    let starts = |values: &[u32]| Tensor::new(values, &Device::Cpu).unwrap();
    let varlen = |q: &Tensor, k: &Tensor, max| flash_attn_varlen(&x, &x, &x, q, k, max, 8, 1.0, true);
    let good = starts(&[0, 3, 8]);
    refused(varlen(&good, &starts(&[0, 8]), 8), &["seqlens_k has the shape [2]", "[3]"]);
    refused(varlen(&good.to_dtype(DType::I64)?, &good, 8), &["seqlens_q holds I64", "u32 or i32"]);
    refused(varlen(&starts(&[0, 3, 9]), &good, 8), &["seqlens_q[2] = 9", "from 0 to 8"]);
    refused(varlen(&starts(&[0, 5, 4]), &good, 8), &["seqlens_q[1] = 5", "must not descend"]);
    refused(varlen(&good, &starts(&[0, 3, 9]), 8), &["seqlens_k[2] = 9", "from 0 to 8"]);
    refused(varlen(&good, &good, 4), &["seqlens_q gives sequence 1 5 rows", "max_seqlen is 4"]);
    refused(varlen(&starts(&[]), &good, 4), &["seqlens_q has the shape [0]"]);
    let (pages, good) = (values((4, 4, 4, 16), 2), starts(&[0, 8]));
    let paged = |table: &Tensor, ranges: Option<&Tensor>, page| {
        flash_attn_varlen_paged_windowed(
            &x,
            &pages,
            &pages,
            &good,
            &good,
            table,
            ranges,
            8,
            8,
            1.0,
            None,
            Some(0),
            page,
            None,
        )
    };
    let table = |values: &[u32]| Tensor::new(values, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let out = paged(&table(&[3, 1]), None, 4)?;
    assert_eq!(out.dims(), x.dims());
    refused(paged(&table(&[3]), None, 4), &["block_table has the shape [1, 1]", "= 2 or more"]);
    refused(paged(&table(&[3, 4]), None, 4), &["entry 1 of sequence 0 in block_table is 4", "4 pages"]);
    let long = |seqlens_k: &Tensor| {
        let table = table(&[3, 1]);
        flash_attn_varlen_paged_windowed(
            &x, &pages, &pages, &good, seqlens_k, &table, None, 8, 8, 1.0, None, None, 4, None,
        )
    };
    refused(long(&starts(&[0, 9])), &["seqlens_k gives sequence 0 9 keys", "has room for 0 to 8"]);
    refused(long(&starts(&[5, 3])), &["seqlens_k gives sequence 0 -2 keys"]);
    refused(paged(&table(&[3, 1]), None, 8), &["page_block_size is 8", "pages of 4"]);
    let ranges = table(&[0, 2]);
    refused(
        paged(&table(&[3, 1]), Some(&ranges), 4),
        &["mm_prefix_ranges has the shape [1, 2]", "ranges, 2)"],
    );
    let (unsigned, many) = (ranges.unsqueeze(0)?, Tensor::zeros((1, 99, 2), DType::I32, &Device::Cpu)?);
    refused(
        paged(&table(&[3, 1]), Some(&unsigned.to_dtype(DType::U8)?), 4),
        &["`mm_prefix_ranges` holds U8"],
    );
    refused(
        paged(&table(&[3, 1]), Some(&many), 4),
        &["mm_prefix_ranges has the shape [1, 99, 2]", "at most 30"],
    );
    Ok(())
}

#[test]
fn tensors_of_another_rank_and_counts_of_0_are_named() -> Result<()> {
    let (rows, batch) = (values((8, 4, 16), 1), values((1, 8, 4, 16), 2));
    let starts = Tensor::new(&[0u32, 8], &Device::Cpu)?;
    let varlen =
        |q: &Tensor, k: &Tensor, starts: &Tensor| flash_attn_varlen(q, k, k, starts, starts, 8, 8, 1.0, true);
    refused(varlen(&batch, &rows, &starts), &["q has the shape [1, 8, 4, 16]", "(total_q, heads, head_dim)"]);
    refused(varlen(&rows, &batch, &starts), &["k has the shape [1, 8, 4, 16]", "total_k"]);
    refused(varlen(&rows, &rows, &starts.unsqueeze(0)?), &["seqlens_q has the shape [1, 2]", "batch + 1"]);
    let narrow = values((8, 4, 8), 3);
    refused(varlen(&rows, &narrow, &starts), &["k has the shape [8, 4, 8]", "[8, 4, 16]"]);
    let none = |shape: (usize, usize, usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (no_head, no_dim) = (none((1, 8, 0, 16))?, none((1, 8, 4, 0))?);
    refused(flash_attn(&no_head, &no_head, &no_head, 1.0, false), &["heads_q", "0"]);
    refused(flash_attn(&no_dim, &no_dim, &no_dim, 1.0, false), &["head_dim", "0"]);
    refused(flash_attn(&batch, &no_head, &no_head, 1.0, false), &["heads_kv", "0"]);
    let (pages, table) = (none((2, 0, 4, 16))?, starts.unsqueeze(0)?);
    let paged = flash_attn_varlen_paged_windowed(
        &rows, &pages, &pages, &starts, &starts, &table, None, 8, 8, 1.0, None, None, 0, None,
    );
    refused(paged, &["page", "0"]);
    Ok(())
}

#[test]
fn keys_in_pages_have_no_gradients() -> Result<()> {
    let (q, pages) = (Var::from_tensor(&values((8, 4, 16), 1))?, values((2, 4, 4, 16), 2));
    let good = Tensor::new(&[0u32, 8], &Device::Cpu)?;
    let table = Tensor::new(&[[0u32, 1]], &Device::Cpu)?;
    let out = flash_attn_varlen_paged_windowed(
        &q,
        &pages,
        &pages,
        &good,
        &good,
        &table,
        None,
        8,
        8,
        1.0,
        None,
        Some(0),
        4,
        None,
    )?;
    let error = out.sum_all()?.backward().expect_err("must be refused").to_string();
    assert!(error.contains("pages") && error.contains("pack or pad"), "{error}");
    Ok(())
}

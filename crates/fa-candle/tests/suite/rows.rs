//! Packed sequences, keys in pages and lengths in use: against each sequence by itself.

use candle_core::{DType, Device, IndexOp, Result, Tensor};
use fa_candle::*;

use crate::materialised::{Scores, assert_close, attention as materialised, values};

const SCALE: f32 = 0.25;
const Q: [usize; 4] = [5, 0, 11, 1];
const K: [usize; 4] = [9, 4, 11, 30];

fn starts(lengths: &[usize]) -> Tensor {
    let mut sum = 0u32;
    let ends = lengths.iter().map(|&len| {
        sum += len as u32;
        sum
    });
    let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
    Tensor::new(starts, &Device::Cpu).unwrap()
}

/// Packed Q, K and V; K and V have rows behind the last sequence.
fn packed() -> [Tensor; 3] {
    let (rows_q, rows_k) = (Q.iter().sum::<usize>(), K.iter().sum::<usize>() + 3);
    [values((rows_q, 4, 16), 7), values((rows_k, 2, 16), 8), values((rows_k, 2, 16), 9)]
}

/// Every sequence by the materialised path, end to end.
fn one_by_one([q, k, v]: &[Tensor; 3], scores: Scores<'_>) -> Result<Tensor> {
    let (mut at_q, mut at_k, mut outs) = (0, 0, Vec::new());
    for (q_len, k_len) in Q.into_iter().zip(K) {
        if q_len > 0 {
            let rows = |x: &Tensor, at, len| x.narrow(0, at, len)?.unsqueeze(0);
            let [q, k, v] = [rows(q, at_q, q_len)?, rows(k, at_k, k_len)?, rows(v, at_k, k_len)?];
            outs.push(materialised(&q, &k, &v, SCALE, scores)?.0.squeeze(0)?);
        }
        (at_q, at_k) = (at_q + q_len, at_k + k_len);
    }
    Tensor::cat(&outs, 0)
}

#[test]
fn varlen_functions_follow_each_sequence_by_itself() -> Result<()> {
    let inputs = packed();
    let [q, k, v] = &inputs;
    let (sq, sk) = (&starts(&Q), &starts(&K));
    let slopes = &Tensor::new(&[0.5f32, 0.25, 0.125, 0.0], &Device::Cpu)?;
    let window = Scores { left: Some(3), right: Some(1), ..Scores::default() };
    let biased = |scores| Scores { slopes: Some(slopes), ..scores };
    let check = |what, out: Result<Tensor>, scores| -> Result<()> {
        assert_close(what, &out?, &one_by_one(&inputs, scores)?, 2e-6);
        Ok(())
    };
    check("causal", flash_attn_varlen(q, k, v, sq, sk, 11, 30, SCALE, true), Scores::CAUSAL)?;
    check("full", flash_attn_varlen(q, k, v, sq, sk, 11, 30, SCALE, false), Scores::default())?;
    // Bounds may be above the lengths.
    let out = flash_attn_varlen_windowed(q, k, v, sq, sk, 100, 64, SCALE, Some(3), Some(1));
    check("window", out, window)?;
    let out = flash_attn_varlen_alibi(q, k, v, slopes, sq, sk, 11, 30, SCALE, true);
    check("alibi", out, biased(Scores::CAUSAL))?;
    let out = flash_attn_varlen_alibi_windowed(q, k, v, slopes, sq, sk, 11, 30, SCALE, Some(3), Some(1));
    check("alibi, window", out, biased(window))?;
    let out = flash_attn_varlen_alibi_windowed_softcap(
        q,
        k,
        v,
        Some(slopes),
        sq,
        sk,
        11,
        30,
        SCALE,
        Some(3),
        Some(1),
        0.9,
    );
    check("alibi, window, cap", out, biased(Scores { softcap: Some(0.9), ..window }))?;
    let out = flash_attn_varlen_alibi_windowed_softcap(q, k, v, None, sq, sk, 11, 30, SCALE, None, None, 0.9);
    check("cap", out, Scores { softcap: Some(0.9), ..Scores::default() })
}

#[test]
fn starts_may_be_i32() -> Result<()> {
    let [q, k, v] = &packed();
    let [sq, sk] = [starts(&Q), starts(&K)];
    let out = flash_attn_varlen(q, k, v, &sq, &sk, 11, 30, SCALE, true)?;
    let [sq, sk] = [sq.to_dtype(DType::I32)?, sk.to_dtype(DType::I32)?];
    assert_close("i32", &flash_attn_varlen(q, k, v, &sq, &sk, 11, 30, SCALE, true)?, &out, 0.0);
    Ok(())
}

#[test]
fn rows_of_no_sequence_are_zero() -> Result<()> {
    let [q, k, v] = &packed();
    let few = Tensor::new(&[2u32, 6], &Device::Cpu)?;
    let out = flash_attn_varlen(q, k, v, &few, &few, 4, 4, SCALE, true)?;
    let sums = out.abs()?.sum((1, 2))?.to_vec1::<f32>()?;
    assert!(sums.iter().enumerate().all(|(row, sum)| (*sum > 0.0) == (2..6).contains(&row)), "{sums:?}");
    Ok(())
}

/// A cache of 16 pages of 8 rows that holds the packed keys in shuffled pages, with its table.
fn pages(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let (_, heads, dim) = x.dims3()?;
    let mut pool = vec![values((8, heads, dim), 99); 16];
    let (mut table, mut next, mut at) = (Vec::new(), 3usize, 0);
    for len in K {
        for column in 0..5 {
            let rows = len.saturating_sub(8 * column).min(8);
            if rows == 0 {
                // Behind the last page anything may stand.
                table.push(4_000_000u32);
                continue;
            }
            let here = x.narrow(0, at + 8 * column, rows)?;
            pool[next] = Tensor::cat(&[&here, &pool[next].narrow(0, rows, 8 - rows)?], 0)?;
            table.push(next as u32);
            next = (next + 5) % 16;
        }
        at += len;
    }
    Ok((Tensor::stack(&pool, 0)?, Tensor::from_vec(table, (K.len(), 5), &Device::Cpu)?))
}

#[test]
fn keys_in_pages_give_what_packed_ones_do() -> Result<()> {
    let inputs = packed();
    let [q, k, v] = &inputs;
    let (sq, sk) = (starts(&Q), starts(&K));
    let ((k_pages, table), (v_pages, _)) = (pages(k)?, pages(v)?);
    for (left, right, softcap) in [(None, Some(0), None), (Some(6), Some(0), None), (None, None, Some(1.5))] {
        // A table may have more columns than the bound asks for, and hold i32.
        for (table, max_k) in [(table.clone(), 40), (table.to_dtype(DType::I32)?, 30)] {
            let out = flash_attn_varlen_paged_windowed(
                q, &k_pages, &v_pages, &sq, &sk, &table, None, 11, max_k, SCALE, left, right, 8, softcap,
            )?;
            let scores = Scores { left, right, softcap, ..Scores::default() };
            assert_close("pages", &out, &one_by_one(&inputs, scores)?, 2e-6);
        }
    }
    Ok(())
}

#[test]
fn a_cache_is_read_as_far_as_it_is_used() -> Result<()> {
    let (q, k, v) = (values((3, 2, 4, 8), 1), values((3, 12, 2, 8), 2), values((3, 12, 2, 8), 3));
    let used = Tensor::new(&[12u32, 5, 2], &Device::Cpu)?;
    let rows = Rows::Padded { used_q: None, used_k: Some(&used) };
    let (out, lse) = attention_with_lse(&q, &k, &v, &Options::causal(SCALE).with_rows(rows))?;
    for (b, len) in [12, 5, 2].into_iter().enumerate() {
        let part = |x: &Tensor| x.i(b..=b)?.narrow(1, 0, len);
        let (need, need_lse) = materialised(&q.i(b..=b)?, &part(&k)?, &part(&v)?, SCALE, Scores::CAUSAL)?;
        assert_close("used", &out.i(b..=b)?, &need, 2e-6);
        assert_close("lse", &lse.i(b..=b)?, &need_lse, 2e-6);
    }
    Ok(())
}

#[test]
fn sinks_and_slopes_of_each_sequence_are_in_the_options() -> Result<()> {
    let (q, k, v) = (values((2, 9, 4, 8), 1), values((2, 9, 4, 8), 2), values((2, 9, 4, 8), 3));
    let (slopes, sinks) = (values((2, 4), 4).abs()?, values(4, 5));
    let options = Options::causal(SCALE)
        .with_window_size_left(Some(4))
        .with_alibi_slopes(Some(&slopes))
        .with_sinks(Some(&sinks));
    let scores = Scores { left: Some(4), slopes: Some(&slopes), sinks: Some(&sinks), ..Scores::CAUSAL };
    let ((out, lse), (need, need_lse)) =
        (attention_with_lse(&q, &k, &v, &options)?, materialised(&q, &k, &v, SCALE, scores)?);
    assert_close("out", &out, &need, 2e-6);
    assert_close("lse", &lse, &need_lse, 2e-6);
    Ok(())
}

/// Multi-head latent attention: heads whose keys and values are projections of one latent per token, and the
/// same with the projections absorbed into queries and outputs, on rows of one buffer in pages.
#[test]
fn absorbed_heads_give_what_their_own_keys_do() -> Result<()> {
    let (heads, nope, rotary, value, latent) = (4, 12, 8, 16, 24);
    let (total_q, total_k) = (Q.iter().sum::<usize>(), K.iter().sum::<usize>());
    let q = values((total_q, heads, nope + rotary), 1);
    let rows = values((total_k, 1, latent + rotary), 2);
    let (up_k, up_v) = (values((heads, latent, nope), 3), values((heads, latent, value), 4));
    // Of every head its own key and value: `[heads, rows, latent] x [heads, latent, ..]`.
    let latents = rows.narrow(2, 0, latent)?.squeeze(1)?;
    let of_heads = |up: &Tensor| latents.broadcast_left(heads)?.matmul(up)?.transpose(0, 1)?.contiguous();
    let turned = rows.narrow(2, latent, rotary)?.broadcast_as((total_k, heads, rotary))?;
    let k = Tensor::cat(&[&of_heads(&up_k)?, &turned.contiguous()?], 2)?;
    let need = one_by_one(&[q.clone(), k, of_heads(&up_v)?], Scores::CAUSAL)?;

    let meets = q.narrow(2, 0, nope)?.transpose(0, 1)?.contiguous()?.matmul(&up_k.t()?.contiguous()?)?;
    let absorbed =
        Tensor::cat(&[&meets.transpose(0, 1)?.contiguous()?, &q.narrow(2, nope, rotary)?.contiguous()?], 2)?;
    let (cache, table) = pages(&rows)?;
    let (v, k) = (cache.narrow(3, 0, latent)?, cache.narrow(3, latent, rotary)?);
    let rows = Rows::Paged {
        seqlens_q: &starts(&Q),
        seqlens_k: &starts(&K),
        block_table: &table,
        max_seqlen_q: 11,
        max_seqlen_k: 40,
    };
    let options = Options::causal(SCALE).with_rows(rows).with_latent(true);
    let out = attention(&absorbed, &k, &v, &options)?;
    let out = out.transpose(0, 1)?.contiguous()?.matmul(&up_v)?.transpose(0, 1)?.contiguous()?;
    assert_close("absorbed", &out, &need, 2e-5);

    let text = attention(&absorbed, &v, &v, &options).unwrap_err().to_string();
    assert!(text.contains("[16, 8, 1, 8]"), "{text}");
    let (q, k, v) = (values((1, 3, 4, 24), 1), values((1, 5, 1, 8), 2), values((1, 5, 1, 16), 3));
    let q = candle_core::Var::from_tensor(&q)?;
    let out = attention(q.as_tensor(), &k, &v, &Options::causal(SCALE).with_latent(true))?;
    let text = out.sum_all()?.backward().unwrap_err().to_string();
    assert!(text.contains("a latent problem has no backward"), "{text}");
    Ok(())
}

/// Sparse attention on latents: each token on the rows that it names, by itself.
#[test]
fn tokens_see_the_rows_that_they_name() -> Result<()> {
    let (tokens, heads, latent, rotary) = (4, 6, 24, 8);
    let q = values((tokens, heads, latent + rotary), 1);
    let cache = values((9, 1, 1, latent + rotary), 2);
    let (v, k) = (cache.narrow(3, 0, latent)?, cache.narrow(3, latent, rotary)?);
    // Entries behind those that count name no row.
    let named: [&[u32]; 4] = [&[3, 8, 0, 3], &[], &[5, 1, 2, 7, 4], &[6]];
    let gone = 1_000_000u32;
    let entries: Vec<u32> = named
        .iter()
        .flat_map(|own| own.iter().copied().chain(std::iter::repeat_n(gone, 5 - own.len())))
        .collect();
    let device = &Device::Cpu;
    let indices = &Tensor::from_vec(entries, (tokens, 5), device)?;
    let counts: Vec<u32> = named.iter().map(|own| own.len() as u32).collect();
    let lengths = &Tensor::new(counts, device)?;
    let options = Options::full(SCALE).with_rows(Rows::Named { indices, lengths }).with_latent(true);
    let (out, lse) = attention_with_lse(&q, &k, &v, &options)?;
    assert_eq!((out.dims(), lse.dims()), (&[tokens, heads, latent][..], &[heads, tokens][..]));
    for (token, own) in named.into_iter().enumerate() {
        let got = out.narrow(0, token, 1)?;
        if own.is_empty() {
            assert_close("no rows", &got, &got.zeros_like()?, 0.0);
            continue;
        }
        let rows = cache.index_select(&Tensor::new(own, device)?, 0)?.squeeze(1)?.unsqueeze(0)?;
        let query = q.narrow(0, token, 1)?.unsqueeze(0)?;
        let values = rows.narrow(3, 0, latent)?;
        let need = materialised(&query, &rows, &values, SCALE, Scores::default())?.0.squeeze(0)?;
        assert_close("named rows", &got, &need, 2e-6);
    }
    let error = attention(&q, &k.reshape((3, 3, 1, rotary))?, &v.reshape((3, 3, 1, latent))?, &options);
    let text = error.expect_err("pages of three rows").to_string();
    assert!(text.contains("reshape pages of several rows"), "{text}");
    Ok(())
}

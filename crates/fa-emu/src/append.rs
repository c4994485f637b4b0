//! The append kernel on the host: its unit, and calls with packed tensors.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::quantize::Codes;
use fa_core::{Arch, Strides, TensorLayout};
use fa_kernels::{AppendLaunch, Headers, RawAppendArgs, RawTensor, Source, append_entry};

use crate::compiler::Compiler;
use crate::error::Error;
use crate::machine::{Access, Machine, Memory};
use crate::options::Options;
use crate::single::{Shape, Single};

/// The append kernel that can be emulated.
#[derive(Debug)]
pub struct AppendUnit(Single);

/// A call: tensors packed `[batch, rows, heads, dim]`, as bits. What is written is changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppendCall {
    /// New keys, new values, the caches of keys and values, and queries (rotated in place; empty for none).
    /// Caches of codes have none here.
    pub tensors: [Vec<u16>; 5],
    /// Caches of keys and values that are of codes.
    pub codes: [Vec<u8>; 2],
    /// Descales of both; `None` for none.
    pub descales: [Option<Vec<f32>>; 2],
    /// Cosines and sines, bytes of their type; empty for none.
    pub tables: [Vec<u8>; 2],
    /// cu_new, used_new, seqused_k, page_table, cu_seqlens_q and seqused_q; `None` for what the append does
    /// not name.
    pub words: [Option<Vec<i32>>; 6],
    /// Lengths afterwards, `[batch]`.
    pub used_out: Vec<i32>,
    /// Rows that the cache had no room for.
    pub dropped: u32,
}

/// Names of [`AppendCall::words`].
const WORDS: [&str; 6] = ["cu_new", "used_new", "seqused_k", "page_table", "cu_seqlens_q", "seqused_q"];

impl AppendUnit {
    pub(crate) fn load(
        compiler: &Compiler,
        machine: Arc<Machine>,
        arch: Arch,
        headers: &Headers,
        codes: Option<Codes>,
    ) -> Result<AppendUnit, Error> {
        let source = Source::append(codes, arch, headers)?;
        Ok(AppendUnit(Single::load(compiler, machine, arch, &source, append_entry(codes))?))
    }

    /// Runs a call; returns the findings (races, accesses out of bounds, ...).
    ///
    /// # Errors
    /// Those of [`AppendLaunch::check`], and [`Error::Memory`].
    ///
    /// # Panics
    /// On tensors that are shorter than their shapes.
    pub fn run(
        &self,
        launch: &AppendLaunch,
        call: &mut AppendCall,
        options: &Options<'_>,
    ) -> Result<Vec<String>, Error> {
        let run = self.0.start(options);
        let memory = |name: &str, bytes: &[u8], access| run.memory(name, bytes, access);
        let bytes_of =
            |values: &[u16]| -> Vec<u8> { values.iter().flat_map(|value| value.to_ne_bytes()).collect() };
        let words_of =
            |words: &[i32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_ne_bytes()).collect() };

        let shapes = launch.tensors();
        let mut tensors = Vec::new();
        let of_codes = launch.append().codes.is_some();
        for (i, ((shape, is_output), values)) in shapes.iter().zip(&call.tensors).enumerate() {
            let access = if *is_output { Access::Written } else { Access::Input };
            let (bytes, len) = match i {
                2 | 3 if of_codes => (call.codes[i - 2].clone(), call.codes[i - 2].len()),
                _ => (bytes_of(values), values.len()),
            };
            assert_eq!(len, shape.batch * shape.seqlen * shape.heads * shape.dim, "{}", shape.name);
            tensors.push(memory(shape.name, &bytes, access)?);
        }
        let descales: Vec<Option<Memory<'_>>> = ["k_descale", "v_descale"]
            .into_iter()
            .zip(&call.descales)
            .map(|(name, values)| {
                let bytes = |values: &Vec<f32>| -> Vec<u8> {
                    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
                };
                values.as_ref().map(|values| memory(name, &bytes(values), Access::Written)).transpose()
            })
            .collect::<Result<_, Error>>()?;
        let tables = if call.tables[0].is_empty() {
            Vec::new()
        } else {
            vec![
                memory("cos", &call.tables[0], Access::Input)?,
                memory("sin", &call.tables[1], Access::Input)?,
            ]
        };
        let words: Vec<Option<Memory<'_>>> = WORDS
            .iter()
            .zip(&call.words)
            .map(|(name, words)| {
                words.as_ref().map(|words| memory(name, &words_of(words), Access::Input)).transpose()
            })
            .collect::<Result<_, Error>>()?;
        let used_out = memory("used_out", &words_of(&call.used_out), Access::Unwritten)?;
        let dropped = memory("dropped", &0u32.to_ne_bytes(), Access::Written)?;

        let raw = |i: usize| {
            let shape = &shapes[i].0;
            let strides: Strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim);
            RawTensor { address: tensors[i].address(), strides }
        };
        let word = |i: usize| words[i].as_ref().map(Memory::address);
        let args = RawAppendArgs {
            k_new: raw(0),
            v_new: raw(1),
            k_cache: raw(2),
            v_cache: raw(3),
            q: (shapes.len() > 4).then(|| raw(4)),
            q_out: None,
            tables: (!tables.is_empty()).then(|| [tables[0].address(), tables[1].address()]),
            cu_new: word(0),
            used_new: word(1),
            seqused_k: word(2),
            page_table: word(3),
            k_descale: descales[0].as_ref().map(Memory::address),
            v_descale: descales[1].as_ref().map(Memory::address),
            cu_seqlens_q: word(4),
            seqused_q: word(5),
            used_out: Some(used_out.address()),
            dropped: Some(dropped.address()),
        };
        launch.check(&args)?;
        if launch.grid == 0 {
            return Ok(Vec::new());
        }
        let shape = Shape { grid: launch.grid, threads: launch.threads, smem: launch.smem };
        // SAFETY: the entry takes these parameters, and all that they point at has been named and lives on.
        let faults = unsafe {
            match of_codes {
                true => run.launch(&launch.codes_params(&args), &shape),
                false => run.launch(&launch.params(&args), &shape),
            }
        };
        for (to, memory) in call.descales.iter_mut().zip(&descales) {
            if let (Some(to), Some(memory)) = (to, memory) {
                let words = memory.bytes().chunks_exact(4);
                *to = words.map(|word| f32::from_ne_bytes(word.try_into().expect("a word"))).collect();
            }
        }
        for (i, memory) in tensors.iter().enumerate().skip(2) {
            if of_codes && i < 4 {
                call.codes[i - 2] = memory.bytes().to_vec();
                continue;
            }
            let pairs = memory.bytes().chunks_exact(2);
            call.tensors[i] = pairs.map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect();
        }
        let word = |bytes: &[u8]| i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        call.used_out = used_out.bytes().chunks_exact(4).map(word).collect();
        call.dropped = word(dropped.bytes()) as u32;
        Ok(faults)
    }
}

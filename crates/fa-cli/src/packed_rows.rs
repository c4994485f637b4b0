//! Keys that a file has as packed rows of latents, in a tensor `kv` in the place of k and v.

use fa_attn::{Element, Tensor};
use fa_core::TensorLayout;
use fa_core::latent_rows::{LATENTS, LatentRows};
use safetensors::Dtype;

use crate::kv_tensor::KvTensor;
use crate::names::KV;
use crate::safetensors::{Stored, TensorFile, dtype_of};
use crate::sequences::{SideTensors, shape_of};
use crate::term::failure::InputError;

/// Such keys: `[pages, page, 1, bytes]`, or `[batch, seqlen, 1, bytes]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedRows {
    form: LatentRows,
    /// `[pages, page, 1, bytes]`.
    shape: [usize; 4],
    /// What rows of codes alone are multiplied by.
    scale: f32,
}

impl PackedRows {
    /// Whether the file has them.
    pub(crate) fn are_in(file: &TensorFile) -> bool {
        file.has(KV)
    }

    /// Those of the file, checked; its `k_descale`, which scales them, is taken out of `sides`.
    ///
    /// # Errors
    /// Tensors that do not go together with them, and rows of another form.
    pub(crate) fn find(
        file: &TensorFile,
        sides: &mut SideTensors,
        layout: TensorLayout,
        is_latent: bool,
    ) -> Result<Option<PackedRows>, InputError> {
        if !PackedRows::are_in(file) {
            return Ok(None);
        }
        let usage = |message: String| Err(InputError::Usage(message));
        if let Some(name) = ["k", "v", "k_new", "v_descale"].into_iter().find(|name| file.has(name)) {
            return usage(format!(
                "the file has {KV}, whose packed rows hold keys and values, and {name}: leave {name} out, or \
                 give k and v in the place of {KV}"
            ));
        }
        if !is_latent {
            return usage(format!(
                "the file has {KV}, whose packed rows begin with latents: add --latent, and --scale of the \
                 heads before absorption"
            ));
        }
        let entry = file.entry(KV)?;
        if ![Dtype::U8, Dtype::I8, Dtype::F8_E4M3].contains(&entry.dtype) {
            let need = "it must be U8 or F8_E4M3, the bytes of rows".to_owned();
            return Err(InputError::Dtype { name: KV.to_owned(), got: entry.dtype.to_string(), need });
        }
        let of_q = file.entry("q")?.dtype;
        if dtype_of(of_q).is_none() {
            let need = format!("beside packed rows in {KV} it must be BF16, F16 or F32");
            return Err(InputError::Dtype { name: "q".to_owned(), got: of_q.to_string(), need });
        }
        let shape = shape_of(file, KV, layout, "cu_seqlens_k")?;
        let form = LatentRows::of_bytes(shape[3]).filter(|_| shape[2] == 1);
        let Some(form) = form else {
            let bytes = LatentRows::ALL.map(|form| form.bytes().to_string()).join(", ");
            let need = format!("it must be [pages, page, 1, bytes of a row], of which there are {bytes}");
            return Err(InputError::Shape { name: KV.to_owned(), got: entry.shape.clone(), need });
        };
        let scale = sides.take_k_descale()?;
        if scale.is_some() && form.has_scales() {
            let bytes = form.bytes();
            return usage(format!(
                "the file has k_descale, and {KV} rows of {bytes} bytes, which have scales of their own: \
                 leave k_descale out"
            ));
        }
        Ok(Some(PackedRows { form, shape, scale: scale.unwrap_or(1.0) }))
    }

    /// The shapes of the K and V that they stand for.
    pub(crate) fn shapes(&self) -> [[usize; 4]; 2] {
        let [pages, page, heads, _] = self.shape;
        [self.form.columns() - LATENTS, LATENTS].map(|columns| [pages, page, heads, columns])
    }

    /// These, in the shapes that the problem gives them.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn read<T: Element + Stored>(
        &self,
        file: &TensorFile,
        shapes: [[usize; 4]; 2],
        layout: TensorLayout,
    ) -> anyhow::Result<[KvTensor<T>; 2]> {
        let bytes = file.read_bits(KV)?;
        let [mut k, mut v] = shapes.map(|shape| Vec::with_capacity(shape.iter().product()));
        let page = self.shape[1] * self.form.bytes();
        for page in bytes.chunks_exact(page.max(1)) {
            let mut column = 0;
            self.form.decode(page, self.scale, |value| {
                if column < LATENTS { &mut v } else { &mut k }.push(T::from_f32(value));
                column = (column + 1) % self.form.columns();
            });
        }
        let [of_k, of_v] = shapes;
        let tensor = |shape, values| anyhow::Ok(KvTensor::Same(Tensor::with_layout(shape, layout, values)?));
        Ok([tensor(of_k, k)?, tensor(of_v, v)?])
    }
}

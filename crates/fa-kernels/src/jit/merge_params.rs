//! The parameters of the merge kernel (`cuda/merge/merge.cuh`), in a header of their own: no other kernel
//! depends on them.

use crate::jit::declare::{ConstF32Ptr, DeviceType, MutF32Ptr, ParamField, ParamStruct, param_struct};
use crate::jit::params::{ConstTensor, MutTensor};

/// The most parts of one launch: a lane of a warp each, and their addresses in a kernel's parameters.
pub(crate) const MAX_PARTS: usize = 16;

param_struct! {
    /// A partial result.
    pub struct MergePart {
        /// O over the part's keys, `[batch, seqlen, heads, dim]`.
        pub out: ConstTensor,
        /// Its LSE, `[batch, heads, seqlen]` packed.
        pub lse: ConstF32Ptr,
    }
}

/// The parts of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub struct MergeParts(pub [MergePart; MAX_PARTS]);

impl DeviceType for MergeParts {
    const CUDA_TYPE: &'static str = "MergeParts";

    fn words(&self, words: &mut Vec<u64>) {
        self.0.iter().for_each(|part| part.words(words));
    }
}

impl MergeParts {
    fn declaration() -> ParamStruct {
        ParamStruct {
            name: "MergeParts",
            size: size_of::<MergeParts>(),
            align: align_of::<MergeParts>(),
            doc: &[" The parts of a launch; `count` are used."],
            fields: vec![ParamField {
                name: "items",
                cuda_type: "MergePart",
                count: Some(MAX_PARTS),
                offset: 0,
                doc: &[" In the order of the call."],
            }],
        }
    }
}

param_struct! {
    /// The arguments of the merge kernel. Types are 0 for f32, 1 for f16, 2 for bf16.
    pub struct MergeParams {
        /// What is merged.
        pub parts: MergeParts,
        /// The merged O, `[batch, seqlen, heads, dim]`; written in full.
        pub out: MutTensor,
        /// The merged LSE, `[batch, heads, seqlen]` packed; null for none.
        pub lse: MutF32Ptr,
        /// `[heads]`, in natural units; null for none.
        pub sinks: ConstF32Ptr,
        /// Parts.
        pub count: i32,
        /// Independent sequences.
        pub batch: i32,
        /// Positions of a sequence.
        pub seqlen: i32,
        /// Heads.
        pub heads: i32,
        /// Elements of a row, a multiple of 8.
        pub dim: i32,
        /// The type of the parts.
        pub part_type: i32,
        /// The type of the merged O.
        pub out_type: i32,
    }
}

/// The structs of `merge/merge_params.cuh`, in their order there.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![MergePart::declaration(), MergeParts::declaration(), MergeParams::declaration()]
}

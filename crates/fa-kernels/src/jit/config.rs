//! The kernels' compile-time parameters as CUDA sees them: one list of fields, from which both the structs of
//! `config.cuh` and the initialisers of a translation unit are written.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Dtype, Kernel, KernelSpec, MaskKind, ScoreKind, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Types};

/// A type that a config may hold.
trait ConfigValue {
    const CUDA_TYPE: &'static str;

    fn literal(&self) -> String;
}

/// Sizes are `int` in CUDA: index arithmetic there is signed.
impl ConfigValue for u32 {
    const CUDA_TYPE: &'static str = "int";

    fn literal(&self) -> String {
        self.to_string()
    }
}

impl ConfigValue for bool {
    const CUDA_TYPE: &'static str = "bool";

    fn literal(&self) -> String {
        self.to_string()
    }
}

/// An enum that `config.cuh` declares.
pub(crate) struct ConfigEnum {
    pub name: &'static str,
    pub variants: &'static [&'static str],
}

macro_rules! config_enums {
    ($($name:ident { $($variant:ident),+ })+) => {
        $(impl ConfigValue for $name {
            const CUDA_TYPE: &'static str = stringify!($name);

            // Exhaustive, so that a variant added in fa-core does not compile until it is listed here.
            fn literal(&self) -> String {
                match self {
                    $($name::$variant => concat!(stringify!($name), "::", stringify!($variant)).to_owned()),+
                }
            }
        })+

        /// Every enum that a config may hold.
        pub(crate) const ENUMS: &[ConfigEnum] =
            &[$(ConfigEnum { name: stringify!($name), variants: &[$(stringify!($variant)),+] }),+];
    };
}

config_enums! {
    Dtype { F32, F16, Bf16, E4m3 }
    MaskKind { Full, Causal, Window }
    Scheduler { PerTile, Static, Dynamic }
    TileOrder { Natural, LongestFirst }
}

/// One field of a config: its name, its CUDA type and the literal of its value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfigField {
    pub name: &'static str,
    pub cuda_type: &'static str,
    pub literal: String,
}

fn field<T: ConfigValue>(name: &'static str, value: &T) -> ConfigField {
    ConfigField { name, cuda_type: T::CUDA_TYPE, literal: value.literal() }
}

/// The fields of a struct in the order given; a field that is missing or too much does not compile.
macro_rules! fields {
    ($struct:ident { $($name:ident),+ $(,)? } = $value:expr) => {{
        let $struct { $($name),+ } = $value;
        vec![$(field(stringify!($name), $name)),+]
    }};
}

/// The fields of a spec's config: those of every kernel, then the kernel's own.
pub(crate) fn fields_of(spec: &KernelSpec) -> Vec<ConfigField> {
    let KernelSpec { types, head_dim, head_dim_v, mask, score, kernel } = spec;
    let mut fields = vec![
        field("dtype", &types.qkv),
        field("head_dim", head_dim),
        field("head_dim_v", head_dim_v),
        field("mask", mask),
        field("softcap", &score.softcap),
    ];
    fields.extend(match kernel {
        Kernel::Sm80Fwd(own) => fields!(
            Sm80Fwd {
                tile_m,
                tile_n,
                num_warps,
                stages,
                q_in_regs,
                blocks_per_sm,
                swizzle,
                ldmatrix,
                exp2,
                fast_math,
                loop_split,
                reverse_blocks,
            } = own
        ),
        Kernel::Sm90Fwd(own) => fields!(
            Sm90Fwd {
                tile_m,
                tile_n,
                num_wg,
                pv_is_rs,
                overlap_wg,
                q_stages,
                kv_stages,
                ping_pong,
                scheduler,
                tile_order,
                cluster_m,
                exp_poly_of_16,
                rescale_threshold,
                pack_gqa,
            } = own
        ),
        Kernel::Sm80Bwd(own) => fields!(
            Sm80Bwd {
                tile_m,
                tile_n,
                num_warps,
                q_stages,
                do_stages,
                atom_layout_m_sdp,
                atom_layout_n_dkv,
                atom_layout_m_dq,
                dq_first,
                blocks_per_sm,
                tile_order,
                deterministic,
            } = own
        ),
        Kernel::Sm90Bwd(own) => fields!(
            Sm90Bwd {
                tile_m,
                tile_n,
                num_wg,
                q_stages,
                do_stages,
                pds_stages,
                sdp_swap_ab,
                dkv_swap_ab,
                dq_swap_ab,
                atom_layout_m_sdp,
                atom_layout_n_dkv,
                atom_layout_m_dq,
                mma_dkv_is_rs,
                dq_via_smem,
                dq_slices,
                tile_order,
                deterministic,
            } = own
        ),
    });
    fields
}

/// The name of a kernel's config struct.
pub(crate) fn struct_name(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Sm80Fwd(_) => "Sm80FwdConfig",
        Kernel::Sm90Fwd(_) => "Sm90FwdConfig",
        Kernel::Sm80Bwd(_) => "Sm80BwdConfig",
        Kernel::Sm90Bwd(_) => "Sm90BwdConfig",
    }
}

/// A spec of every kernel, in the order in which `config.cuh` declares them. Only the fields' types are read.
pub(crate) fn samples() -> Vec<KernelSpec> {
    let spec = |kernel| KernelSpec {
        types: Types::same(Dtype::Bf16),
        head_dim: 64,
        head_dim_v: 64,
        mask: MaskKind::Full,
        score: ScoreKind::NONE,
        kernel,
    };
    vec![
        spec(Kernel::Sm80Fwd(Sm80Fwd::default())),
        spec(Kernel::Sm90Fwd(Sm90Fwd::default())),
        spec(Kernel::Sm80Bwd(Sm80Bwd::default())),
        spec(Kernel::Sm90Bwd(Sm90Bwd::default())),
    ]
}

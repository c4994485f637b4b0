//! The kernels' compile-time parameters as CUDA sees them: the structs of `config.cuh` and the initialisers
//! of a translation unit, both written from the parameters that `fa_core` declares.

use fa_core::spec::{Param, ParamValue, Scheduler, TileOrder};
use fa_core::{Dtype, Kernel, KernelSpec, MaskKind, Reads, ScoreKind, Types};

/// An enum that `config.cuh` declares.
pub(crate) struct ConfigEnum {
    pub name: &'static str,
    pub variants: &'static [&'static str],
}

/// A value as CUDA writes it: its type and a literal.
trait CudaEnum {
    const NAME: &'static str;

    fn literal(self) -> &'static str;
}

macro_rules! config_enums {
    ($($name:ident { $($variant:ident),+ })+) => {
        $(impl CudaEnum for $name {
            const NAME: &'static str = stringify!($name);

            // Exhaustive, so that a variant added in fa-core does not compile until it is listed here.
            fn literal(self) -> &'static str {
                match self {
                    $($name::$variant => concat!(stringify!($name), "::", stringify!($variant))),+
                }
            }
        })+

        /// Every enum that a config may hold.
        pub(crate) const ENUMS: &[ConfigEnum] =
            &[$(ConfigEnum { name: stringify!($name), variants: &[$(stringify!($variant)),+] }),+];
    };
}

config_enums! {
    Dtype { F32, F16, Bf16, E4m3, Int8, Int4, E5m2 }
    MaskKind { Full, Causal, Window }
    Scheduler { PerTile, Static, Dynamic }
    TileOrder { Natural, LongestFirst }
}

/// One field of a config: its name, its CUDA type, the literal of its value and the lines of its comment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfigField {
    pub name: &'static str,
    pub cuda_type: &'static str,
    pub literal: String,
    pub doc: &'static [&'static str],
}

impl ConfigField {
    fn of(Param { name, doc, value }: Param) -> ConfigField {
        fn of_enum<T: CudaEnum>(value: T) -> (&'static str, String) {
            (T::NAME, value.literal().to_owned())
        }
        let (cuda_type, literal) = match value {
            // Sizes are `int` in CUDA: index arithmetic there is signed.
            ParamValue::Count(count) => ("int", count.to_string()),
            ParamValue::Switch(on) => ("bool", on.to_string()),
            ParamValue::Dtype(dtype) => of_enum(dtype),
            ParamValue::Mask(mask) => of_enum(mask),
            ParamValue::Scheduler(scheduler) => of_enum(scheduler),
            ParamValue::TileOrder(order) => of_enum(order),
        };
        ConfigField { name, cuda_type, literal, doc }
    }
}

/// The fields of a spec's config: those of every kernel, then the kernel's own, then what follows from them.
pub(crate) fn fields_of(spec: &KernelSpec) -> Vec<ConfigField> {
    spec.params().into_iter().chain(spec.derived()).map(ConfigField::of).collect()
}

/// The name of a kernel's config struct: `Sm90FwdConfig` of `sm90_fwd`.
pub(crate) fn struct_name(kernel: &Kernel) -> String {
    let capitalised = |word: &str| {
        let (first, rest) = word.split_at(1);
        first.to_ascii_uppercase() + rest
    };
    kernel.name().split('_').map(capitalised).chain(["Config".to_owned()]).collect()
}

/// A spec of every kernel, in the order in which `config.cuh` declares them. Only the fields' types are read.
pub(crate) fn samples() -> impl Iterator<Item = KernelSpec> {
    Kernel::defaults().into_iter().map(|kernel| KernelSpec {
        types: Types::same(Dtype::Bf16),
        head_dim: 128,
        head_dim_v: 128,
        mask: MaskKind::Full,
        score: ScoreKind::NONE,
        reads: Reads::UNIFORM,
        split: false,
        kernel,
    })
}

//! What is proven: every shipped kernel, forms of some with variable lengths, pages, splits, slopes and
//! sinks, the append kernels and the merge kernel.

use fa_core::quantize::Codes;
use fa_core::{Append, Arch, Dtype, KernelSpec, Reads};
use fa_kernels::{Headers, MERGE, Source, append_entry, smem_bytes};
use fa_planner::account::{account, missing_code};

use super::choices::choices;
use crate::error::{Error, Result};
use crate::grid::{Case, Extent, of_spec, serving};
use crate::kernels;

/// A kernel in one form, for one architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Its name: a shipped file and a form, `append`, `append_codes`, `append_int4`, `merge`, or a spec.
    pub name: String,
    /// What it computes.
    pub subject: Subject,
    /// The architecture whose code is proven: that of GPUs at hand where it runs there.
    pub arch: Arch,
    /// The architectures that it has to compile for.
    pub archs: Vec<Arch>,
    /// Whether it is proven, and does not only have to compile.
    pub is_proven: bool,
}

/// What a unit computes.
#[derive(Clone, Debug, PartialEq)]
pub enum Subject {
    /// Attention or its gradients.
    Attention(Box<KernelSpec>),
    /// Rows appended to a cache, of elements or of such codes: those of 8 bits have one kernel.
    Append(Option<Codes>),
    /// Results merged.
    Merge,
}

/// The architecture of the GPUs at hand.
const AT_HAND: Arch = Arch::Sm90;

/// Shipped files whose forms are proven as well: every kernel, all masks, deterministic ones.
const BASES: [&str; 14] = [
    "sm100/hd128-causal-bf16.ron",
    "sm90/hd64-causal-bf16.ron",
    "sm90/hd128-full-f16.ron",
    "sm90/hd128-window-bf16.ron",
    "sm90/hd576-512-latent-causal-bf16.ron",
    "sm90/hd64-causal-bf16-e4m3kv.ron",
    "sm90/hd256-causal-e4m3.ron",
    "sm80/hd64-causal-bf16.ron",
    "sm80/hd128-window-bf16.ron",
    "sm80/hd64-causal-bf16-e4m3kv.ron",
    "sm90/hd64-causal-bf16-bwd.ron",
    "sm90/hd128-causal-deterministic-bf16-bwd.ron",
    "sm80/hd64-causal-bf16-bwd.ron",
    "sm80/hd128-causal-deterministic-bf16-bwd.ron",
];

/// Forms of these kernels that the compiler spills, where the account has room: the library refuses them.
const REFUSED: [(&str, &str); 2] =
    [("sm80/hd64-causal-bf16.ron", "paged"), ("sm90/hd64-causal-bf16.ron", "paged split alibi sinks")];

impl Unit {
    /// Its name in the ledger.
    pub fn key(&self) -> String {
        format!("{} on {}", self.name, self.arch)
    }

    /// Its spec, if it computes attention.
    pub fn spec(&self) -> Option<&KernelSpec> {
        match &self.subject {
            Subject::Attention(spec) => Some(spec),
            Subject::Append(_) | Subject::Merge => None,
        }
    }

    /// Its source.
    ///
    /// # Errors
    /// Those of the spec.
    pub fn source(&self, headers: &Headers) -> Result<Source> {
        Ok(match &self.subject {
            Subject::Attention(spec) => Source::new(spec, self.arch, Some(smem_bytes(spec)), headers)?,
            Subject::Append(codes) => Source::append(*codes, self.arch, headers)?,
            Subject::Merge => Source::merge(self.arch, headers)?,
        })
    }

    /// What is compiled of it, the main program first.
    ///
    /// # Errors
    /// Those of the spec.
    pub(super) fn programs(&self, headers: &Headers) -> Result<Vec<Source>> {
        Ok(match &self.subject {
            Subject::Attention(spec) => Source::programs(spec, self.arch, Some(smem_bytes(spec)), headers)?,
            Subject::Append(_) | Subject::Merge => vec![self.source(headers)?],
        })
    }

    /// Its cases.
    pub fn cases(&self, extent: Extent) -> Vec<Case> {
        let of = |has: &dyn Fn(&Case) -> bool| {
            let extent = if extent == Extent::Full { Extent::Full } else { Extent::Quick };
            serving(extent, 2).into_iter().filter(has).collect()
        };
        match &self.subject {
            Subject::Attention(spec) => of_spec("shipped", &self.name, spec, extent),
            Subject::Append(codes) => of(&|case| {
                let kind = |append: Append| append.codes.map(|codes| codes.kind);
                case.append.is_some_and(|append| append_entry(kind(append)) == append_entry(*codes))
            }),
            Subject::Merge => of(&|case| case.merge.is_some()),
        }
    }

    /// Whether a GPU of `arch` runs it, with the same code as that of its own architecture.
    pub fn runs_on(&self, arch: Arch) -> bool {
        self.spec().is_none_or(|spec| {
            code_for(spec, arch) == code_for(spec, self.arch) && account(spec, arch).is_ok()
        })
    }
}

/// All units.
///
/// # Errors
/// A shipped file that is not a spec.
pub fn units() -> Result<Vec<Unit>> {
    let files = fa_kernels::specs::shipped();
    let files = files.map_err(|(path, error)| Error::Record(format!("specs/{path}: {error}")))?;
    let mut all = Vec::new();
    for file in files {
        let (name, spec) = (file.path.to_owned(), file.shipped.spec);
        for archs in alike(&spec, &file.shipped.archs) {
            all.push(Unit::of(name.clone(), &spec, archs));
        }
        if BASES.contains(&file.path) {
            // Of the code for several architectures that of the GPUs at hand.
            let mut archs = alike(&spec, &file.shipped.archs);
            archs.sort_by_key(|archs| home(&spec, archs[0]) != AT_HAND);
            for (form, spec) in forms(&spec) {
                let arch = home(&spec, archs[0][0]);
                if account(&spec, arch).is_err() || REFUSED.contains(&(file.path, form)) {
                    continue;
                }
                all.push(Unit::of(format!("{name} {form}"), &spec, vec![arch]));
            }
        }
    }
    let appends = [None, Some(Codes::E4m3), Some(Codes::Int4)];
    let appends = appends.map(|codes| (append_entry(codes), Subject::Append(codes)));
    for (name, subject) in appends.into_iter().chain([(MERGE, Subject::Merge)]) {
        let name = name.trim_start_matches("fa_").to_owned();
        all.push(Unit { name, subject, arch: AT_HAND, archs: Vec::new(), is_proven: true });
    }
    let choices = choices()?.into_iter();
    all.extend(
        choices.map(|spec| Unit { is_proven: false, ..Unit::of(spec.to_string(), &spec, vec![Arch::Sm90]) }),
    );
    Ok(all)
}

impl Unit {
    fn of(name: String, spec: &KernelSpec, archs: Vec<Arch>) -> Unit {
        let subject = Subject::Attention(Box::new(spec.clone()));
        Unit { name, subject, arch: home(spec, archs[0]), archs, is_proven: true }
    }
}

/// The architecture whose code is proven in place of that for `arch`: the GPUs' at hand if they run the
/// kernel by the same device code.
fn home(spec: &KernelSpec, arch: Arch) -> Arch {
    let runs = spec.check_arch(AT_HAND).is_ok() && account(spec, AT_HAND).is_ok();
    if runs && code_for(spec, AT_HAND) == code_for(spec, arch) { AT_HAND } else { arch }
}

/// The architectures in groups that compile the same device code.
fn alike(spec: &KernelSpec, archs: &[Arch]) -> Vec<Vec<Arch>> {
    let mut groups: Vec<Vec<Arch>> = Vec::new();
    for &arch in archs {
        match groups.iter_mut().find(|own| code_for(spec, own[0]) == code_for(spec, arch)) {
            Some(group) => group.push(arch),
            None => groups.push(vec![arch]),
        }
    }
    groups
}

/// Which device code of a kernel `arch` compiles, and whether it converts e4m3 to f16 by an instruction:
/// architectures with equal values run the same.
fn code_for(spec: &KernelSpec, arch: Arch) -> (u32, bool) {
    let converts = (spec.types.q, spec.types.kv) == (Dtype::F16, Dtype::E4m3);
    let has_instruction = arch.compute_capability() >= (8, 9);
    (kernels::of(&spec.kernel).code_for(arch), converts && has_instruction)
}

/// SMs of an emulated GPU for a kernel of `spec`: keys are divided where SMs would be idle.
pub fn emulated_sms(spec: &KernelSpec) -> u32 {
    if spec.split { 64 } else { 2 }
}

/// The forms of a kernel that have device code, by name.
pub fn forms(spec: &KernelSpec) -> Vec<(&'static str, KernelSpec)> {
    // varied, paged, split, slopes and sinks
    let all = [
        ("varlen", [true, false, false, false]),
        ("paged", [true, true, false, false]),
        ("split", [false, false, true, false]),
        ("alibi sinks", [false, false, false, true]),
        ("varlen alibi sinks", [true, false, false, true]),
        ("paged split alibi sinks", [true, true, true, true]),
    ];
    let is_backward = spec.kernel.is_backward();
    let form = |(name, [varied, paged, split, mods]): (&'static str, [bool; 4])| {
        // The last form of a forward covers slopes and sinks with varied lengths.
        let is_extra = varied && mods && paged == is_backward;
        let mut spec = spec.clone();
        spec.reads = Reads { varied, paged };
        spec.split = split;
        spec.score.alibi = mods;
        spec.score.sinks = mods;
        let exists = spec.check().is_ok() && missing_code(&spec).is_none();
        (exists && !is_extra).then_some((name, spec))
    };
    all.into_iter().filter_map(form).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn units_have_names_of_their_own_and_every_base_its_forms() {
        let all = units().unwrap();
        let keys: BTreeSet<String> = all.iter().map(Unit::key).collect();
        assert_eq!(keys.len(), all.len());
        for base in BASES {
            let forms = all.iter().filter(|own| own.name.starts_with(&format!("{base} "))).count();
            assert!(forms > 1, "{base}: {forms}");
        }
        for part in ["varlen", "paged", "split", "append", "append_codes", "append_int4", "merge", "e4m3.ron"]
        {
            assert!(all.iter().any(|own| own.is_proven && own.name.contains(part)), "{part}");
        }
        for codes in Codes::ALL {
            let part = format!("{}kv", codes.dtype());
            assert!(all.iter().any(|own| own.is_proven && own.name.contains(&part)), "{part}");
        }
        assert!(all.iter().all(|own| own.runs_on(own.arch)));
        // What can run on GPUs at hand is proven by their code.
        assert!(keys.contains("sm80/hd64-causal-bf16.ron on sm90"), "{keys:?}");
    }
}

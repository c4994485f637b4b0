//! From verdicts on single kernels to refusals that also cover their like: the set that ships with the
//! planner.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fa_attn::atomic_file;

use fa_core::{Arch, KernelSpec};
use fa_planner::refusals::{self, KEYS, KV_DTYPE, NO_CODES, Refusal, Refusals, params_of};
use rayon::prelude::*;

use crate::best::{Kind, Said, Verdict, name};
use crate::error::{Error, Result, read_record};

/// What a compiler made of a kernel.
#[derive(Clone, Debug)]
struct Judged {
    arch: Arch,
    spec: KernelSpec,
    refused: bool,
}

/// Brings the set in a file up to date with what `compiler` said of kernels among those of `kinds`: what
/// covers a kernel that is clean goes, and what is refused and not covered comes, as widely as no kernel
/// contradicts that is clean or was not compiled and fits. Returns how many refusals there are. A missing
/// file is an empty set.
///
/// # Errors
/// A file that cannot be read or written.
pub fn update(path: &Path, compiler: &str, kinds: &[Kind], said: &[Said]) -> Result<usize> {
    let text = if path.exists() { read_record(path)? } else { String::new() };
    let before = refusals::read(&text).map_err(|why| Error::Request(format!("{}: {why}", path.display())))?;
    let said: BTreeMap<&str, &Verdict> = said.iter().map(|own| (own.kernel.as_str(), &own.verdict)).collect();
    let of_kind = |kind: &Kind| -> Vec<Judged> {
        let Some(set) = kind.explored() else { return Vec::new() };
        let arch = kind.arch;
        let verdict =
            |spec: &KernelSpec| said.get(name(arch, spec).as_str()).map(|own| **own != Verdict::Clean);
        let plans = set.plans.into_iter().map(|plan| plan.spec);
        let fits = plans.map(|spec| (verdict(&spec).unwrap_or(false), spec));
        let others = set.rejected.into_iter().map(|own| own.spec);
        let others = others.filter_map(|spec| Some((verdict(&spec)?, spec)));
        fits.chain(others).map(|(refused, spec)| Judged { arch, spec, refused }).collect()
    };
    let judged: Vec<Judged> = kinds.par_iter().flat_map_iter(of_kind).collect();
    let list = updated(before, judged, |own| said.contains_key(name(own.arch, &own.spec).as_str()));
    let head = format!(
        "# Kernels that {compiler} spills, serialises the wgmma of or denies setmaxnreg although the \
         planner's account has\n# room for them: architecture, kernel, and the values of its parameters; \
         those left out may have any. Written by\n# `fa build --best N --refusals FILE`.\n"
    );
    let text: String = list.iter().map(|own| format!("{own}\n")).collect();
    atomic_file::write(path, (head + &text).as_bytes())?;
    Ok(list.len())
}

/// Those of `before` that cover no kernel that `is_compiled` and clean, and those for what is refused
/// besides.
fn updated(
    before: Vec<Refusal>,
    mut judged: Vec<Judged>,
    is_compiled: impl Fn(&Judged) -> bool,
) -> Vec<Refusal> {
    let clean: Vec<&Judged> = judged.iter().filter(|own| !own.refused && is_compiled(own)).collect();
    let contradicts = |refusal: &Refusal| {
        let one = Refusals::of(std::slice::from_ref(refusal));
        clean.iter().any(|own| one.has(&own.spec, own.arch))
    };
    // A search through all of them first: most contradict nothing.
    let all = Refusals::of(&before);
    let is_sound = !clean.iter().any(|own| all.has(&own.spec, own.arch));
    let mut kept: Vec<Refusal> = before.into_iter().filter(|own| is_sound || !contradicts(own)).collect();
    let covered = Refusals::of(&kept);
    judged.retain(|own| !own.refused || !covered.has(&own.spec, own.arch));
    kept.extend(refusals_of(&judged));
    merged(kept)
}

/// The parameters of a refusal.
type Params = Vec<(String, Vec<String>)>;

/// Values of a kernel's parameters, in the order of their names.
type Values = Vec<String>;

/// Kernels that differ in parameters other than [`KEYS`].
#[derive(Default)]
struct Alike {
    names: Vec<&'static str>,
    refused: BTreeSet<Values>,
    clean: BTreeSet<Values>,
}

impl Alike {
    /// The parameters that tell the refused from the clean: each is left out, those of the problem last, if
    /// the others still do.
    fn telling(&self) -> Vec<usize> {
        let all = 0..self.names.len();
        let varies = |at: &usize| {
            let mut values = self.refused.iter().chain(&self.clean).map(|values| &values[*at]);
            let first = values.next();
            values.any(|value| Some(value) != first)
        };
        let mut kept: Vec<usize> = all.filter(varies).collect();
        let mut order = kept.clone();
        order.sort_by_key(|at| std::cmp::Reverse(rank(self.names[*at], *at)));
        for at in order {
            let fewer: Vec<usize> = kept.iter().copied().filter(|own| *own != at).collect();
            if self.tells(&fewer) {
                kept = fewer;
            }
        }
        kept
    }

    /// Whether no clean kernel has the values that a refused one has of these parameters.
    fn tells(&self, of: &[usize]) -> bool {
        let refused: BTreeSet<Vec<&String>> = self.refused.iter().map(|values| part(values, of)).collect();
        !self.clean.iter().any(|values| refused.contains(&part(values, of)))
    }
}

fn part<'v>(values: &'v Values, of: &[usize]) -> Vec<&'v String> {
    of.iter().map(|at| &values[*at]).collect()
}

/// The place of a parameter among those that are left out, the highest first: the type and sinks, which
/// hardly change registers, then the kernel's own parameters, the last declared first, then those of the
/// problem.
fn rank(name: &str, at: usize) -> (u8, usize) {
    match name {
        "dtype" | "sinks" => (2, at),
        KV_DTYPE | "mask" | "softcap" | "varied" | "paged" | "alibi" | "split" => (0, at),
        _ => (1, at),
    }
}

/// The refusals that cover every refused kernel of `judged` and no clean one.
fn refusals_of(judged: &[Judged]) -> Vec<Refusal> {
    let key = |Judged { arch, spec, .. }: &Judged| {
        let (tile_m, tile_n) = spec.tile();
        (*arch, spec.kernel.name(), [spec.head_dim, spec.head_dim_v, tile_m, tile_n])
    };
    let mut all: BTreeMap<_, Alike> =
        judged.iter().filter(|own| own.refused).map(|own| (key(own), Alike::default())).collect();
    for own in judged {
        // Nothing is said of kernels like which none is refused.
        let Some(alike) = all.get_mut(&key(own)) else { continue };
        let params = params_of(&own.spec).into_iter();
        let (names, values) = params.filter(|(name, _)| !KEYS.contains(name)).unzip();
        alike.names = names;
        if own.refused {
            alike.refused.insert(values)
        } else {
            alike.clean.insert(values)
        };
    }
    let mut found = Vec::new();
    for ((arch, kernel, keys), alike) in &all {
        let telling = alike.telling();
        let parts: BTreeSet<Vec<&String>> =
            alike.refused.iter().map(|values| part(values, &telling)).collect();
        found.extend(parts.into_iter().map(|values| {
            let keys =
                KEYS.iter().zip(keys).map(|(name, value)| ((*name).to_owned(), vec![value.to_string()]));
            let names = telling.iter().map(|at| alike.names[*at]);
            let others = names.zip(values).map(|(name, value)| (name.to_owned(), vec![value.clone()]));
            Refusal { arch: *arch, kernel: (*kernel).to_owned(), params: keys.chain(others).collect() }
        }));
    }
    merged(found)
}

/// All values that a parameter may have: it tells nothing then.
const WHOLE: [&[&str]; 4] =
    [&["false", "true"], &["bf16", "f16"], &["causal", "full", "window"], &["e4m3", "int8", NO_CODES]];

/// Fewer refusals that cover the same: of those that differ in one parameter one with all values.
fn merged(mut refusals: Vec<Refusal>) -> Vec<Refusal> {
    let names: BTreeSet<String> =
        refusals.iter().flat_map(|own| own.params.iter().map(|(name, _)| name.clone())).collect();
    loop {
        let before = refusals.len();
        for name in &names {
            let mut groups: BTreeMap<(Arch, String, Params), Vec<String>> = BTreeMap::new();
            let mut merged = Vec::new();
            for refusal in refusals {
                let Some(at) = refusal.params.iter().position(|(own, _)| own == name) else {
                    merged.push(refusal);
                    continue;
                };
                let Refusal { arch, kernel, mut params } = refusal;
                let values = std::mem::take(&mut params[at].1);
                groups.entry((arch, kernel, params)).or_default().extend(values);
            }
            merged.extend(groups.into_iter().map(|((arch, kernel, mut params), mut values)| {
                values.sort_by_key(|value| (value.parse::<u32>().ok(), value.clone()));
                values.dedup();
                for (own, place) in &mut params {
                    if own == name {
                        place.clone_from(&values);
                    }
                }
                Refusal { arch, kernel, params }
            }));
            refusals = merged;
        }
        for refusal in &mut refusals {
            refusal.params.retain(|(_, values)| !WHOLE.iter().any(|whole| values.iter().eq(*whole)));
        }
        if refusals.len() == before {
            break;
        }
    }
    refusals.sort_by_cached_key(ToString::to_string);
    refusals
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    /// Of a rule in two parameters, judged on every third kernel, the refusals are that rule, and no type.
    #[test]
    fn refusals_are_the_rule_behind_the_verdicts() {
        let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
        let mut specs = Vec::new();
        for (mask, dtype) in [
            (Mask::CAUSAL, Dtype::Bf16),
            (Mask::FULL, Dtype::F16),
            (Mask::CAUSAL, Dtype::F16),
            (Mask::FULL, Dtype::Bf16),
        ] {
            let problem = problem.with_mask(mask).with_types(fa_core::Types::same(dtype));
            let plans = plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans");
            specs.extend(plans.into_iter().map(|plan| plan.spec));
        }
        let tile = specs[0].tile();
        let is_refused = |spec: &KernelSpec| {
            spec.tile() == tile
                && spec.kernel.param("kv_stages") == Some(2u32.into())
                && spec.mask == specs[0].mask
        };
        let judge =
            |spec: &KernelSpec| Judged { arch: Arch::Sm90, spec: spec.clone(), refused: is_refused(spec) };
        let judged: Vec<Judged> = specs.iter().map(judge).collect();
        assert!(judged.iter().any(|own| own.refused));
        let found = refusals_of(&judged);
        let has = Refusals::of(&found);
        for own in &judged {
            assert_eq!(has.has(&own.spec, own.arch), own.refused, "{}", own.spec);
        }
        let text: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert!(text.len() == 1 && text[0].contains("mask=causal") && !text[0].contains("dtype"), "{text:?}");
        assert_eq!(text[0].parse().as_ref(), Ok(&found[0]));
        assert!(refusals_of(&[]).is_empty());

        // Nothing is added to a set that covers all; what a clean kernel contradicts goes, and the rest
        // returns.
        assert_eq!(updated(found.clone(), judged.clone(), |_| true), found);
        let wide: Refusal = text[0].split(" mask").next().expect("a beginning").parse().expect("a refusal");
        assert_eq!(updated(vec![wide.clone()], judged.clone(), |_| true), found);
        assert_eq!(
            updated(vec![wide.clone()], judged, |_| false),
            [wide],
            "what was not compiled is no proof"
        );
    }
}

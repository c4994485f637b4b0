//! What the host passes to a kernel, as text: launches, workspace, parameters and tensor maps, with
//! placeholder addresses. Versions of the library that launch alike give the same text.

use fa_core::{Arch, Extra, Extras, KernelSpec};
use fa_kernels::launch::{Addresses, Launches};
use fa_kernels::{RawExtras, RawTensor};
use fa_planner::divide;

use crate::case::Case;
use crate::compiler::hash;
use crate::error::Error;
use crate::options::Options;

/// A hash of what the library launches for each of the cases. It takes no compiler and no emulation.
///
/// # Errors
/// Those of the library for a problem that the kernel does not compute.
pub(crate) fn handed(spec: &KernelSpec, arch: Arch, cases: &[Case]) -> Result<String, Error> {
    let texts: Result<Vec<String>, Error> = cases.iter().map(|case| text(spec, arch, case)).collect();
    Ok(hash(&texts?.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// Distance between the placeholder addresses of tensors, extras and workspace.
const APART: u64 = 1 << 40;

fn text(spec: &KernelSpec, arch: Arch, case: &Case) -> Result<String, Error> {
    let sms = Options::sms_of(spec);
    let plan = divide(&case.problem, spec, arch, sms, None);
    let launches = Launches::of(&plan, &case.problem, arch, sms)?;
    let tensors: Vec<RawTensor> = launches
        .tensors
        .iter()
        .zip(1..)
        .map(|(tensor, i)| {
            let shape = &tensor.shape;
            let extents = [shape.batch, shape.seqlen, shape.heads, shape.dim];
            let strides = case.placement.input_strides(matches!(shape.name, "k" | "v"), extents);
            RawTensor { address: 64 * APART + i * APART, strides }
        })
        .collect();
    let extra = |name: &str| {
        let at = launches.extras.iter().position(|need| need.name == name);
        at.map(|at| (at as u64 + 1) * APART)
    };
    let input = |own: Extra| extra(own.name());
    let extras = RawExtras {
        inputs: Extras::of(input, input),
        page_faults: extra("page_faults"),
        dsinks: extra("dsinks"),
        ..RawExtras::default()
    };
    let (lse, workspace) = (Some(32 * APART), (launches.workspace.bytes > 0).then_some(33 * APART));
    let at = Addresses { tensors: &tensors, lse, workspace, extras };
    let maps: Vec<_> = launches.maps(&at).collect();
    Ok(values_of(&format!("{launches:?} {:?} {maps:?}", launches.params(&at))))
}

/// Debug text without the names of types and fields, which may change on their own.
fn values_of(text: &str) -> String {
    const KEPT: [&str; 6] = ["true", "false", "None", "Some", "NaN", "inf"];
    let mut values = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
            'A'..='Z' | 'a'..='z' | '_' => {
                rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len())
            }
            '0'..='9' => rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.')).unwrap_or(rest.len()),
            other => other.len_utf8(),
        };
        let (token, left) = rest.split_at(end);
        let is_name = first.is_ascii_alphabetic() || first == '_';
        if !first.is_whitespace() && first != ':' && (!is_name || KEPT.contains(&token)) {
            values += token;
        }
        rest = left;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped::shipped;
    use crate::sweep::cases;

    #[test]
    fn names_are_left_out_and_values_kept() {
        let text =
            "Launch { entry: \"fa_kernel\", grid: 6, at: Some(ConstF32Ptr(7)), scale: -1.5e-7, own: true }";
        assert_eq!(values_of(text), "{\"fa_kernel\",6,Some((7)),-1.5e-7,true}");
    }

    #[test]
    fn kernels_and_cases_that_are_launched_otherwise_are_told_apart() {
        let all = shipped().unwrap();
        for candidate in &all {
            let (spec, arch) = (&candidate.spec, candidate.arch);
            let mut cases = cases(spec);
            let first = handed(spec, arch, &cases).unwrap_or_else(|e| panic!("{}: {e}", candidate.name));
            assert_eq!(first, handed(spec, arch, &cases).unwrap(), "{}", candidate.name);
            cases[0].problem.softmax_scale = Some(0.5);
            assert_ne!(first, handed(spec, arch, &cases).unwrap(), "{}", candidate.name);
        }
    }
}

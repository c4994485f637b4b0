//! Parameters of a kernel set to other values: what a switch is worth, on every shape beside the library's
//! choice.

use std::fmt;
use std::str::FromStr;

use fa_core::KernelSpec;
use serde_json::Value;

use crate::error::{Error, Result};

/// Fields of a kernel with the values that they get: `persistent=true,do_stages=1`.
#[derive(Clone, Debug, PartialEq)]
pub struct Change(Vec<(String, Value)>);

impl FromStr for Change {
    type Err = String;

    fn from_str(text: &str) -> Result<Change, String> {
        let field = |part: &str| {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("'{part}' is not FIELD=VALUE, as in persistent=true"))?;
            // Names of variants stand without quotes, as in RON.
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
            Ok((name.trim().to_owned(), value))
        };
        text.split(',').map(field).collect::<Result<_, String>>().map(Change)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        write!(f, "{}", text.join(","))
    }
}

impl Change {
    /// `spec` with these values.
    ///
    /// # Errors
    /// [`Error::Request`] for a field that the kernel does not have, a value that the field cannot take, and
    /// an invalid resulting kernel.
    pub fn of(&self, spec: &KernelSpec) -> Result<KernelSpec> {
        let refused = |why: String| Error::Request(format!("{self} of {spec}: {why}"));
        let mut kernel = serde_json::to_value(&spec.kernel)?;
        let fields = |kernel: &mut Value| -> Option<serde_json::Map<String, Value>> {
            kernel.as_object_mut()?.values_mut().next()?.as_object_mut().map(std::mem::take)
        };
        let mut own = fields(&mut kernel).unwrap_or_default();
        own.extend(self.0.iter().cloned());
        if let Some(room) = kernel.as_object_mut().and_then(|kernel| kernel.values_mut().next()) {
            *room = Value::Object(own);
        }
        let kernel = serde_json::from_value(kernel).map_err(|e| refused(e.to_string()))?;
        let changed = KernelSpec { kernel, ..spec.clone() };
        // A field that is omitted when off can still be set.
        let now = fields(&mut serde_json::to_value(&changed.kernel)?).unwrap_or_default();
        let missed = |(name, value): &&(String, Value)| now.get(name).unwrap_or(&Value::Bool(false)) != value;
        if let Some((name, _)) = self.0.iter().find(missed) {
            return Err(refused(format!("{} has no field {name}", spec.kernel.name())));
        }
        changed.check().map_err(|e| refused(e.to_string()))?;
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Kernel, Mask, Pass, Problem};
    use fa_planner::plan::{PlanOptions, best};

    use super::*;

    #[test]
    fn fields_are_set_and_others_refused() {
        let problem = Problem::square(2, 8192, 16, 64, Mask::FULL, Dtype::Bf16);
        let options = PlanOptions::default().with_pass(Pass::BACKWARD);
        let spec = best(&problem, Arch::Sm90, &options).expect("a plan").spec;
        let of = |text: &str| text.parse::<Change>().expect("a change").of(&spec);
        let Kernel::Sm90Bwd(own) = of("persistent=true,tile_order=LongestFirst").expect("valid").kernel
        else {
            panic!("not {spec}")
        };
        assert!(own.persistent && own.tile_order == fa_core::spec::TileOrder::LongestFirst);
        assert_eq!(of("persistent=false").expect("as it is"), spec);
        for (text, part) in [
            ("persistant=true", "persistant"),
            ("tile_m=17", "tile_m"),
            ("do_stages=many", "many"),
            ("num_wg=7", "num_wg"),
        ] {
            let error = of(text).expect_err(text).to_string();
            assert!(error.contains(part) && error.contains("sm90_bwd"), "{error}");
        }
        assert!("persistent".parse::<Change>().expect_err("no value").contains("FIELD=VALUE"));
    }
}

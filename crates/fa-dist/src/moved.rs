//! Programs of masks and scores in the parts of a problem: there queries, keys and heads have the numbers
//! that they have in the whole, by scalars of their own, so that all parts have one kernel.

use fa_core::program::{ArrayView, InputError, Inputs, Interned, Program, Value, Var};
use fa_kernels::launch::RawProgram;

/// A variable of a part, and the number that it has in the whole, or begins at.
pub(crate) type Place = (Var, i32);

/// The scalar of a variable, and whether it is added to the part's own number.
fn scalar(var: Var) -> Option<(&'static str, bool)> {
    match var {
        Var::S => None,
        Var::B => Some(("fa_part_b", true)),
        Var::H => Some(("fa_part_h", true)),
        Var::Hk => Some(("fa_part_hk", true)),
        Var::Q => Some(("fa_part_q", true)),
        Var::K => Some(("fa_part_k", true)),
        Var::Sq => Some(("fa_part_sq", false)),
        Var::Sk => Some(("fa_part_sk", false)),
        Var::Off => Some(("fa_part_off", false)),
    }
}

/// `program` with `vars` as they are in the whole.
///
/// # Errors
/// A program that leaves no room for the scalars, or a process with too many: what is said of it.
pub(crate) fn moved(program: &Program, vars: &[Var]) -> Result<Interned, String> {
    let (mut declared, mut text, mut word) = (String::new(), String::new(), String::new());
    let mut used = Vec::new();
    let mut end = |word: &mut String, text: &mut String| {
        let found = vars.iter().find(|var| var.name() == word).and_then(|var| scalar(*var));
        match found {
            Some((name, is_first)) => {
                if !used.contains(&name) {
                    declared += &format!("scalar {name}: i32;\n");
                    used.push(name);
                }
                *text += &if is_first { format!("({word} + {name})") } else { name.to_owned() };
            }
            None => *text += word,
        }
        word.clear();
    };
    for character in program.text().chars() {
        if character.is_ascii_alphanumeric() || character == '_' {
            word.push(character);
        } else {
            end(&mut word, &mut text);
            text.push(character);
        }
    }
    end(&mut word, &mut text);
    let moved = Program::parse(&(declared + &text)).map_err(|error| error.to_string())?;
    moved.intern().map_err(|error| error.to_string())
}

/// The scalars of a moved program, from those of the `whole` one that the caller gives.
fn scalars<T: Copy>(
    (whole, moved): (&Program, &Program),
    places: &[Place],
    given: &[T],
    number: impl Fn(i32) -> T,
) -> Vec<T> {
    let own = |name: &str| {
        let of = |(var, value): &Place| Some((scalar(*var)?.0 == name).then(|| number(*value)));
        let place = places.iter().find_map(|place| of(place).flatten());
        let index = || whole.scalars().iter().position(|scalar| scalar.name == name);
        place.or_else(|| given.get(index()?).copied())
    };
    moved.scalars().iter().filter_map(|scalar| own(&scalar.name)).collect()
}

/// What a part's program is given on the CPU.
///
/// # Errors
/// What does not fit the whole problem's program.
pub(crate) fn host<'a>(
    programs: (&Program, &Program),
    places: &[Place],
    given: Option<&Inputs<'a>>,
) -> Result<Inputs<'a>, InputError> {
    let none: Vec<ArrayView<'a>> = Vec::new();
    let given = match given {
        Some(given) => Inputs::new(programs.0, given.arrays().to_vec(), given.scalars().to_vec())?,
        None => Inputs::new(programs.0, none, Vec::new())?,
    };
    let scalars = scalars(programs, places, given.scalars(), Value::I32);
    Inputs::new(programs.1, given.arrays().to_vec(), scalars)
}

/// The same on a GPU, by addresses.
pub(crate) fn device(
    programs: (&Program, &Program),
    places: &[Place],
    given: Option<RawProgram>,
) -> RawProgram {
    let mut raw = given.unwrap_or_default();
    let own = scalars(programs, places, &raw.scalars, |value| value as u32);
    raw.scalars.iter_mut().zip(own).for_each(|(to, value)| *to = value);
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_as_whole_words() {
        let text = "array hq: f32[_, _];\nscalar k_q: i32;\nmask = q - k < k_q;\n\
                    score = s + hq[h, sq - q] * 1e-3;";
        let program = Program::parse(text).unwrap();
        let found = moved(&program, &[Var::Q, Var::K, Var::Sq, Var::H]).unwrap();
        assert_eq!(found.arrays(), program.arrays());
        let names: Vec<&str> = found.scalars().iter().map(|scalar| scalar.name.as_str()).collect();
        assert_eq!(names.len(), 5, "{names:?}");
        for part in ["(q + fa_part_q)", "(k + fa_part_k)", "fa_part_sq", "h + fa_part_h"] {
            let plain = part.trim_matches(['(', ')']);
            assert!(found.text().contains(plain), "{} has no {plain}", found.text());
        }
        let places = [(Var::Q, 5), (Var::K, 7), (Var::Sq, 40), (Var::H, 2)];
        let given = [9];
        let own = scalars((&program, &found), &places, &given, |value| value);
        let named: Vec<(&str, i32)> = names.into_iter().zip(own).collect();
        for pair in [("fa_part_q", 5), ("fa_part_k", 7), ("fa_part_sq", 40), ("fa_part_h", 2), ("k_q", 9)] {
            assert!(named.contains(&pair), "{named:?} has no {pair:?}");
        }
    }
}

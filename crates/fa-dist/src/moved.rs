//! Programs of masks and scores in the parts of a problem: there queries, keys and heads have the numbers
//! that they have in the whole, by scalars of their own, so that all parts have one kernel.

use fa_core::ScoreMod;
use fa_core::program::{
    ArrayData, ArrayView, Axis, InputError, Inputs, Interned, Node, Program, ProgramError, Value, Var,
};
use fa_kernels::launch::{RawArray, RawProgram};

use crate::program::{AXES, Window};

/// A scalar of a part's program, and its value: what a variable is in the whole, or begins at.
pub(crate) type Place = (&'static str, i32);

/// The last of a part's packed sequences, and its length in the whole.
pub(crate) const LAST: [&str; 2] = ["fa_part_last", "fa_part_end"];

/// The scalar of a variable.
pub(crate) fn scalar(var: Var) -> Option<&'static str> {
    match var {
        Var::S => None,
        Var::B => Some("fa_part_b"),
        Var::H => Some("fa_part_h"),
        Var::Hk => Some("fa_part_hk"),
        Var::Q => Some("fa_part_q"),
        Var::K => Some("fa_part_k"),
        Var::Sq => Some("fa_part_sq"),
        Var::Sk => Some("fa_part_sk"),
        Var::Off => Some("fa_part_off"),
    }
}

/// A variable as it is in the whole, and the scalars that this takes. Of packed sequences the first and the
/// last may be parts of theirs.
fn in_the_whole(var: Var, is_packed: bool) -> Option<(String, Vec<&'static str>)> {
    let (name, own) = (var.name(), scalar(var)?);
    Some(match (var, is_packed) {
        (Var::S, _) => return None,
        (Var::B | Var::H | Var::Hk, _) | (Var::Q | Var::K, false) => (format!("({name} + {own})"), vec![own]),
        (Var::Q | Var::K, true) => (format!("({name} + select(b == 0, {own}, 0))"), vec![own]),
        // As many keys as queries.
        (Var::Off, true) => ("0".to_owned(), Vec::new()),
        (Var::Sq | Var::Sk, true) => {
            let (own, [last, end]) = (scalar(Var::Sq)?, LAST);
            let other = format!("select(b == {last}, {end}, {name})");
            (format!("select(b == 0, {own}, {other})"), vec![own, last, end])
        }
        (Var::Sq | Var::Sk | Var::Off, false) => (own.to_owned(), vec![own]),
    })
}

/// The array of ALiBi's slopes in programs that compute it.
const SLOPES: &str = "fa_slopes";

/// ALiBi by distances in the whole, behind the soft cap.
fn slopes(score: &ScoreMod) -> Result<Program, ProgramError> {
    let capped = match score.softcap {
        Some(cap) => format!("{cap:?} * tanh(s / {cap:?})"),
        None => "s".to_owned(),
    };
    Program::parse(&format!(
        "array {SLOPES}: f32[_];\nscore = {capped} - {SLOPES}[h] * f32(abs(q + off - k));"
    ))
}

/// The program of parts: ALiBi, where `sloped` is the score that has it so, then `program`, with `vars` as
/// they are in the whole, but where they index an array of `own`: of these a part has its own elements.
///
/// # Errors
/// A program that leaves no room for the scalars, or a process with too many: what is said of it.
pub(crate) fn moved(
    sloped: Option<&ScoreMod>,
    program: Option<&Program>,
    (vars, is_packed): (&[Var], bool),
    own: &[&str],
) -> Result<Interned, String> {
    let slopes = sloped.map(slopes).transpose().map_err(|error| error.to_string())?;
    let joined = match (slopes, program) {
        (Some(slopes), Some(program)) => slopes.with(program).map_err(|error| error.to_string())?,
        (Some(own), None) => own,
        (None, Some(program)) => program.clone(),
        (None, None) => return Err("there is none".to_owned()),
    };
    as_in_the_whole(&joined, vars, is_packed, own)
}

fn as_in_the_whole(
    program: &Program,
    vars: &[Var],
    is_packed: bool,
    own: &[&str],
) -> Result<Interned, String> {
    let (mut declared, mut text, mut word) = (String::new(), String::new(), String::new());
    let mut used = Vec::new();
    let mut end = |word: &mut String, text: &mut String, is_own: bool| {
        let found = vars.iter().find(|var| var.name() == word && !is_own);
        match found.and_then(|var| in_the_whole(*var, is_packed)) {
            Some((own, scalars)) => {
                for name in scalars.into_iter().filter(|name| !used.contains(name)).collect::<Vec<_>>() {
                    declared += &format!("scalar {name}: i32;\n");
                    used.push(name);
                }
                *text += &own;
            }
            None => *text += word,
        }
        word.clear();
    };
    // Whether these are indices of an array of the part's own, which are variables alone.
    let mut is_own = false;
    for character in program.text().chars() {
        if character.is_ascii_alphanumeric() || character == '_' {
            word.push(character);
            continue;
        }
        let begins = character == '[' && own.contains(&word.as_str());
        end(&mut word, &mut text, is_own);
        is_own = begins || (is_own && character != ']');
        text.push(character);
    }
    end(&mut word, &mut text, is_own);
    let moved = Program::parse(&(declared + &text)).map_err(|error| error.to_string())?;
    moved.intern().map_err(|error| error.to_string())
}

/// The scalars of a moved program, from those of the `whole` one that the caller gives.
fn scalars<T: Copy>(
    (whole, moved): (Option<&Program>, &Program),
    places: &[Place],
    given: &[T],
    number: impl Fn(i32) -> T,
) -> Vec<T> {
    let own = |name: &str| {
        let place = places.iter().find(|(own, _)| *own == name).map(|(_, value)| number(*value));
        let index = || whole?.scalars().iter().position(|scalar| scalar.name == name);
        place.or_else(|| given.get(index()?).copied())
    };
    moved.scalars().iter().filter_map(|scalar| own(&scalar.name)).collect()
}

/// The scalars of the program of a part whose values the plan knows.
pub(crate) fn known(program: &Program, places: &[Place]) -> Vec<Option<Value>> {
    let of = |name: &str| places.iter().find(|(own, _)| *own == name).map(|(_, value)| Value::I32(*value));
    program.scalars().iter().map(|scalar| of(&scalar.name)).collect()
}

/// The arrays of a moved program, from those of the `whole` one and the slopes.
fn arrays<T: Clone>((whole, moved): (Option<&Program>, &Program), given: &[T], slopes: Option<T>) -> Vec<T> {
    let own = |name: &str| {
        let index = || whole?.arrays().iter().position(|array| array.name == name);
        if name == SLOPES { slopes.clone() } else { given.get(index()?).cloned() }
    };
    moved.arrays().iter().filter_map(|array| own(&array.name)).collect()
}

/// The array of a number in the whole's program that a part has a box of.
fn window(windows: &[(usize, Window)], array: usize) -> Option<&Window> {
    windows.iter().find(|(own, _)| *own == array).map(|(_, window)| window)
}

/// The place in the part's program of an array of the whole's.
pub(crate) fn place((whole, part): (&Program, &Program), array: usize) -> Option<usize> {
    let name = &whole.arrays().get(array)?.name;
    part.arrays().iter().position(|own| own.name == *name)
}

/// Elements before a box, and the indices that it has.
fn cut(window: &Window, strides: [i64; AXES]) -> (i64, [i32; AXES]) {
    let starts = window.ranges.iter().map(|range| range.start as i64);
    let offset = starts.zip(strides).map(|(start, stride)| start * stride).sum();
    (offset, window.ranges.each_ref().map(|range| range.len() as i32))
}

fn cut_data<'a>(data: &ArrayData<'a>, offset: i64) -> ArrayData<'a> {
    fn behind<T>(data: &[T], offset: i64) -> &[T] {
        data.get(offset as usize..).unwrap_or_default()
    }
    match *data {
        ArrayData::F32(data) => ArrayData::F32(behind(data, offset)),
        ArrayData::F16(data) => ArrayData::F16(behind(data, offset)),
        ArrayData::Bf16(data) => ArrayData::Bf16(behind(data, offset)),
        ArrayData::I32(data) => ArrayData::I32(behind(data, offset)),
        ArrayData::U8(data) => ArrayData::U8(behind(data, offset)),
        ArrayData::Bool(data) => ArrayData::Bool(behind(data, offset)),
        ArrayData::Bits(data) => ArrayData::Bits(behind(data, offset)),
    }
}

/// Arrays of the whole's program of whose gradients a part has its own elements alone: each is read once, at
/// variables, of which the part's are a range. `lens`: of each variable how many values it has in the whole.
/// Says of the others why not.
pub(crate) fn axes(
    program: &Program,
    array: usize,
    extents: [usize; AXES],
    lens: impl Fn(Axis) -> Option<usize>,
) -> Result<Vec<Axis>, &'static str> {
    let loads =
        program.own().filter(|(_, node)| matches!(node, Node::Load(own, _) if usize::from(*own) == array));
    let loads: Vec<_> = loads.map(|(id, _)| id).collect();
    let [load] = loads[..] else { return Err("is read at several places") };
    if !program.is_direct(array) {
        return Err("is read at other indices than b, h, hk, q and k");
    }
    let axes = program.axes(load);
    let fits = |(axis, extent): (&Axis, &usize)| *extent == 1 || lens(*axis) == Some(*extent);
    if !axes.iter().zip(&extents).all(fits) {
        return Err("has other extents than 1, the heads and the lengths");
    }
    Ok(axes)
}

/// What a part's program is given on the CPU: of the whole problem's what is given, and ALiBi's slopes.
///
/// # Errors
/// What does not fit the whole problem's program.
pub(crate) fn host<'a>(
    programs: (Option<&Program>, &Program),
    (places, windows): (&[Place], &[(usize, Window)]),
    given: Option<&Inputs<'a>>,
    slopes: Option<&'a [f32]>,
) -> Result<Inputs<'a>, InputError> {
    let none: Vec<ArrayView<'a>> = Vec::new();
    let given = match (programs.0, given) {
        (Some(whole), Some(given)) => {
            Some(Inputs::new(whole, given.arrays().to_vec(), given.scalars().to_vec())?)
        }
        (Some(whole), None) => Some(Inputs::new(whole, none, Vec::new())?),
        (None, _) => None,
    };
    let (own_arrays, own_scalars) =
        given.as_ref().map_or((&[][..], &[][..]), |given| (given.arrays(), given.scalars()));
    let slopes = slopes.map(|slopes| ArrayView {
        data: ArrayData::F32(slopes),
        strides: [1, 0, 0, 0],
        extents: [slopes.len() as i32, 1, 1, 1],
    });
    let scalars = scalars(programs, places, own_scalars, Value::I32);
    let own = own_arrays.iter().enumerate().map(|(array, view)| {
        let Some(window) = window(windows, array) else { return *view };
        let (offset, extents) = cut(window, view.strides);
        ArrayView { data: cut_data(&view.data, offset), extents, ..*view }
    });
    let own_arrays: Vec<ArrayView<'a>> = own.collect();
    Inputs::new(programs.1, arrays(programs, &own_arrays, slopes), scalars)
}

/// The same on a GPU, by addresses; `slopes`: that of the slopes, and how many they are.
pub(crate) fn device(
    programs: (Option<&Program>, &Program),
    (places, windows): (&[Place], &[(usize, Window)]),
    given: Option<RawProgram>,
    slopes: Option<(u64, usize)>,
) -> RawProgram {
    let mut given = given.unwrap_or_default();
    let decls = programs.0.map_or(&[][..], Program::arrays);
    for (array, (to, decl)) in given.arrays.iter_mut().zip(decls).enumerate() {
        if let Some(window) = window(windows, array) {
            let (offset, extents) = cut(window, to.strides);
            to.address = to.address.wrapping_add_signed(offset * decl.element.bytes() as i64);
            to.extents = extents;
        }
    }
    let slopes = slopes.map(|(address, heads)| RawArray {
        address,
        strides: [1, 0, 0, 0],
        extents: [heads as i32, 1, 1, 1],
    });
    let mut raw = RawProgram::default();
    let own = arrays(programs, &given.arrays, slopes);
    raw.arrays.iter_mut().zip(own).for_each(|(to, array)| *to = array);
    let own = scalars(programs, places, &given.scalars, |value| value as u32);
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
        let vars = [Var::Q, Var::K, Var::Sq, Var::H];
        let found = moved(None, Some(&program), (&vars, false), &[]).unwrap();
        assert_eq!(found.arrays(), program.arrays());
        let names: Vec<&str> = found.scalars().iter().map(|scalar| scalar.name.as_str()).collect();
        assert_eq!(names.len(), 5, "{names:?}");
        for part in ["(q + fa_part_q)", "(k + fa_part_k)", "fa_part_sq", "h + fa_part_h"] {
            let plain = part.trim_matches(['(', ')']);
            assert!(found.text().contains(plain), "{} has no {plain}", found.text());
        }
        let places = [("fa_part_q", 5), ("fa_part_k", 7), ("fa_part_sq", 40), ("fa_part_h", 2)];
        let given = [9];
        let own = scalars((Some(&program), &found), &places, &given, |value| value);
        let named: Vec<(&str, i32)> = names.into_iter().zip(own).collect();
        for pair in [("fa_part_q", 5), ("fa_part_k", 7), ("fa_part_sq", 40), ("fa_part_h", 2), ("k_q", 9)] {
            assert!(named.contains(&pair), "{named:?} has no {pair:?}");
        }
    }

    #[test]
    fn arrays_of_a_part_are_read_at_its_own_numbers() {
        let text = "array bias: f32[_, _, _] grad;\narray table: f32[_];\n\
                    score = s + bias[h, q, k] * table[q - k + q];";
        let program = Program::parse(text).unwrap();
        let vars = [Var::Q, Var::K, Var::H];
        let found = moved(None, Some(&program), (&vars, false), &["bias"]).unwrap();
        assert!(found.text().contains("bias[h, q, k]"), "{}", found.text());
        assert!(found.text().contains("q + fa_part_q") && !found.text().contains("fa_part_h"));
        let lens = |axis| match axis {
            Axis::Head => Some(4),
            Axis::Query | Axis::Key => Some(9),
            Axis::Batch | Axis::HeadKv | Axis::Tile | Axis::Diagonal | Axis::Other => None,
        };
        let of = |extents| axes(&program, 0, extents, lens);
        assert_eq!(of([4, 9, 9, 1]), Ok(vec![Axis::Head, Axis::Query, Axis::Key]));
        assert_eq!(of([4, 1, 9, 1]), of([4, 9, 9, 1]));
        assert!(of([4, 8, 9, 1]).is_err() && axes(&program, 1, [17, 1, 1, 1], lens).is_err());
        let view = ArrayView {
            data: ArrayData::F32(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            strides: [3, 1, 0, 0],
            extents: [2, 3, 1, 1],
        };
        let window = Window { extents: [2, 3, 1, 1], ranges: [1..2, 1..3, 0..1, 0..1] };
        assert_eq!(cut(&window, view.strides), (4, [1, 2, 1, 1]));
        assert!(matches!(cut_data(&view.data, 4), ArrayData::F32([4.0, 5.0])));
    }
}

//! Which rows of a sequence a rank holds, as `fa_dist` deals them.

use fa_dist::{Layout, Shards};
use pyo3::prelude::*;

use crate::error::InputError;

fn shards(layout: &str, world: usize, rows: usize) -> PyResult<Shards> {
    let layouts = [Layout::Zigzag, Layout::Contiguous];
    let Some(found) = layouts.into_iter().find(|one| one.name() == layout) else {
        let names = layouts.map(Layout::name).join(", ");
        return Err(InputError::new_err(format!("layout is '{layout}': use one of {names}")));
    };
    Ok(Shards::new(found, world, rows, 1))
}

/// For each rank the chunks that it holds, in the order in which it stores them.
#[pyfunction]
pub(crate) fn chunks(layout: &str, world: usize) -> PyResult<Vec<Vec<usize>>> {
    let shards = shards(layout, world, 0)?;
    Ok((0..world).map(|rank| shards.chunks_of(rank)).collect())
}

/// Where the chunks of a sequence of `rows` begin, and its end: of equal length where they divide it, else
/// some are a row longer.
#[pyfunction]
pub(crate) fn bounds(layout: &str, world: usize, rows: usize) -> PyResult<Vec<usize>> {
    Ok(shards(layout, world, rows)?.bounds().to_vec())
}

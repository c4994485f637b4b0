//! Which rows of a sequence a rank holds, as `fa_dist` deals them.

use fa_dist::{Layout, Shards};
use pyo3::prelude::*;

use crate::error::InputError;

/// For each rank the chunks that it holds, in the order in which it stores them.
#[pyfunction]
pub(crate) fn chunks(layout: &str, world: usize) -> PyResult<Vec<Vec<usize>>> {
    let layouts = [Layout::Zigzag, Layout::Contiguous];
    let Some(found) = layouts.into_iter().find(|one| one.name() == layout) else {
        let names = layouts.map(Layout::name).join(", ");
        return Err(InputError::new_err(format!("layout is '{layout}': use one of {names}")));
    };
    let shards = Shards::new(found, world, 0, 1);
    Ok((0..world).map(|rank| shards.chunks_of(rank)).collect())
}

//! Division of a layout into tiles, and products that repeat a layout.

use super::{Layout, LayoutError};

impl Layout {
    /// Splits the index space by `tile`: rank 2, mode 0 runs within a tile, mode 1 over the tiles.
    ///
    /// Laws, for `D = divide(A, T)`: mode 0 of `D` is `compose(A, T)`; `D` has the size of `A` and takes the
    /// same offsets the same number of times: it is `A` in another order.
    ///
    /// # Errors
    /// `NotATiling` if copies of the tile do not fill `0..size()` exactly, or what [`Layout::complement`] and
    /// [`Layout::compose`] refuse.
    pub fn logical_divide(&self, tile: &Layout) -> Result<Layout, LayoutError> {
        let over_tiles = tile.complement(self.size())?;
        if tile.size().checked_mul(over_tiles.size()) != Some(self.size()) {
            return Err(LayoutError::NotATiling { tile: tile.to_string(), size: self.size() });
        }
        self.compose(&Layout::concat(&[tile.clone(), over_tiles])?)
    }

    /// Divides each top-level mode by its own tile and sorts the parts: mode 0 runs within a tile (one mode
    /// per mode of `self`), mode 1 over the tiles (likewise). `(128,64):(64,1)` by `[16:1, 16:1]` is 16x16
    /// tiles, and `at_modes(&[i, t])` is element `i` of tile `t`, both counted with the first mode fastest.
    ///
    /// # Errors
    /// `RankMismatch` unless there is a tile per mode; otherwise as [`Layout::logical_divide`].
    pub fn zipped_divide(&self, tiles: &[Layout]) -> Result<Layout, LayoutError> {
        let modes = self.modes();
        if modes.len() != tiles.len() {
            return Err(LayoutError::RankMismatch { have: tiles.len(), need: modes.len() });
        }
        let (mut within, mut over) = (Vec::new(), Vec::new());
        for (mode, tile) in modes.iter().zip(tiles) {
            let mut parts = mode.logical_divide(tile)?.modes().into_iter();
            within.extend(parts.next());
            over.extend(parts.next());
        }
        Layout::concat(&[Layout::concat(&within)?, Layout::concat(&over)?])
    }

    /// [`Layout::zipped_divide`] with each tile count as a separate mode:
    /// `((tile..), tiles_0, tiles_1, ..)`.
    ///
    /// # Errors
    /// As [`Layout::zipped_divide`].
    pub fn tiled_divide(&self, tiles: &[Layout]) -> Result<Layout, LayoutError> {
        let zipped = self.zipped_divide(tiles)?.modes();
        let [within, over] = zipped.as_slice() else {
            return Err(LayoutError::RankMismatch { have: zipped.len(), need: 2 });
        };
        let mut modes = vec![within.clone()];
        modes.extend(over.modes());
        Layout::concat(&modes)
    }

    /// Repeats `self` as `by` says: rank 2, mode 0 is `self`, mode 1 runs over the copies in the order of
    /// `by`.
    ///
    /// Laws, for `P = product(A, B)`: mode 0 is `A`; the shape of mode 1 is compatible with that of `B`;
    /// copies do not overlap, so `P` is injective if `A` and `B` are; copy `j` starts where entry `B(j)` of
    /// the complement of `A` does.
    ///
    /// # Errors
    /// `Overflow`, or what [`Layout::complement`] and [`Layout::compose`] refuse.
    pub fn logical_product(&self, by: &Layout) -> Result<Layout, LayoutError> {
        let bound = self
            .size()
            .checked_mul(by.cosize())
            .ok_or(LayoutError::Overflow { what: "the size of the product" })?;
        let copies = self.complement(bound)?.compose(by)?;
        Layout::concat(&[self.clone(), copies])
    }

    /// The product with modes paired up: mode `i` is (mode `i` of the block, mode `i` of the grid), so that
    /// the block's elements stay together. A 8x64 row-major atom by a grid of `(16,2):(1,16)` is a 128x128
    /// tile of two 64-wide panels. Modes are coalesced.
    ///
    /// # Errors
    /// `RankMismatch` unless both have the same rank; otherwise as [`Layout::logical_product`].
    pub fn blocked_product(&self, grid: &Layout) -> Result<Layout, LayoutError> {
        self.paired_product(grid, |block, grid| [block, grid])
    }

    /// As [`Layout::blocked_product`], with the copies interleaved: mode `i` is (mode `i` of the grid, mode
    /// `i` of the block).
    ///
    /// # Errors
    /// As [`Layout::blocked_product`].
    pub fn raked_product(&self, grid: &Layout) -> Result<Layout, LayoutError> {
        self.paired_product(grid, |block, grid| [grid, block])
    }

    fn paired_product(
        &self,
        grid: &Layout,
        order: impl Fn(Layout, Layout) -> [Layout; 2],
    ) -> Result<Layout, LayoutError> {
        if self.rank() != grid.rank() {
            return Err(LayoutError::RankMismatch { have: grid.rank(), need: self.rank() });
        }
        let product = self.logical_product(grid)?.modes();
        let [block, copies] = product.as_slice() else {
            return Err(LayoutError::RankMismatch { have: product.len(), need: 2 });
        };
        // A bare grid is one mode, though its composition may have split it.
        let copies = if grid.depth() == 0 { vec![copies.clone()] } else { copies.modes() };
        let modes = block
            .modes()
            .into_iter()
            .zip(copies)
            .map(|(block, copies)| Layout::concat(&order(block, copies)))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Layout::concat(&modes)?.coalesce_modes())
    }
}

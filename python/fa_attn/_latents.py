"""What `fa_attn.flash_mla` needs of arrays other than torch's."""


from typing import Any

from ._core import UnsupportedError

# The most bytes of a copy of rows: work on more is done in parts.
ROOM = 1 << 28


class Latents:
    """Methods of `fa_attn._arrays.Arrays`, whose `library` has the functions of arrays."""

    library: Any

    def chosen(self, indices, rows, lengths):
        """(page table of single rows, rows in use) of `indices` (n, most), of which entries outside of the
        `rows` that there are, and those from `lengths` (n,) on, name none."""
        np, host = self.library.np, self.library.host
        indices = host(indices)
        seen = (indices >= 0) & (indices < rows)
        if lengths is not None:
            seen &= np.arange(indices.shape[1]) < host(lengths)[:, None]
        order = np.argsort(~seen, axis=1, kind="stable")
        table = np.take_along_axis(np.where(seen, indices, 0), order, 1)
        return np.ascontiguousarray(table, np.int32), seen.sum(1).astype(np.int32)

    def rows_of_pages(self, cache, table):
        """(cache, table): a cache (pages, page, heads, columns) as pages of one row, and a table of its rows
        as one of those. Copied where pages do not follow each other."""
        return cache.reshape(-1, 1, *cache.shape[2:]), table

    def packed_rows(self, name, *_):
        raise UnsupportedError(
            f"{name} with is_fp8_kvcache: rows of codes are unpacked for torch's tensors, give those"
        )

    def numbers_of(self, *_):
        self.packed_rows("q")

    def repeated(self, lengths, times):
        return self.library.np.repeat(self.library.host(lengths), times)

    def largest_scores(self, q, rows, table, used, scale):
        """The largest scaled score of each head of q (n, heads, columns) on the first `used` (n,) rows of
        `table` (n, most)."""
        np = self.library.np
        largest = np.full(q.shape[:2], -np.inf, np.float32)
        for index, count in enumerate(used.tolist()):
            if count:
                keys = rows[table[index, :count]].astype(np.float32)
                largest[index] = (q[index].astype(np.float32) @ keys.T * np.float32(scale)).max(-1)
        return self.library.give(largest)

    def sunk(self, out, lse, sinks):
        """out (.., rows, heads, columns) with a sink in the denominators; lse (.., heads, rows) has none."""
        np = self.library.np
        out, lse = self.library.host(out), self.library.host(lse)
        sinks = self.library.host(sinks).astype(np.float32)[:, None]
        is_blind = np.isneginf(lse)
        above = sinks - np.where(is_blind, np.float32(0), lse)
        # exp(88) is the last that float32 holds.
        share = np.where(above > 88, np.float32(0), 1 / (1 + np.exp(np.minimum(above, 88))))
        share = np.where(is_blind, np.float32(0), share).swapaxes(-1, -2)[..., None]
        return self.library.give((out.astype(np.float32) * share).astype(out.dtype))

    def without_blind(self, lse):
        """lse with +inf for rows that see no key."""
        np = self.library.np
        lse = self.library.host(lse)
        return self.library.give(np.where(np.isneginf(lse), np.float32(np.inf), lse))

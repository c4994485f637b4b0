#!/usr/bin/env python3
"""Make the small example files of packed, paged, sink and ALiBi problems, with outputs computed by the formula.

    python3 scripts/make_examples.py            # writes into examples/

Needs nothing but Python. The tensors hold bf16 values, so that GPU kernels take the files as well as the CPU; `out`,
`lse` and the gradients are computed here in double precision from the values as stored, by three loops that know
nothing of tiles, and the 16-bit ones are rounded once. The numbers come from a fixed recurrence: made again, the
files are the same to the byte.
"""

import argparse
import json
import math
import os
import struct
from pathlib import Path


def bf16(value):
    """The bits of the nearest bf16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if math.isnan(value):
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def widened(bits):
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return value


class Numbers:
    """Numbers between -1 and 1 without a pattern: xorshift64."""

    def __init__(self, seed):
        self.state = seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF | 1

    def next(self):
        self.state ^= self.state << 13 & 0xFFFFFFFFFFFFFFFF
        self.state ^= self.state >> 7
        self.state ^= self.state << 17 & 0xFFFFFFFFFFFFFFFF
        return (self.state >> 11) / 2**52 - 1


class Tensor:
    """Values with a shape; bf16 ones are rounded when they are made."""

    def __init__(self, dtype, shape, values):
        self.dtype, self.shape = dtype, list(shape)
        if dtype == "BF16":
            self.bits = [bf16(value) for value in values]
            self.values = [widened(bits) for bits in self.bits]
        elif dtype == "F32":
            self.values = [struct.unpack("<f", struct.pack("<f", value))[0] for value in values]
        else:
            self.values = list(values)
        assert len(self.values) == math.prod(self.shape), (dtype, shape)

    def bytes(self):
        if self.dtype == "BF16":
            return struct.pack(f"<{len(self.bits)}H", *self.bits)
        return struct.pack(f"<{len(self.values)}{'f' if self.dtype == 'F32' else 'i'}", *self.values)

    def row(self, *position):
        """A row of the last axis, by the position on the others."""
        at = 0
        for extent, index in zip(self.shape, position):
            at = at * extent + index
        dim = self.shape[-1]
        return self.values[at * dim : (at + 1) * dim]


def write(path, tensors, metadata):
    """A safetensors file: header length, JSON header padded to 8 bytes, then the tensors, widest elements first."""
    header, payload, offset = {"__metadata__": dict(sorted(metadata.items()))}, [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].dtype == "BF16", item[0])):
        data = tensor.bytes()
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, offset + len(data)]}
        payload.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(payload))
    os.replace(temporary, path)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def attention(sequences, heads, heads_kv, dim, q, k, v, *, window=None, slopes=None, sinks=None, dout=None):
    """Causal attention of sequences: a list of (rows of q, rows of k), each row a position of q(row, head), k, v.

    Gives out[row of q][head], lse[head][row of q], and with dout also dq, dk, dv (by row and head) and dsinks.
    """
    scale = 1 / math.sqrt(dim)
    out, lse = {}, {}
    dq, dk, dv, dsinks = {}, {}, {}, [0.0] * heads
    for rows_q, rows_k in sequences:
        for head in range(heads):
            kv = head // (heads // heads_kv)
            sink = sinks[head] if sinks else -math.inf
            keys, values = [k(row, kv) for row in rows_k], [v(row, kv) for row in rows_k]
            for i, row in enumerate(rows_q):
                query, on = q(row, head), i + len(rows_k) - len(rows_q)
                seen = range(0 if window is None else max(0, on - window), min(on + 1, len(rows_k)))
                scores = [
                    scale * dot(query, keys[j]) - (slopes[head] * abs(on - j) if slopes else 0.0) for j in seen
                ]
                top = max(scores + [sink])
                if top == -math.inf:
                    out[row, head], lse[head, row] = [0.0] * dim, -math.inf
                    continue
                total = sum(math.exp(score - top) for score in scores) + math.exp(sink - top)
                lse[head, row] = top + math.log(total)
                weights = [math.exp(score - lse[head, row]) for score in scores]
                columns = zip(*(values[j] for j in seen)) if seen else [()] * dim
                out[row, head] = [dot(weights, column) for column in columns]
                if dout is None:
                    continue
                gradient = dout(row, head)
                delta = dot(gradient, out[row, head])
                dsinks[head] -= math.exp(sink - lse[head, row]) * delta
                for weight, j in zip(weights, seen):
                    slope = weight * (dot(gradient, values[j]) - delta) * scale
                    for target, factor, rows in (
                        (dq.setdefault((row, head), [0.0] * dim), slope, keys[j]),
                        (dk.setdefault((rows_k[j], kv), [0.0] * dim), slope, query),
                        (dv.setdefault((rows_k[j], kv), [0.0] * dim), weight, gradient),
                    ):
                        for d in range(dim):
                            target[d] += factor * rows[d]
    return out, lse, dq, dk, dv, dsinks


def gathered(by_row, rows, heads, dim):
    """Rows and heads of a dict as one list; zeros for what is not in it."""
    zeros = [0.0] * dim
    return [value for row in rows for head in range(heads) for value in by_row.get((row, head), zeros)]


METADATA = {"made_by": "scripts/make_examples.py", "layout": "bshd", "causal": "true", "softcap": "none"}


def random_tensor(numbers, shape, factor=1.0):
    return Tensor("BF16", shape, [factor * numbers.next() for _ in range(math.prod(shape))])


def gradients(found, total, heads, heads_kv, dim, shape):
    _, _, dq, dk, dv, dsinks = found
    rows = range(total)
    return {
        "dq": Tensor("BF16", shape(heads), gathered(dq, rows, heads, dim)),
        "dk": Tensor("BF16", shape(heads_kv), gathered(dk, rows, heads_kv, dim)),
        "dv": Tensor("BF16", shape(heads_kv), gathered(dv, rows, heads_kv, dim)),
    }


def packed(folder):
    """Sequences of 37, 0, 5 and 60 positions end to end, and 3 rows behind the last one that are nobody's."""
    cu, total, heads, heads_kv, dim = [0, 37, 37, 42, 102], 105, 4, 2, 32
    numbers = Numbers(1)
    q, k = random_tensor(numbers, [total, heads, dim], 2.0), random_tensor(numbers, [total, heads_kv, dim], 2.0)
    v, dout = random_tensor(numbers, [total, heads_kv, dim]), random_tensor(numbers, [total, heads, dim])
    sequences = [(range(begin, end), range(begin, end)) for begin, end in zip(cu, cu[1:])]
    found = attention(sequences, heads, heads_kv, dim, q.row, k.row, v.row, dout=dout.row)
    out, lse = found[:2]
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    tensors |= {"cu_seqlens_q": Tensor("I32", [5], cu), "cu_seqlens_k": Tensor("I32", [5], cu)}
    tensors["out"] = Tensor("BF16", [total, heads, dim], gathered(out, range(total), heads, dim))
    rows = [lse.get((head, row), -math.inf) for head in range(heads) for row in range(total)]
    tensors["lse"] = Tensor("F32", [heads, total], rows)
    tensors |= gradients(found, total, heads, heads_kv, dim, lambda heads: [total, heads, dim])
    write(folder / "packed-causal.safetensors", tensors, METADATA | {"window_left": "none", "window_right": "0"})


def paged(folder):
    """One new token of 3 requests on caches of 50, 7 and 33 keys in shuffled pages of 16.

    Rows behind a sequence's end hold NaN, unused entries of the page table name no page.
    """
    lengths, page, pages, heads, heads_kv, dim = [50, 7, 33], 16, 10, 8, 2, 32
    table = [[6, 0, 9, 3], [7, -1, -1, -1], [1, 8, 4, 123456]]
    numbers = Numbers(2)
    q = random_tensor(numbers, [len(lengths), 1, heads, dim], 2.0)
    k = random_tensor(numbers, [pages, page, heads_kv, dim], 2.0)
    v = random_tensor(numbers, [pages, page, heads_kv, dim])
    used = {(table[b][j // page], j % page) for b, length in enumerate(lengths) for j in range(length)}
    for cache in (k, v):
        for row in range(pages * page):
            if divmod(row, page) not in used:
                begin, end = row * heads_kv * dim, (row + 1) * heads_kv * dim
                cache.bits[begin:end] = [0x7FC0] * (end - begin)
    sequences = [
        ([(b, 0)], [(table[b][j // page], j % page) for j in range(length)]) for b, length in enumerate(lengths)
    ]
    by_position = lambda tensor: lambda position, head: tensor.row(*position, head)
    out, lse, *_ = attention(sequences, heads, heads_kv, dim, by_position(q), by_position(k), by_position(v))
    rows = [(b, 0) for b in range(len(lengths))]
    tensors = {"q": q, "k": k, "v": v}
    tensors["page_table"] = Tensor("I32", [3, 4], [entry for row in table for entry in row])
    tensors["cache_seqlens"] = Tensor("I32", [3], lengths)
    tensors["out"] = Tensor("BF16", [3, 1, heads, dim], gathered(out, rows, heads, dim))
    tensors["lse"] = Tensor("F32", [3, heads, 1], [lse[head, row] for row in rows for head in range(heads)])
    write(folder / "decode-paged.safetensors", tensors, METADATA | {"window_left": "none", "window_right": "0"})


def turned(row, position, cos, sin, neighbours):
    """A row of which the first elements are turned by the angles of a position: halves, or neighbours."""
    half = cos.shape[1]
    row = list(row)
    for i in range(half):
        low, high = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        (c, s), (a, b) = (cos.row(position)[i], sin.row(position)[i]), (row[low], row[high])
        row[low], row[high] = a * c - b * s, b * c + a * s
    return row


def growing(folder, name, seed, lengths, room, page, neighbours):
    """New tokens of requests whose caches hold some already: appended, and turned with the queries by position.

    The file has the cache before, in shuffled pages or one piece, and `out` and `lse` of what it holds afterwards.
    """
    batch, new, heads, heads_kv, dim, rotary = len(lengths), 2, 8, 2, 32, 16
    numbers = Numbers(seed)
    q = random_tensor(numbers, [batch, new, heads, dim], 2.0)
    columns = -(-room // page) if page else 0
    shape = [batch * columns + 1, page, heads_kv, dim] if page else [batch, room, heads_kv, dim]
    k, v = random_tensor(numbers, shape, 2.0), random_tensor(numbers, shape)
    k_new = random_tensor(numbers, [batch, new, heads_kv, dim], 2.0)
    v_new = random_tensor(numbers, [batch, new, heads_kv, dim])
    table = [[1 + (5 * (b * columns + c) + 3) % (batch * columns) for c in range(columns)] for b in range(batch)]
    angle = lambda i: (i // (rotary // 2)) * 100.0 ** (-(i % (rotary // 2)) / (rotary // 2))
    cos, sin = (
        Tensor("F32", [room, rotary // 2], [of(angle(i)) for i in range(room * rotary // 2)])
        for of in (math.cos, math.sin)
    )
    place = lambda b, j: (table[b][j // page], j % page) if page else (b, j)
    # What is kept is bf16: rows are rounded when they have been turned.
    rounded = lambda row: Tensor("BF16", [len(row)], row).values
    turn = lambda row, position: rounded(turned(row, position, cos, sin, neighbours))
    keys, values, queries = {}, {}, {}
    for b, length in enumerate(lengths):
        for j in range(length + new):
            for head in range(heads_kv):
                is_new = j >= length
                keys[(b, j), head] = turn(k_new.row(b, j - length, head), j) if is_new else k.row(*place(b, j), head)
                values[(b, j), head] = v_new.row(b, j - length, head) if is_new else v.row(*place(b, j), head)
        for i in range(new):
            for head in range(heads):
                queries[(b, i), head] = turn(q.row(b, i, head), length + i)
    sequences = [
        ([(b, i) for i in range(new)], [(b, j) for j in range(length + new)]) for b, length in enumerate(lengths)
    ]
    at = lambda rows: lambda position, head: rows[position, head]
    out, lse, *_ = attention(sequences, heads, heads_kv, dim, at(queries), at(keys), at(values))
    rows = [(b, i) for b in range(batch) for i in range(new)]
    tensors = {"q": q, "k": k, "v": v, "k_new": k_new, "v_new": v_new, "rotary_cos": cos, "rotary_sin": sin}
    tensors["cache_seqlens"] = Tensor("I32", [batch], lengths)
    if page:
        tensors["page_table"] = Tensor("I32", [batch, columns], [entry for row in table for entry in row])
    tensors["out"] = Tensor("BF16", [batch, new, heads, dim], gathered(out, rows, heads, dim))
    by_head = [lse[head, (b, i)] for b in range(batch) for head in range(heads) for i in range(new)]
    tensors["lse"] = Tensor("F32", [batch, heads, new], by_head)
    options = {"window_left": "none", "window_right": "0", "rotary_interleaved": str(neighbours).lower()}
    write(folder / f"{name}.safetensors", tensors, METADATA | options)


def dense(folder, name, seed, window, slopes=None, sinks=None):
    """One sequence of 64 positions whose scores pass through slopes or sinks."""
    total, heads, heads_kv, dim = 64, 8, 2, 32
    numbers = Numbers(seed)
    q, k = random_tensor(numbers, [1, total, heads, dim], 2.0), random_tensor(numbers, [1, total, heads_kv, dim], 2.0)
    v, dout = random_tensor(numbers, [1, total, heads_kv, dim]), random_tensor(numbers, [1, total, heads, dim])
    values = {key: Tensor("F32", [heads], list) for key, list in (("alibi_slopes", slopes), ("sinks", sinks)) if list}
    at = lambda tensor: lambda row, head: tensor.row(0, row, head)
    of = lambda key: values[key].values if key in values else None
    rows = range(total)
    found = attention(
        [(rows, rows)], heads, heads_kv, dim, at(q), at(k), at(v),
        window=window, slopes=of("alibi_slopes"), sinks=of("sinks"), dout=at(dout),
    )
    out, lse, *_, dsinks = found
    tensors = {"q": q, "k": k, "v": v, "dout": dout} | values
    tensors["out"] = Tensor("BF16", [1, total, heads, dim], gathered(out, rows, heads, dim))
    tensors["lse"] = Tensor("F32", [1, heads, total], [lse[head, row] for head in range(heads) for row in rows])
    tensors |= gradients(found, total, heads, heads_kv, dim, lambda heads: [1, total, heads, dim])
    if sinks:
        tensors["dsinks"] = Tensor("F32", [heads], dsinks)
    left = "none" if window is None else str(window)
    write(folder / f"{name}.safetensors", tensors, METADATA | {"window_left": left, "window_right": "0"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "examples")
    folder = parser.parse_args().out
    packed(folder)
    paged(folder)
    growing(folder, "append-paged", 5, [30, 0, 15], 48, 16, neighbours=False)
    growing(folder, "append-interleaved", 6, [5, 14], 16, None, neighbours=True)
    dense(folder, "alibi", 3, None, slopes=[2.0 ** -(head + 1) for head in range(8)])
    dense(folder, "sinks-window", 4, 15, sinks=[0.5 * head - 1.5 for head in range(8)])


if __name__ == "__main__":
    main()

"""Attention of batches with padding and of packed rows, as masks describe them. The keys of a padded sequence
follow one another, so kernels read them where they lie, by the first and the number of each sequence; only
padding between the tokens of a sequence is left out by copies."""

from __future__ import annotations

import torch

from . import _core, interface
from ._options import Extras, call_options
from ._torch_memory import (
    FLOAT,
    autocast,
    goes_by_operator,
    is_compiling,
    new_gradients,
    out_shape,
    pad,
    rows_of,
)
from ._torch_passes import once_only, run_backward, run_forward
from ._torch_schemas import OPTIONS, flat, options_of, schema, tensors


class Padding:
    """Which keys and queries of a batch are padding.

    `keys` bool (batch, keys): False for padding. `queries` bool (batch, rows), None where all are computed.
    `first`, `used_k`, `used_q` int32 (batch,): the first key, the number of keys and of queries of each
    sequence whose keys follow one another; `first` is None where all are 0, `used_q` where all are in use.
    `holes`: whether keys of a sequence do not follow one another; a tensor in the host's memory where a graph
    found it. `stays`: whether the keys must keep their places for a window to count them.
    """

    def __init__(self, keys, queries, first, used_k, used_q, holes, stays=False):
        self.keys, self.queries = keys, queries
        self.first, self.used_k, self.used_q, self.holes = first, used_k, used_q, holes
        self.stays = stays
        self.starts = {}

    @classmethod
    def of(cls, keys, end, rows, aligned):
        """The padding that bool (batch, keys) tells; None without any. `end`: the number of keys up to the
        last query's own, an int or a tensor. `rows` queries are the last of these where `aligned`, and
        padding where their keys are. Reads the GPU once, in a graph not at all."""
        count = keys.sum(1, dtype=torch.int32)
        marks = keys.to(torch.int8)
        last = keys.shape[1] - marks.flip(1).argmax(1)
        stop = torch.where(count > 0, last, 0).to(torch.int32)
        first = torch.where(count > 0, marks.argmax(1), 0).to(torch.int32)
        holes = (stop - first != count).any()
        used_q = queries = None
        if aligned:
            used_q = (stop + (rows - end)).clamp(0, rows).to(torch.int32)
            places = torch.arange(rows, device=keys.device) + (end - rows)
            queries = keys.index_select(1, places.clamp(0, keys.shape[1] - 1)) & (places >= 0)
        if is_compiling():
            return cls(keys, queries, first, count, used_q, holes.to("cpu"))
        facts = [(count < end).any(), holes, (first > 0).any()]
        facts += [] if used_q is None else [(used_q < rows).any()]
        padded, holes, shifted, *idle = torch.stack(facts).tolist()
        if not padded:
            return None
        return cls(keys, queries, first if shifted else None, count, used_q if any(idle) else None, holes)

    def to(self, device):
        tensors = (self.keys, self.queries, self.first, self.used_k, self.used_q)
        return Padding(*(None if x is None else x.to(device) for x in tensors), self.holes, self.stays)

    def starts_of(self, step, total):
        """The sequences' first rows among `total`, of which `step` lie from one sequence's to the next's."""
        if (step, total) not in self.starts:
            begins = torch.arange(len(self.first), dtype=torch.int32, device=self.first.device) * step
            end = begins.new_full((1,), total)
            self.starts[step, total] = torch.cat([begins + self.first, end])
        return self.starts[step, total]


class Packed:
    """Packed rows: `starts` int32, the first row of each sequence and the end of the last, and the longest's
    length. `facts`: in the host's memory the number of sequences and the longest's length, where a graph
    found them: starts then has room for more sequences."""

    def __init__(self, starts, longest, facts=None):
        self.starts, self.longest, self.facts = starts, longest, facts

    @classmethod
    def of(cls, segments):
        """Of int (batch, rows), a number for each of a row's sequences; None for whole rows."""
        batch, rows = segments.shape
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        begins = begins.reshape(-1)
        if is_compiling():
            places = torch.arange(batch * rows, device=segments.device)
            end = places.new_full((1,), batch * rows)
            starts = torch.cat([torch.where(begins, places, end).sort()[0], end]).to(torch.int32)
            facts = torch.stack([begins.sum(), starts.diff().max()]).to("cpu")
            return cls(starts, rows, facts)
        first = begins.nonzero().reshape(-1)
        if len(first) == batch:
            return None
        starts = torch.cat([first, first.new_tensor([batch * rows])]).to(torch.int32)
        return cls(starts, int(starts.diff().max()))

    def to(self, device):
        return Packed(self.starts.to(device), self.longest, self.facts)


def padded_attention(q, k, v, padding, sinks, options):
    """q (batch, rows, heads, head_dim), k and v likewise, read where they lie. Rows of padding come back as
    0. `options`: softmax_scale, causal, window_size, softcap."""
    by_operator = goes_by_operator(q, k, v)
    if isinstance(padding.holes, torch.Tensor) and not by_operator:
        padding.holes = bool(padding.holes)
    known = not isinstance(padding.holes, torch.Tensor)
    if known and padding.holes:
        check_window(padding.keys, options["window_size"])
        return _gathered(q, k, v, padding, sinks, options)
    if known and padding.first is None:
        used = dict(seqused_q=padding.used_q, seqused_k=padding.used_k)
        return interface.flash_attn_varlen_func(q, k, v, sinks=sinks, **used, **options)
    if by_operator and not is_compiling():
        return _gathered(q, k, v, padding, sinks, options)
    return _cast_and_padded(_shifted, q, k, v, padding, sinks, options)


def packed_attention(q, k, v, packed, sinks, options):
    """The same of rows that are packed end to end."""
    if packed.facts is not None and is_compiling():
        return _cast_and_padded(_packed_in_graph, q, k, v, packed, sinks, options)
    starts, longest = packed.starts, packed.longest
    if packed.facts is not None:
        count, longest = packed.facts.tolist()
        starts = starts[: count + 1]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out = interface.flash_attn_varlen_func(*flat, starts, starts, longest, longest, sinks=sinks, **options)
    return out.reshape(*q.shape[:2], *out.shape[1:])


def _cast_and_padded(compute, q, k, v, rows, sinks, options):
    """The function of tensors of one type, with rows that kernels can read."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if options["softmax_scale"] is None:
        options = dict(options, softmax_scale=head_dim**-0.5)
    options = call_options(*options.values(), False)
    if q.dtype is FLOAT or k.dtype is not q.dtype or v.dtype is not q.dtype:
        q, k, v = autocast(q, k, v)
    if q.is_cuda and (head_dim % 8 or head_dim_v % 8):
        columns, columns_v = -(-head_dim // 8) * 8, -(-head_dim_v // 8) * 8
        q, k, v = pad(q, columns), pad(k, columns), pad(v, columns_v)
    sinks = None if sinks is None else sinks.to(FLOAT)
    return compute(q, k, v, rows, sinks, options)[..., :head_dim_v].contiguous()


def _shifted(q, k, v, padding, sinks, options):
    """Attention where keys may begin at any row."""
    p = padding
    if is_compiling():
        holes = p.holes if isinstance(p.holes, torch.Tensor) else None
        rows = (p.keys, p.queries, p.first, p.used_k, p.used_q, None, holes)
        return _operator(q, k, v, sinks, rows, options)
    differentiated = (q, k, v) if sinks is None else (q, k, v, sinks)
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiated):
        return _Shifted.apply(q, k, v, sinks, padding, options)
    sinks = None if sinks is None else sinks.detach()
    return _run_shifted(q.detach(), k.detach(), v.detach(), sinks, padding, options)[0]


def _packed_in_graph(q, k, v, packed, sinks, options):
    rows = (None, None, None, None, None, packed.starts, packed.facts)
    return _operator(q, k, v, sinks, rows, options)


def _operator(q, k, v, sinks, rows, options):
    return torch.ops.fa_attn.rows_forward(q, k, v, sinks, *rows, *flat(options))[0]


def _in_place(x):
    """The rows of (batch, rows, heads, head_dim) as (total, heads, head_dim) without a copy, and the rows
    from one sequence to the next; None where the distances are no multiples."""
    batch, rows, heads, columns = x.shape
    outer, step, head, last = x.stride()
    if last != 1 or batch == 0 or rows == 0:
        return None
    if batch == 1:
        outer = rows * step
    elif rows == 1:
        step = outer
    if rows > 1 and (step <= 0 or outer % step or outer < rows * step):
        return None
    distance = outer // step if step else rows
    if distance < rows:
        return None
    return x.as_strided(((batch - 1) * distance + rows, heads, columns), (step, head, 1)), distance


def _end_to_end(x):
    """The rows of all sequences end to end, copied where they do not lie so."""
    return rows_of(x).reshape(-1, *x.shape[2:]), x.shape[1]


def _extras(k, distance, rows, padding, sinks):
    """The extra tensors of a call on keys that begin at any row. On the CPU the distance from one sequence
    to the next is checked against the bound on their rows."""
    bound = rows if k.is_cuda else k.shape[0]
    starts = padding.starts_of(distance, k.shape[0])
    used = dict(seqused_q=padding.used_q, seqused_k=padding.used_k)
    return Extras(cu_seqlens_k=starts, sinks=sinks, max_seqlen_k=bound, **used)


def _run_shifted(q, k, v, sinks, padding, options):
    views = _in_place(k), _in_place(v)
    if None in views or views[0][1] != views[1][1]:
        views = _end_to_end(k), _end_to_end(v)
    (keys, distance), (values, _) = views
    extras = _extras(keys, distance, k.shape[1], padding, sinks)
    return run_forward(rows_of(q), keys, values, options, extras)


def _differentiate_shifted(dout, q, k, v, out, lse, sinks, padding, options):
    """(dq, dk, dv, dsinks or None)."""
    (keys, distance), (values, _) = _end_to_end(k), _end_to_end(v)
    q = rows_of(q)
    extras = _extras(keys, distance, k.shape[1], padding, sinks)
    dq, dk, dv = new_gradients(q, keys, values, extras)
    dsinks = run_backward(dout, q, keys, values, out, lse, (dq, dk, dv), options, extras)
    return dq, dk.view(k.shape), dv.view(v.shape), dsinks


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, padding, options):
        out, lse = _run_shifted(q, k, v, sinks, padding, options)
        ctx.save_for_backward(q, k, v, out, lse, *(() if sinks is None else (sinks,)))
        ctx.padding, ctx.options = padding, options
        return out

    @staticmethod
    @once_only
    def backward(ctx, dout):
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        sinks = sinks[0] if sinks else None
        grads = _differentiate_shifted(dout, q, k, v, out, lse, sinks, ctx.padding, ctx.options)
        return (*grads, None, None)


def _gathered(q, k, v, padding, sinks, options):
    """Attention on copies of the keys and queries without padding, in torch's own operations around it."""
    q, k, v, (used_q, used_k), (order, _) = _without_holes(q, k, v, padding)
    used = dict(seqused_q=used_q, seqused_k=used_k)
    out = interface.flash_attn_varlen_func(q, k, v, sinks=sinks, **used, **options)
    return out if order is None else torch.zeros_like(out).scatter(1, _wide(order, out), out)


def _without_holes(q, k, v, padding):
    """q, k and v with what is padding behind the rest, how many are in use, and their order before."""
    orders, used = [], []
    for rows in (padding.queries, padding.keys):
        orders.append(None if rows is None else (~rows).to(torch.int8).argsort(dim=1, stable=True))
        used.append(None if rows is None else rows.sum(1, dtype=torch.int32))
    q = q if orders[0] is None else q.gather(1, _wide(orders[0], q))
    return q, *(x.gather(1, _wide(orders[1], x)) for x in (k, v)), used, orders


def _wide(order, x):
    return order[:, :, None, None].expand(-1, -1, *x.shape[2:])


def gaps_of(keys, window):
    """The rows of the batch with padding between their tokens that are longer than the window: without it the
    window would reach keys that it does not count. None where there can be none."""
    widest = max(window) + 1
    if widest <= 0 or keys.shape[1] <= widest:
        return None
    places = torch.arange(keys.shape[1], device=keys.device)
    length = torch.where(keys, places, -1).amax(1) - torch.where(keys, places, keys.shape[1]).amin(1) + 1
    gaps = (length > keys.sum(1)) & (length > widest)
    return gaps.nonzero().flatten().tolist() or None


def check_window(keys, window):
    """Refuses such rows."""
    gaps = None if is_compiling() else gaps_of(keys, window)
    if gaps:
        raise _core.UnsupportedError(
            f"padding between the tokens of row {gaps[0]} of the batch, in a sliding window of "
            f"{max(window) + 1}: move it to the row's left, or use attn_implementation='sdpa'"
        )


def _packed_extras(starts, facts, sinks):
    count, longest = facts.tolist()
    starts = starts[: count + 1].contiguous()
    bounds = dict(max_seqlen_q=longest, max_seqlen_k=longest)
    return Extras(cu_seqlens_q=starts, cu_seqlens_k=starts, sinks=sinks, **bounds)


# The tensors that say where rows lie: of a `Padding`, then of a `Packed`.
_ROWS = ("keys?", "queries?", "first?", "used_k?", "used_q?", "starts?", "facts?")


def _rows_forward(q, k, v, sinks, keys, queries, first, used_k, used_q, starts, facts, *options):
    options, _ = options_of(options)
    if starts is not None:
        rows = [_end_to_end(x)[0] for x in (q, k, v)]
        out, lse = run_forward(*rows, options, _packed_extras(starts, facts, sinks))
        return out.view(out_shape(q, v)), lse
    padding = Padding(keys, queries, first, used_k, used_q, None)
    if facts is not None and facts.item():
        check_window(keys, options.window)
        q, k, v, used, (order, _) = _without_holes(q, k, v, padding)
        extras = Extras(seqused_q=used[0], seqused_k=used[1], sinks=sinks)
        out, lse = run_forward(rows_of(q), k, v, options, extras)
        return (out if order is None else torch.zeros_like(out).scatter(1, _wide(order, out), out)), lse
    return _run_shifted(q, k, v, sinks, padding, options)


_forward_operator = torch.library.custom_op(
    "fa_attn::rows_forward",
    _rows_forward,
    mutates_args=(),
    schema=schema(tensors("q", "k", "v", "sinks?", *_ROWS), OPTIONS, results=2),
)


def _lse_shape(q, starts):
    batch, rows, heads, _ = q.shape
    return (batch, heads, rows) if starts is None else (heads, batch * rows)


@_forward_operator.register_fake
def _(q, k, v, sinks, keys, queries, first, used_k, used_q, starts, *others):
    return q.new_empty(out_shape(q, v)), q.new_empty(_lse_shape(q, starts), dtype=FLOAT)


def _rows_backward(
    dout, out, lse, q, k, v, sinks, keys, queries, first, used_k, used_q, starts, facts, *options
):
    (options, _), none = options_of(options), q.new_empty((0,), dtype=FLOAT)
    if starts is not None:
        rows = [_end_to_end(x)[0] for x in (q, k, v)]
        extras = _packed_extras(starts, facts, sinks)
        grads = new_gradients(*rows, extras)
        douts = [x.contiguous().view(-1, *x.shape[2:]) for x in (dout, out)]
        dsinks = run_backward(douts[0], *rows, douts[1], lse, grads, options, extras)
        grads = [grad.view(x.shape) for grad, x in zip(grads, (q, k, v))]
    elif facts is not None and facts.item():
        padding = Padding(keys, queries, None, None, None, None)
        *near, used, orders = _without_holes(q, k, v, padding)
        near[0] = rows_of(near[0])
        order = orders[0]
        dout, out = (x if order is None else x.gather(1, _wide(order, x)) for x in (dout, out))
        extras = Extras(seqused_q=used[0], seqused_k=used[1], sinks=sinks)
        made = new_gradients(*near, extras)
        dsinks = run_backward(dout, *near, out, lse, made, options, extras)
        grads = [x.new_zeros(x.shape) for x in (q, k, v)]
        for grad, part, order in zip(grads, made, (orders[0], orders[1], orders[1])):
            grad.copy_(part) if order is None else grad.scatter_(1, _wide(order, part), part)
    else:
        padding = Padding(keys, queries, first, used_k, used_q, None)
        *grads, dsinks = _differentiate_shifted(dout, q, k, v, out, lse, sinks, padding, options)
    return (*grads, none if dsinks is None else dsinks)


_backward_operator = torch.library.custom_op(
    "fa_attn::rows_backward",
    _rows_backward,
    mutates_args=(),
    schema=schema(tensors("dout", "out", "lse", "q", "k", "v", "sinks?", *_ROWS), OPTIONS, results=4),
)


@_backward_operator.register_fake
def _(dout, out, lse, q, k, v, sinks, *others):
    dsinks = q.new_empty((0,) if sinks is None else sinks.shape, dtype=FLOAT)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup(ctx, inputs, output):
    count = 4 + len(_ROWS)
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.options = inputs[count:]


def _differentiate(ctx, dout, dlse):
    out, lse, *inputs = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.fa_attn.rows_backward(dout, out, lse, *inputs, *ctx.options)
    others = len(_ROWS) + len(ctx.options)
    return (dq, dk, dv, None if inputs[3] is None else dsinks, *(None,) * others)


_forward_operator.register_autograd(_differentiate, setup_context=_setup)

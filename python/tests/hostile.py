"""Every argument of every function, given every kind of wrong value: what is refused is refused by an error
of the package."""

import collections
import warnings

import numpy as np

import fa_attn

ERRORS = (fa_attn.InputError, fa_attn.InputTypeError, fa_attn.UnsupportedError, fa_attn.DeviceError)


class Odd:
    """Something that no function knows."""


def values():
    """Wrong values of all kinds; some are right for some arguments."""
    q = np.zeros((2, 4, 4, 8), np.float32)
    yield from (None, True, -3, 5, 10**30, 2.5, float("nan"), "x", b"x", [], [1], (1, 2), {1: 2}, {1})
    yield from (Odd(), Odd, len, 1j, range(3), iter([1, 2]), memoryview(b"ab"), np.float16, np.float32(3))
    yield from (np.int64(2), np.array(3.0), np.array(2, np.int32), np.zeros((0,), np.float32))
    yield from (np.zeros(3, np.int64), q, np.array(["a"]), np.ma.array(q))
    yield from map(q.astype, (np.float64, np.int32, bool, object, ">f4"))
    yield from (q[:0], q[:, :0], q[:, :, :0], q[..., :0], q[:, ::-1], q[..., ::2])
    yield from (q[None, None, None], np.zeros(8, np.int32)[::4], np.array([8, 4, 0], np.int32)[::-1])


def calls(array):
    """Right calls of the functions by their names: (function, arguments), `array` makes arrays of numpy's."""
    rng = np.random.default_rng(0)

    def rows(*shape):
        return array(rng.standard_normal(shape).astype(np.float32))

    def ints(*numbers):
        return array(np.array(numbers, np.int32))

    q, k = rows(2, 4, 4, 8), rows(2, 6, 2, 8)
    packed_q, packed_k, pages = rows(8, 4, 8), rows(12, 2, 8), rows(6, 2, 2, 8)
    table = array(np.arange(6, dtype=np.int32).reshape(2, 3))
    options = dict(softmax_scale=0.5, causal=True, window_size=(2, 2), softcap=1.0, alibi_slopes=rows(4))
    options["deterministic"] = False
    more = dict(dropout_p=0.0, return_attn_probs=False, sinks=rows(4), return_softmax_lse=True, num_splits=1)
    more["query_offset"] = 1
    starts = dict(cu_seqlens_q=ints(0, 4, 8), cu_seqlens_k=ints(0, 6, 12), max_seqlen_q=4, max_seqlen_k=6)
    used = dict(seqused_q=ints(4, 3), seqused_k=ints(5, 6))
    out, lse = fa_attn.flash_attn_func(q, k, k, return_softmax_lse=True)
    packed_out, packed_lse = fa_attn.flash_attn_varlen_func(
        packed_q, packed_k, packed_k, **starts, return_softmax_lse=True
    )
    step = dict(q=rows(2, 1, 4, 8), cache_seqlens=ints(3, 4))
    cache = dict(k_cache=rows(2, 9, 2, 8), v_cache=rows(2, 9, 2, 8))
    turned = dict(rotary_cos=rows(9, 2), rotary_sin=rows(9, 2))
    paged = dict(k_cache=pages, v_cache=rows(6, 2, 2, 8))
    ends = dict(cu_seqlens_q=ints(0, 1, 2), cu_seqlens_k_new=ints(0, 1, 2))
    problem = fa_attn.problem(2, 4, heads=4, head_dim=8, dtype="f32")
    planned = fa_attn.problem(2, 64, heads=4, head_dim=64)
    kernels = fa_attn.Kernels(problem)
    bound = dict(q=rows(2, 4, 4, 8), k=rows(2, 4, 4, 8), v=rows(2, 4, 4, 8))
    results = dict(dout=rows(2, 4, 4, 8), out=rows(2, 4, 4, 8), lse=rows(2, 4, 4))
    of = fa_attn
    return {
        "func": (
            of.flash_attn_func,
            dict(q=q, k=k, v=k, out=rows(2, 4, 4, 8), pack_gqa=True, **options, **more),
        ),
        "kvpacked": (of.flash_attn_kvpacked_func, dict(q=q, kv=rows(2, 6, 2, 2, 8), **options, **more)),
        "qkvpacked": (of.flash_attn_qkvpacked_func, dict(qkv=rows(2, 6, 3, 4, 8), **options, **more)),
        "varlen": (
            of.flash_attn_varlen_func,
            dict(q=packed_q, k=packed_k, v=packed_k, out=rows(8, 4, 8), **starts, **used, **options, **more),
        ),
        "varlen in pages": (
            of.flash_attn_varlen_func,
            dict(q=q, k=pages, v=pages, seqused_k=ints(5, 6), block_table=table, **options),
        ),
        "varlen kvpacked": (
            of.flash_attn_varlen_kvpacked_func,
            dict(q=packed_q, kv=rows(12, 2, 2, 8), **starts, **options, **more),
        ),
        "varlen qkvpacked": (
            of.flash_attn_varlen_qkvpacked_func,
            dict(qkv=rows(12, 3, 4, 8), cu_seqlens=ints(0, 6, 12), max_seqlen=6, **options, **more),
        ),
        "backward": (
            of.flash_attn_backward,
            dict(dout=out, q=q, k=k, v=k, out=out, softmax_lse=lse, sinks=rows(4), dlse=lse, **options),
        ),
        "varlen backward": (
            of.flash_attn_varlen_backward,
            dict(
                dict(dout=packed_out, q=packed_q, k=packed_k, v=packed_k, out=packed_out),
                **dict(softmax_lse=packed_lse, sinks=rows(4), dlse=packed_lse),
                **starts,
                **used,
                **options,
            ),
        ),
        "cache": (
            of.flash_attn_with_kvcache,
            dict(
                dict(step, k=rows(2, 1, 2, 8), v=rows(2, 1, 2, 8), cache_batch_idx=ints(0, 1)),
                **dict(cache_leftpad=ints(1, 0), rotary_interleaved=True, num_splits=0, out=rows(2, 1, 4, 8)),
                **dict(return_softmax_lse=True, sinks=rows(4), softmax_scale=0.5, causal=True),
                **dict(window_size=(2, 2), softcap=1.0, alibi_slopes=rows(4), max_seqlen_q=1),
                **cache,
                **turned,
            ),
        ),
        "cache in pages": (
            of.flash_attn_with_kvcache,
            dict(
                dict(q=rows(2, 4, 8), k=rows(2, 2, 8), v=rows(2, 2, 8), cache_seqlens=ints(3, 4)),
                **dict(block_table=table, max_seqlen_q=1, rotary_seqlens=None, scheduler_metadata=None),
                **ends,
                **paged,
                **turned,
            ),
        ),
        "cache that is read": (of.flash_attn_with_kvcache, dict(step, cache_seqlens=3, **cache)),
        "pages with padding": (
            of.flash_attn_with_kvcache,
            dict(step, cache_leftpad=ints(1, 0), page_table=table, cache_batch_idx=ints(1, 0), **paged),
        ),
        "metadata": (
            of.get_scheduler_metadata,
            dict(
                dict(batch_size=2, max_seqlen_q=1, max_seqlen_k=9, num_heads_q=4, num_heads_kv=2, headdim=8),
                **dict(cache_seqlens=ints(3, 4), qkv_dtype=None, headdim_v=8, cache_leftpad=ints(0, 0)),
                **dict(page_size=2, max_seqlen_k_new=0, causal=True, window_size=(2, 2), attention_chunk=0),
                **dict(has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0),
                **ends,
            ),
        ),
        "merge": (of.merge, dict(outs=[out, out], lses=[lse, lse], sinks=rows(4), dtype=q.dtype)),
        "combine": (
            of.flash_attn_combine,
            dict(
                dict(out_partial=rows(3, 2, 4, 4, 8), lse_partial=rows(3, 2, 4, 4), out=rows(2, 4, 4, 8)),
                **dict(out_dtype=None, cu_seqlens=ints(0, 1), seqused=ints(0), virtual_batch_idx=ints(0)),
                return_lse=True,
            ),
        ),
        "problem": (
            of.problem,
            dict(
                dict(batch=2, seqlen=4, heads=4, head_dim=8, seqlen_q=4, seqlen_k=4, heads_kv=2),
                **dict(head_dim_v=8, dtype="bf16", causal=True, window_size=(1, 1), softmax_scale=0.5),
                **dict(softcap=1.0, alibi="per_head", sinks=True, total_q=8, total_k=8, page=None, pages=None),
                **dict(used_q=True, used_k=True),
            ),
        ),
        "plan": (
            of.plan,
            dict(problem=planned, arch="sm90", mode="fwd", deterministic=False, family=None, limit=1),
        ),
        "explain": (
            of.explain,
            dict(problem=planned, query="tile_n=64", arch="sm90", mode="fwd", deterministic=False, family=None),
        ),
        "Kernels": (of.Kernels, dict(problem=problem, device="cpu", deterministic=False, backward=True)),
        "Kernels forward": (kernels.forward, bound),
        "Kernels backward": (kernels.backward, dict(**results, **bound)),
        "tune": (of.tune, dict(mode="off", candidates=4, budget=3.0)),
    }


def attack(name, array, more=()):
    """Calls a function with each of its arguments wrong in turn, and with one that it does not know."""
    function, arguments = calls(array)[name]
    function(**arguments)
    raised = collections.Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for argument in arguments:
            for value in (*values(), *more):
                try:
                    function(**{**arguments, argument: value})
                except ERRORS:
                    pass
                except Exception as error:
                    wrong = type(value).__name__, type(error).__name__, str(error)[:80]
                    raised[(argument, *wrong)] += 1
    assert not raised, "\n".join(map(str, raised))
    try:
        function(**arguments, casual=True)
    except TypeError as error:
        assert "casual" in str(error)
    else:
        raise AssertionError("an unknown argument is ignored")

"""The peers: what each of them computes, how it is called, and which are installed."""

import importlib.metadata

from .report import Refused


def stores(request):
    """How queries and keys lie: (padded, packed or paged; None where they are plain tensors), each."""
    sequences = request.get("sequences") or {}
    return tuple((sequences.get(side) or {}).get("store") for side in ("q", "k"))


class Sdpa:
    """torch's scaled_dot_product_attention, kept to one backend."""

    def __init__(self, torch, backend_name):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch = torch
        self.backend = getattr(SDPBackend, backend_name)
        self.sdpa_kernel = sdpa_kernel

    def refuse(self, request):
        if request.get("deterministic"):
            raise Refused("torch's fused kernels are not asked for the same bits in every run here")
        if request.get("window") or request.get("softcap"):
            raise Refused("torch's fused kernels take no window and no soft cap")
        if request.get("sinks") or request.get("alibi"):
            raise Refused("torch's fused kernels take no sinks and no slopes")
        if request.get("sequences"):
            raise Refused("torch's fused kernels take neither packed sequences nor pages nor lengths in use")
        if request["causal"] and request["seqlen_q"] not in (1, request["seqlen_k"]):
            raise Refused("torch aligns a causal mask top-left; seqlen_q must be seqlen_k (or 1)")

    def __call__(self, tensors, request):
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        # One query at the bottom right sees every key; torch's top-left mask would leave it only the first.
        causal = request["causal"] and q.shape[1] > 1
        grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        with self.sdpa_kernel(self.backend):
            attention = self.torch.nn.functional.scaled_dot_product_attention
            out = attention(*heads_first, is_causal=causal, **grouped)
        return out.transpose(1, 2)


class Package:
    """A package's functions: BSHD in and out, causal aligned bottom-right; by name flash_attn_func and, where
    it has them, flash_attn_varlen_func and flash_attn_with_kvcache."""

    def __init__(self, module, open_side, forward_only=False, dtypes=("bf16", "f16"), sinks=False):
        self.dense = module.flash_attn_func
        self.varlen = getattr(module, "flash_attn_varlen_func", None)
        self.kvcache = getattr(module, "flash_attn_with_kvcache", None)
        self.open_side = open_side
        self.forward_only = forward_only
        self.dtypes = dtypes
        self.sinks = sinks

    def refuse(self, request):
        if request["mode"] == "bwd" and self.forward_only:
            raise Refused("this build has the forward only")
        if request["dtype"] not in self.dtypes:
            raise Refused(f"this build does not take {request['dtype']}, only {', '.join(self.dtypes)}")
        if request.get("sinks") and not self.sinks:
            raise Refused("this build takes no sinks")
        if request.get("alibi"):
            raise Refused("this build takes no ALiBi slopes")
        q, k = stores(request)
        if q or k:
            if not (self.varlen or self.kvcache):
                raise Refused("this build takes neither packed sequences nor pages nor lengths in use")
            if "packed" in (q, k) and not self.varlen:
                raise Refused("this build takes no packed sequences")
            if k == "packed" and q != "packed" or q == "paged":
                raise Refused("this build takes packed keys with packed queries only")

    def options(self, request):
        options = {"causal": request["causal"]}
        if request.get("window"):
            sides = request["window"]
            options["window_size"] = tuple(self.open_side if side is None else side for side in sides)
        if request.get("softcap"):
            options["softcap"] = request["softcap"]
        if request.get("deterministic"):
            options["deterministic"] = True
        return options

    def __call__(self, tensors, request):
        options = self.options(request)
        if request.get("sinks"):
            options["learnable_sink"] = tensors["sinks"]
        q, k = stores(request)
        # What a build calls decoding splits the keys; its other functions do not.
        is_cache = request["mode"] == "fwd" and self.kvcache and k != "packed"
        looks_back = request["causal"] or (request.get("window") or [None, None])[1] == 0
        on_cache = looks_back and request["seqlen_q"] < request["seqlen_k"]
        decodes = is_cache and (k or request.get("graph") or on_cache)
        if decodes and not request.get("sinks"):
            if k:
                options["cache_seqlens"] = tensors["used_k"]
            if k == "paged":
                options["page_table"] = tensors["table"]
            if q == "packed":
                options.update(cu_seqlens_q=tensors["cu_q"], max_seqlen_q=request["seqlen_q"])
            out = self.kvcache(tensors["q"], tensors["k"], tensors["v"], **options)
        elif q or k:
            lengths = {
                "cu_q": "cu_seqlens_q",
                "cu_k": "cu_seqlens_k",
                "used_q": "seqused_q",
                "used_k": "seqused_k",
                "table": "page_table",
            }
            given = {name: tensors[own] for own, name in lengths.items() if own in tensors}
            if q == "packed":
                given["max_seqlen_q"] = request["seqlen_q"]
            if k == "packed" or q == "packed":
                given["max_seqlen_k"] = request["seqlen_k"]
            out = self.varlen(tensors["q"], tensors["k"], tensors["v"], **given, **options)
        else:
            out = self.dense(tensors["q"], tensors["k"], tensors["v"], **options)
        # Some versions return (out, lse).
        return out[0] if isinstance(out, (tuple, list)) else out


class FlashInfer:
    """FlashInfer's wrappers for keys in pages, which plan a request's work before its calls."""

    # Of its own: partial results and plans.
    WORKSPACE = 256 << 20

    def __init__(self, torch):
        import flashinfer

        self.torch = torch
        self.wrappers = flashinfer
        self.workspace = torch.empty(self.WORKSPACE, dtype=torch.uint8, device="cuda")
        self.request = self.wrapper = None

    def refuse(self, request):
        if request["mode"] == "bwd":
            raise Refused("FlashInfer has the forward only")
        if request.get("sinks") or request.get("alibi") or request.get("deterministic"):
            raise Refused("FlashInfer is asked for no sinks, no slopes and no equal bits here")
        if stores(request)[1] != "paged":
            raise Refused("FlashInfer is asked for keys in pages only")
        if request["head_dim"] != request["head_dim_v"]:
            raise Refused("FlashInfer is asked for K and V of one head dim only")
        queries = request["sequences"]["q"]
        if queries["store"] == "padded" and any(own != request["seqlen_q"] for own in queries["lens"]):
            raise Refused("FlashInfer takes no queries that are used in part")
        if (request.get("window") or [None, 0])[1] != 0:
            raise Refused("FlashInfer's windows end at the diagonal")

    def plan(self, tensors, request):
        """The wrapper of a request: planned at its first call, for all input sets, whose pages are the same."""
        torch, queries, keys = self.torch, request["sequences"]["q"], request["sequences"]["k"]
        page, table = keys["page"], tensors["table"].cpu()
        pages = [-(-own // page) for own in keys["lens"]]

        def starts(lens):
            return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)

        rows = [table[row, :count] for row, count in enumerate(pages)]
        last = [own - max(count - 1, 0) * page for own, count in zip(keys["lens"], pages, strict=True)]
        of_keys = (starts(pages), torch.cat(rows), torch.tensor(last, dtype=torch.int32))
        heads = (request["heads_q"], request["heads_kv"], request["head_dim"], page)
        dtype = tensors["q"].dtype
        options = dict(q_data_type=dtype, kv_data_type=dtype, logits_soft_cap=request.get("softcap"))
        if request.get("window"):
            left = request["window"][0]
            options["window_left"] = -1 if left is None else left
        if all(own == 1 for own in queries["lens"]):
            # As its documentation advises for groups of four heads and more.
            grouped = request["heads_q"] >= 4 * request["heads_kv"]
            wrapper = self.wrappers.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=grouped
            )
            wrapper.plan(*(own.cuda() for own in of_keys), *heads, **options)
        else:
            wrapper = self.wrappers.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            causal = request["causal"] or bool(request.get("window"))
            of_all = (starts(queries["lens"]), *of_keys)
            wrapper.plan(*(own.cuda() for own in of_all), *heads, causal=causal, **options)
        return wrapper

    def __call__(self, tensors, request):
        if self.request is not request:
            self.request, self.wrapper = request, self.plan(tensors, request)
        q = tensors["q"]
        out = self.wrapper.run(q.reshape(-1, *q.shape[-2:]), (tensors["k"], tensors["v"]))
        return out.view(q.shape)


def load_fa3(_torch):
    try:
        # Importing the module registers its operators; the wheel is built without the backward and f16.
        import fa3_fwd_interface

        return Package(fa3_fwd_interface, open_side=-1, forward_only=True, dtypes=("bf16",))
    except ImportError as wheel_error:
        try:
            import flash_attn_interface
        except ImportError as error:
            raise ImportError(f"{wheel_error}; {error}") from error
        return Package(flash_attn_interface, open_side=-1)


def load_fa4(_torch):
    import flash_attn.cute

    return Package(flash_attn.cute, open_side=None, sinks=True)


LOADERS = {
    "fa2": lambda torch: Sdpa(torch, "FLASH_ATTENTION"),
    "cudnn": lambda torch: Sdpa(torch, "CUDNN_ATTENTION"),
    "fa3": load_fa3,
    "fa4": load_fa4,
    "flashinfer": FlashInfer,
}


# What the packages are called, of which one is installed.
_PACKAGES = {
    "fa3": ("fa3-fwd", "flash-attn-3"),
    "fa4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
}


def versions(torch):
    """What each peer is, as far as it says: torch's own backends, cuDNN, and the packages of the others."""
    found = {"fa2": f"torch {torch.__version__}"}
    cudnn = torch.backends.cudnn.version()
    if cudnn:
        found["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                found[name] = f"{package} {importlib.metadata.version(package)}"
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found

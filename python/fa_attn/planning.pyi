from typing import Any, Dict, List, Optional, Tuple, Union

from .interface import Array, Window

Problem = Dict[str, Any]

def problem(
    batch: int = 1,
    seqlen: Union[int, str, None] = None,
    heads: Union[int, str] = 1,
    head_dim: Union[int, str] = 64,
    *,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
    heads_kv: Optional[int] = None,
    head_dim_v: Optional[int] = None,
    dtype: Any = "bf16",
    causal: bool = False,
    window_size: Window = (-1, -1),
    softmax_scale: Optional[float] = None,
    softcap: float = 0.0,
    alibi: Optional[str] = None,
    sinks: bool = False,
    total_q: Optional[int] = None,
    total_k: Optional[int] = None,
    page: Optional[int] = None,
    pages: Optional[int] = None,
    used_q: bool = False,
    used_k: bool = False,
) -> Problem: ...
def plan(
    given: Problem,
    arch: str = "sm90",
    mode: str = "fwd",
    deterministic: bool = False,
    family: Optional[str] = None,
    limit: Optional[int] = None,
) -> Dict[str, Any]: ...
def explain(
    given: Problem,
    query: str,
    arch: str = "sm90",
    mode: str = "fwd",
    deterministic: bool = False,
    family: Optional[str] = None,
) -> Dict[str, Any]: ...
def tune(mode: str = "auto", *, candidates: int = 4, budget: float = 5.0) -> None: ...
def finish_tuning() -> List[Dict[str, Any]]: ...

class Kernels:
    problem: Problem
    device: str
    deterministic: bool
    report: Dict[str, Dict[str, Any]]
    def __init__(
        self,
        given: Problem,
        device: str = "cpu",
        deterministic: bool = False,
        backward: Optional[bool] = None,
    ) -> None: ...
    def forward(self, q: Array, k: Array, v: Array, **beside: Array) -> Tuple[Array, Array]: ...
    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, **beside: Array
    ) -> Tuple[Array, ...]: ...

"""The extension module, which the package's Python code calls. Only its exceptions are for users."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ._options import CallOptions, Extras
from ._schedules import SchedulerMetadata

class InputError(ValueError):
    """Arrays or options that contradict each other."""

class InputTypeError(InputError, TypeError):
    """A value whose type its argument does not take."""

class UnsupportedError(ValueError):
    """Something that no kernel computes; the message says what would work."""

class DeviceError(RuntimeError):
    """A failure of the GPU, its driver or the compiler."""

BESIDE: Tuple[str, ...]
"""Names of the arguments besides Q, K and V in errors, in the order of `Extras`."""
LATENT_ROWS: List[Tuple[int, Tuple[int, int, int, int]]]
"""Packed rows of latents by their bytes: columns, codes among them, columns that share a scale, its bytes."""

Division = Tuple[Optional[int], Optional[bool]]
Programs = Tuple[Sequence[str], Sequence[Tuple[str, Any]], Sequence[Tuple[str, float]]]
# A number of bytes, whether they are zero, and the GPU.
Allocate = Callable[[int, bool, int], Any]

def version() -> str: ...
def program(text: str) -> str: ...
def program_direct(text: str) -> Optional[str]: ...
def program_nodes(text: str) -> str: ...
def program_with(first: str, second: str) -> str: ...
def dropout_bits(
    bits: Any, state: Any, numbers: Optional[Tuple[int, int, int]], stream: Optional[int] = None
) -> None: ...
def program_tiles(
    text: str,
    arrays: Sequence[Tuple[bytes, Sequence[int]]],
    scalars: Sequence[float],
    sizes: Tuple[int, int],
    lengths: Tuple[int, int],
    block: Tuple[int, int],
) -> bytes: ...
def program_eval(
    text: str,
    arrays: Sequence[Tuple[bytes, Sequence[int]]],
    scalars: Sequence[float],
    points: Sequence[Tuple[float, Sequence[int]]],
) -> List[Tuple[bool, float, float]]: ...
def problem(json: str) -> str: ...
def spec_name(json: str) -> str: ...
def doctor() -> str: ...
def xla_handlers() -> Tuple[int, int]: ...
def chunks(layout: str, world: int) -> List[List[int]]: ...
def bounds(layout: str, world: int, rows: int) -> List[int]: ...
def needs(json: str) -> List[str]: ...
def bind(problem: str, backward: bool, deterministic: bool, device: Optional[int] = None) -> str: ...
def plan(
    problem: str,
    arch: str,
    family: Optional[str],
    forward: bool,
    backward: bool,
    deterministic: bool,
    limit: Optional[int] = None,
) -> str: ...
def explain(
    problem: str,
    query: str,
    arch: str,
    family: Optional[str],
    forward: bool,
    backward: bool,
    deterministic: bool,
) -> str: ...
def tune(candidates: Optional[int] = None, budget: float = 0.0) -> None: ...
def finish_tuning() -> str: ...
def forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Optional[Any],
    options: CallOptions,
    extras: Optional[Extras] = None,
    stream: Optional[int] = None,
    allocate: Optional[Allocate] = None,
    plans: Optional[Dict[Tuple[int, int], Any]] = None,
    division: Optional[Division] = None,
    programs: Optional[Programs] = None,
) -> None: ...
class Plain:
    """The short way of calls on torch's tensors."""

    def __init__(
        self,
        types: Tuple[Any, Any],
        keywords: Dict[str, Any],
        new: Tuple[Callable[..., Any], ...],
        floats: Callable[[Any], Any],
        is_grad_enabled: Callable[[], bool],
    ) -> None: ...
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        numbers: Tuple[Any, ...],
        results: Tuple[Any, ...],
        slopes: Any,
        unasked: Tuple[Any, ...],
        keywords: Dict[str, Any],
        dropout_p: Any,
        lengths: Optional[Tuple[Any, ...]],
        num_splits: Any,
        is_cache: bool,
        metadata: Optional[SchedulerMetadata],
        stream: Optional[int],
        allocate: Allocate,
    ) -> Any: ...

def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dsinks: Any,
    options: CallOptions,
    extras: Optional[Extras] = None,
    stream: Optional[int] = None,
    allocate: Optional[Allocate] = None,
    dlse: Any = None,
    programs: Optional[Programs] = None,
    gradients: Optional[Sequence[Tuple[str, Any]]] = None,
) -> None: ...
def report(
    q: Any,
    k: Any,
    v: Any,
    options: CallOptions,
    extras: Optional[Extras] = None,
    backward: bool = False,
    division: Optional[Division] = None,
    programs: Optional[Programs] = None,
) -> str: ...
def check_forward(
    q: Any,
    k: Any,
    v: Any,
    options: CallOptions,
    extras: Optional[Extras] = None,
    stream: Optional[int] = None,
    programs: Optional[Programs] = None,
) -> None: ...
def append(*arguments: Any) -> int: ...
def merge(
    outs: Sequence[Any],
    lses: Sequence[Any],
    out: Any,
    lse: Any,
    sinks: Any = None,
    stream: Optional[int] = None,
) -> None: ...

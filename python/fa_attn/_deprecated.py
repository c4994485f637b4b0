"""Former names of arguments, which work for one release."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any, Callable, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[F], F]:
    """The function with arguments under former names, `renamed(former="name")`."""

    def decorated(function: F) -> F:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            for former, name in names.items():
                if former in named:
                    warnings.warn(f"{former} is now {name}", DeprecationWarning, stacklevel=2)
                    named[name] = named.pop(former)
            return function(*arguments, **named)

        return cast(F, call)

    return decorated

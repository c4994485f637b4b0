"""Problems and plans for people: short texts, and pages that need nothing beside them."""

from __future__ import annotations

from html import escape
from typing import Any, Iterable, List, Mapping, Sequence

_STYLE = """
.fa { font: 14px/1.45 system-ui, sans-serif; max-width: 72rem; }
.fa table { border-collapse: collapse; margin: .4rem 0 1rem; }
.fa th, .fa td { padding: .15rem .7rem .15rem 0; text-align: right; white-space: nowrap; }
.fa th:first-child, .fa td:first-child, .fa td.text { text-align: left; }
.fa th { font-weight: 600; border-bottom: 1px solid #8888; }
.fa .bar { display: inline-block; height: .7em; background: #4a7fb5; vertical-align: middle; }
.fa code { font-size: 12px; }
.fa p.note { color: #777; }
"""

_PLANS_SHOWN = 10
_BAR = 120


def problem_text(problem: Mapping[str, Any]) -> str:
    """A problem in one line."""
    heads = _pair(problem["heads_q"], problem["heads_kv"], ":")
    dim = _pair(problem["head_dim"], problem["head_dim_v"], ":")
    rows = _pair(problem["seqlen_q"], problem["seqlen_k"], "x")
    words = [f"batch {problem['batch']}", f"seqlen {rows}", f"heads {heads}", f"head dim {dim}"]
    words += [problem["dtype"], mask_text(problem["mask"])]
    if problem.get("kv_dtype"):
        words.append(f"k and v in {problem['kv_dtype']}")
    if problem.get("out_dtype"):
        words.append(f"out in {problem['out_dtype']}")
    words += [
        f"{side}'s descale per {problem[f'{side}_descale']}"
        for side in ("q", "k", "v")
        if problem.get(f"{side}_descale")
    ]
    if problem.get("page") is not None:
        words.append(f"{problem['pages']} pages of {problem['page']}")
    words += [
        f"{name} {problem[name]}"
        for name in ("total_q", "total_k", "softmax_scale", "softcap")
        if problem.get(name)
    ]
    words += [name for name in ("used_q", "used_k", "alibi", "sinks", "latent") if problem.get(name)]
    return ", ".join(words)


def mask_text(mask: Mapping[str, Any]) -> str:
    left, right = mask["left"], mask["right"]
    if left is None and right is None:
        return "full"
    sides = ["all" if side is None else str(side) for side in (left, right)]
    is_causal = left is None and right == 0
    text = "causal" if is_causal else f"window {sides[0]} left, {sides[1]} right"
    offset = mask.get("offset", 0)
    return f"{text} at offset {offset}" if offset else text


def _pair(one: int, other: int, between: str) -> str:
    return str(one) if one == other else f"{one}{between}{other}"


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan in a line for each pass."""
    lines = [f"{plan['arch']} ({plan['board']}): {problem_text(plan['problem'])}"]
    for name, found in passes(plan):
        best = found["plans"][0] if found["plans"] else None
        text = f"{name}: {found['fit']} of {found['tried']} kernels fit"
        if best is not None:
            cost = best["cost"]
            text += f"; best {best['spec'].name}, {_time(cost['seconds'])} predicted"
            text += f", {cost['tflops']:.0f} TFLOP/s"
            text += f", bound by {cost['bottleneck']}"
        lines.append(text)
    return "\n".join(lines)


def passes(plan: Mapping[str, Any]) -> List[Any]:
    return [(name, plan[name]) for name in ("forward", "backward") if plan.get(name)]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def problem_html(problem: Mapping[str, Any]) -> str:
    """A problem as a table of its fields."""
    fields = {name: value for name, value in problem.items() if value not in (None, False)}
    fields["mask"] = mask_text(problem["mask"])
    rows = ((escape(name), escape(str(value))) for name, value in fields.items())
    return _fragment(_table(("problem", ""), rows))


def plan_html(plan: Mapping[str, Any]) -> str:
    """A plan's kernels with what limits each, and what was rejected."""
    parts = [
        f"<p><b>{escape(plan['arch'])}</b>, {escape(plan['board'])}: "
        f"{escape(problem_text(plan['problem']))}</p>"
    ]
    if plan.get("never_run"):
        parts.append(f"<p class=note>{escape(str(plan['never_run']))}</p>")
    for name, found in passes(plan):
        parts.append(f"<h3>{name}: {found['fit']} of {found['tried']} kernels fit</h3>")
        shown = found["plans"][:_PLANS_SHOWN]
        slowest = max((each["cost"]["seconds"] for each in shown), default=1.0)
        parts.append(_table(_PLAN_HEAD, (_plan_row(at, each, slowest) for at, each in enumerate(shown, 1))))
        if shown:
            terms = shown[0]["cost"]["terms"]
            top = max(terms.values()) or 1.0
            rows = ((escape(term), _time(value), _bar(value / top)) for term, value in terms.items())
            parts.append("<p>Where the time of the best goes, each part by itself:</p>")
            parts.append(_table(("part", "time", ""), rows))
        if found["rejected"]:
            rows = (
                (
                    escape(each["limit"]),
                    str(each["count"]),
                    f"<code>{escape(str(each['nearest']))}</code>",
                    escape(_need(each)),
                )
                for each in found["rejected"]
            )
            parts.append("<p>Rejected, with the nearest miss of each limit:</p>")
            parts.append(_table(("limit", "kernels", "nearest", "need, have"), rows))
    parts.append("<p class=note>Times are the planner's predictions.</p>")
    return _fragment("".join(parts))


_PLAN_HEAD = ("kernel", "time", "", "TFLOP/s", "bound by", "shared memory", "registers", "threads", "splits")


def _plan_row(at: int, plan: Mapping[str, Any], slowest: float) -> List[str]:
    cost = plan["cost"]
    return [
        f"{at}. <code>{escape(plan['spec'].name)}</code>",
        _time(cost["seconds"]),
        _bar(cost["seconds"] / slowest),
        f"{cost['tflops']:.0f}",
        escape(cost["bottleneck"]),
        f"{plan['smem']['total'] / 1024:.1f} KiB",
        f"{plan['regs']['total']} of {plan['regs']['limit']}",
        str(plan["threads"]),
        str(cost["splits"]),
    ]


def _need(rejected: Mapping[str, Any]) -> str:
    reason = rejected.get("reason")
    values = next(iter(reason.values()), None) if isinstance(reason, Mapping) else None
    if isinstance(values, Mapping) and {"need", "have"} <= values.keys():
        return f"{values['need']}, {values['have']}"
    return ""


def _bar(part: float) -> str:
    return f'<span class=bar style="width:{max(1, round(_BAR * part))}px"></span>'


def _fragment(body: str) -> str:
    return f"<div class=fa><style>{_STYLE}</style>{body}</div>"


def page(title: str, fragments: Iterable[str]) -> str:
    """A page of its own from the parts that notebooks show."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    return f"{head}<body><h1>{escape(title)}</h1>{''.join(fragments)}</body></html>\n"

"""The page of a report as one HTML file: tables, figures and their style; no script, nothing to load."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nestling.cost import GIB, Cost
from nestling.nest import Nest
from nestling.report.drawing import DPI, Look
from nestling.report.findings import WHEN, Found
from nestling.text import percent

NONE = "\u2013"  # a cell for what was not measured
STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2126; --muted: #5f6771; --faint: #dde1e6;
  --wash: #f5f6f8; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #171a1f; --ink: #e8eaed; --muted: #a0a8b1; --faint: #363c44; --wash: #1f2329; }
  .chip { background: var(--dark) !important; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 0 0 .6rem; }
section { margin: 2.5rem 0 0; }
p { color: var(--muted); font-size: .875rem; margin: .5rem 0 0; max-width: 44rem; }
.facts { display: flex; flex-wrap: wrap; gap: .75rem 2.25rem; list-style: none; margin: 0; padding: 0;
  color: var(--muted); font-size: .875rem; }
.facts li { max-width: 15rem; }
.facts b { display: block; color: var(--ink); font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.pictures { columns: 2; column-gap: 2.5rem; margin: 2.5rem 0 0; }
figure { margin: 0 0 2.5rem; break-inside: avoid; max-width: 538px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: .875rem; margin-top: .5rem; }
.scroll + .scroll { margin-top: 1rem; }
.scroll { overflow-x: auto; border: 1px solid var(--faint); border-radius: 6px; max-width: max-content; }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { font-weight: 600; }
thead th { background: var(--wash); color: var(--muted); font-weight: 500; white-space: normal; min-width: 5rem;
  vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--faint); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th:first-child { background: var(--wash); }
small { color: var(--muted); font-size: .8125rem; }
td small + small { display: block; }
.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
.settings thead th { text-align: left; }
.settings tbody th { font-weight: 400; white-space: normal; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .8125rem; overflow-wrap: anywhere; }
.chip { display: inline-block; width: .7rem; height: .7rem; margin-right: .45rem; border-radius: 2px;
  background: var(--light); -webkit-print-color-adjust: exact; print-color-adjust: exact; }
.missing { margin: 0; padding-left: 1.2rem; color: var(--muted); font-size: .875rem; }
@media (max-width: 900px) {
  .pictures { columns: 1; }
  figure { max-width: 640px; }
}
@media (max-width: 480px) {
  body { padding: 1.25rem 1rem 3rem; }
  h1 { font-size: 1.4rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  .scroll { overflow: visible; border: 0; max-width: none; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .35rem; white-space: normal; min-width: 0 !important; }
  section, tr { break-inside: avoid; }
}
"""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of the page."""

    name: str
    title: str
    caption: str
    draw: Callable[[Look], Any]


def page(found: Found, pictures: Mapping[str, str], light: Look, dark: Look) -> str:
    """The whole page."""
    nest, members = found.nest, found.members
    kind = escape(nest.layout.arch.model_type)
    title = f"A nest of {len(members)} {kind} models" if len(members) > 1 else f"A {kind} model"
    one = found.costs[members[0].name]
    total = sum(cost.bytes["bf16"] for cost in found.costs.values())
    facts = {"parameters in all": f"{one.parameters:,}", "active for each token": f"{one.active_parameters:,}"}
    if len(members) > 1:
        least = found.costs[members[-1].name].active_parameters / one.active_parameters
        facts["active in the smallest member"] = percent(least)
        facts[f"in bf16, instead of {bytes_text(total)} for {len(members)} checkpoints"] = bytes_text(one.bytes["bf16"])
    if nest.recipe.get("tokens"):
        facts["tokens of training"] = f"{nest.recipe['tokens']:,}"
    heads = {m.name: _name(m.name, light, dark) for m in members}
    parts = [
        f"<header><h1>{title}</h1><ul class=facts>",
        *(f"<li><b>{value}</b> {escape(what)}</li>" for what, value in facts.items()),
        "</ul></header>",
        _section("Members", _members_table(found, heads) + _quality_table(found, heads)),
        '<div class="pictures">', *pictures.values(), "</div>",
        _section("Sizes", _sizes_table(found, heads)),
        _section("Memory", _memory_table(found, heads)),
        _section("Everything that was measured", _results_table(found, heads)),
        _section("Settings", _settings_table(nest)),
    ]  # fmt: skip
    if found.missing:
        lines = "".join(f"<li>{_with_code(line)}</li>" for line in found.missing)
        parts.append(_section("Not in this nest", f"<ul class=missing>{lines}</ul>"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n'
        "<body>\n" + "\n".join(part for part in parts if part) + "\n</body>\n</html>\n"
    )


def picture(drawing: Drawing, light: bytes, dark: bytes) -> str:
    """A figure with its caption; the browser takes the dark one on a dark screen."""
    width, height = (round(n * 96 / DPI) for n in struct.unpack(">II", light[16:24]))
    first, second = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (light, dark))
    told = escape(f"{drawing.title}: {drawing.caption}")
    return (
        f'<figure id="{drawing.name}"><h2>{drawing.title}</h2><picture>'
        f'<source media="screen and (prefers-color-scheme: dark)" srcset="{second}">'
        f'<img src="{first}" width="{width}" height="{height}" alt="{told}">'
        f"</picture><figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )


def _members_table(found: Found, heads: Mapping[str, str]) -> str:
    """What the members cost."""
    full = found.costs[found.members[0].name]
    rows = []
    for member in found.members:
        cost = found.costs[member.name]
        row = [heads[member.name], escape(member.budget) or NONE, f"{cost.parameters:,}", f"{cost.active_parameters:,}"]
        row += [percent(cost.active_parameters / full.active_parameters)]
        rows.append([*row, bytes_text(cost.bytes["bf16"]), bytes_text(_caches(cost))])
    columns = ["budget", "parameters", "active parameters", "share active", "weights in bf16", "caches of 1,000 tokens"]
    return _table(["member", *columns], rows)


def _quality_table(found: Found, heads: Mapping[str, str]) -> str:
    """What the members can do: cut at random, cut by score, trained."""
    results = [m.results for m in found.members]
    sources = sorted({s for r in results for end in WHEN for s in r.get(f"perplexity{end}", {})})
    spoken: dict[tuple[str, ...], str] = {("accuracy",): "solved", ("kl",): "KL, nats a token"}
    spoken |= {("perplexity", source): f"perplexity on {source}" for source in sources}
    measured = [
        (key, end) for key in spoken for end in WHEN if any(_dig(r, key, end) is not None for r in results)
    ]  # fmt: skip
    if not measured:
        return ""
    rows = [
        [heads[m.name], *(_value(key[0], _dig(m.results, key, end)) for key, end in measured)] for m in found.members
    ]
    return _table(["member", *(escape(f"{spoken[key]}, {WHEN[end]}") for key, end in measured)], rows)


def _sizes_table(found: Found, heads: Mapping[str, str]) -> str:
    """Sizes with their share of the full size and, where units were scored, the share of the scores that is kept."""
    nest = found.nest
    axes = list(nest.layout.elastic())
    rows = []
    for member in found.members:
        row = [heads[member.name]]
        for axis in axes:
            n, full = nest.sizes(member)[axis], nest.layout.sizes[axis]
            kept = ""
            if axis in found.scores:
                lines = found.scores[axis]
                share = float((lines[:, :n].sum(-1) / lines.sum(-1)).mean())
                kept = f"<small>score {percent(share)}</small>"
            row.append(f"{n:,} <small>of {full:,}</small>{kept}")
        rows.append(row)
    told = (
        ""
        if not found.scores
        else "<p>Below a size: the share of the units' scores that it keeps, mean over layers.</p>"
    )
    orders = [
        f"<p>Member {heads[m.name]} runs layers {', '.join(map(str, nest.layers(m)))}.</p>"
        for m in found.members
        if "layer" in m.sizes
    ]
    return _table(["member", *(f"{escape(axis)}" for axis in axes)], rows) + told + "".join(orders)


def _memory_table(found: Found, heads: Mapping[str, str]) -> str:
    costs = [found.costs[m.name] for m in found.members]
    columns: dict[str, Callable[[Cost], int]] = {
        f"weights, {name}": lambda cost, name=name: cost.bytes[name] for name in costs[0].bytes
    }
    caches: dict[str, Callable[[Cost], int]] = {
        "keys and values, a token": lambda cost: cost.kv_bytes_per_token,
        "in a sliding window, a token": lambda cost: cost.window_bytes_per_token,
        "SSM state, a sequence": lambda cost: cost.ssm_bytes_per_sequence,
        "convolution state, a sequence": lambda cost: cost.conv_bytes_per_sequence,
    }
    columns |= {name: read for name, read in caches.items() if any(map(read, costs))}
    rows = [
        [heads[m.name], *(f"{read(found.costs[m.name]):,}" for read in columns.values())] for m in found.members
    ]  # fmt: skip
    return _table(["member", *map(escape, columns)], rows) + "<p>All in bytes.</p>"


def _results_table(found: Found, heads: Mapping[str, str]) -> str:
    """Every result of every member, one row a result."""
    flat = {m.name: dict(_flatten(m.results)) for m in found.members}
    keys = sorted({key for results in flat.values() for key in results})
    if not keys:
        return ""
    rows = [[escape(key), *(_value(key, flat[m.name].get(key)) for m in found.members)] for key in keys]
    return _table(["result", *(heads[m.name] for m in found.members)], rows)


def _settings_table(nest: Nest) -> str:
    rows = [[escape(key), f"<code>{escape(_plain(value))}</code>"] for key, value in _flatten(nest.recipe, ".")]
    rows += [["fingerprint of the weights", f"<code>{escape(nest.fingerprint)}</code>"]]
    if nest.parent:
        rows += [["fingerprint of the parent", f"<code>{escape(nest.parent)}</code>"]]
    return _table(["setting", "value"], rows, kind="settings")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """An HTML table in a box that scrolls. Cells are HTML already; the first of a row is its head."""
    head = "".join(f"<th scope=col>{cell}</th>" for cell in heads)
    body = "\n".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}</section>" if body else ""


def _name(name: str, light: Look, dark: Look) -> str:
    """A member's name with a chip of its color."""
    return f'<i class="chip" style="--light:{light.colors[name]};--dark:{dark.colors[name]}"></i>{escape(name)}'


def _dig(results: Mapping[str, Any], key: Sequence[str], end: str) -> Any:
    """results["perplexity_before"]["brown"] for ("perplexity", "brown") and "_before"; None if it is not there."""
    found: Any = results.get(key[0] + end)
    for part in key[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _flatten(tree: Mapping[str, Any], joint: str = " / ") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}{joint}{inner}", leaf) for inner, leaf in _flatten(value, joint))
        else:
            yield key, value


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or NONE
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) if value != "" else NONE
    )


def _value(key: str, value: Any) -> str:
    """A result for a cell: accuracies as percent, counts whole, the rest with four digits."""
    if value is None:
        return NONE
    if key.startswith("accuracy"):
        return percent(value)
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.4g}"
    return escape(_plain(value))


def _caches(cost: Cost, tokens: int = 1000) -> int:
    """Bytes of the caches of one sequence."""
    window = cost.window_bytes_per_token * min(tokens, cost.window or tokens)
    return cost.kv_bytes_per_token * tokens + window + cost.ssm_bytes_per_sequence + cost.conv_bytes_per_sequence


def bytes_text(n: float) -> str:
    for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if n >= unit:
            return f"{n / unit:,.2f} {name}"
    return f"{n:,.0f} B"


def _with_code(text: str) -> str:
    """Text with what stands between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))

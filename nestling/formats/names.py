"""The lists of module names in a quantization's description, for a model with fewer layers and experts.

A list may hold names, wildcards (`model.layers.3.*`) and regular expressions (`re:.*gate$`), with the root that the
files use or the one in memory. Numbers of layers and experts move when some are dropped. A pattern stays as it is
where it then still matches the same modules; where it would not, the modules stand in its place by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

NUMBERED = re.compile(r"(?P<word>(?:^|(?<=[.*]))(?:layers|experts)\.)(?P<number>\d+)(?=[.*]|$)")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module of the checkpoint that holds a matrix."""

    old: str  # its name in the checkpoint
    new: str  # its name in the member; empty if it is dropped
    is_quantized: bool


class Renamer:
    """Names, wildcards and regular expressions of a checkpoint, as its member has to spell them."""

    def __init__(self, modules: Sequence[Module], *, memory_root: str) -> None:
        """memory_root: what stands before `layers.` in module names, such as "model."."""
        self.modules = modules
        self._memory_root = memory_root
        self._layers: dict[str, str] = {}
        self._experts: dict[tuple[str, str], str] = {}
        roots = {module.old.partition("layers.")[0] for module in modules if "layers." in module.old}
        (self._root,) = roots or {memory_root}
        for module in modules:
            if module.new:
                old, new = (NUMBERED.findall(name) for name in (module.old, module.new))
                if old:
                    self._layers[old[0][1]] = new[0][1]
                if len(old) > 1:
                    self._experts[old[0][1], old[1][1]] = new[1][1]

    def excluded(self, patterns: Sequence[str]) -> list[str]:
        """The list of modules that are not quantized: the parent's, and every plain matrix that it leaves out."""
        kept = self.patterns(patterns)
        names = [pattern for pattern in kept if self._is_name(pattern)]
        uses_memory = self._uses_memory(names)
        listed, rest = set(names), [pattern for pattern in kept if not self._is_name(pattern)]
        for module in self.modules:
            if module.is_quantized or not module.new:
                continue
            if not listed & self._spellings(module.new) and not self._matches_any(rest, module.new):
                kept.append(self._in_memory(module.new) if uses_memory else module.new)
        return list(dict.fromkeys(kept))

    def patterns(self, patterns: Sequence[str]) -> list[str]:
        """A list of patterns for the member; those of what is dropped are gone."""
        uses_memory = self._uses_memory([pattern for pattern in patterns if self._is_name(pattern)])
        kept: list[str] = []
        for pattern in patterns:
            renamed = pattern if pattern.startswith("re:") else self.name(pattern)
            if self._is_name(pattern):
                kept += [renamed] if renamed else []
                continue
            wanted = {module.new for module in self.modules if module.new and self._matches(pattern, module.old)}
            found = {m.new for m in self.modules if renamed and m.new and self._matches(renamed, m.new)}
            if renamed and wanted == found:
                kept.append(renamed)
            else:
                kept += sorted(self._in_memory(name) if uses_memory else name for name in wanted)
        return list(dict.fromkeys(kept))

    def keys(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """A table by module name, without what is dropped."""
        return {renamed: told for name, told in layers.items() if (renamed := self.name(name))}

    def name(self, name: str) -> str:
        """A name with the member's numbers; empty if its layer or expert is dropped."""
        if name.startswith("mtp."):
            return name
        layer, is_dropped = "", False

        def number(match: re.Match[str]) -> str:
            nonlocal layer, is_dropped
            if match["word"] == "layers.":
                layer = match["number"]
                found = self._layers.get(layer)
            else:
                found = self._experts.get((layer, match["number"]))
            is_dropped = is_dropped or found is None
            return match["word"] + (found or "")

        renamed = NUMBERED.sub(number, name)
        return "" if is_dropped else renamed

    def _is_name(self, pattern: str) -> bool:
        return not pattern.startswith("re:") and not set("*?[") & set(pattern)

    def _matches(self, pattern: str, name: str) -> bool:
        if pattern.startswith("re:"):
            return any(re.match(pattern.removeprefix("re:"), one) for one in self._spellings(name))
        return any(fnmatchcase(one, pattern) for one in self._spellings(name))

    def _matches_any(self, patterns: Iterable[str], name: str) -> bool:
        return any(self._matches(pattern, name) for pattern in patterns)

    def _spellings(self, name: str) -> set[str]:
        return {name, self._in_memory(name)}

    def _in_memory(self, name: str) -> str:
        return self._memory_root + name.removeprefix(self._root) if name.startswith(self._root) else name

    def _uses_memory(self, names: Sequence[str]) -> bool:
        """Whether a list spells names as they are in memory: then what is added must be spelled so too."""
        if self._root == self._memory_root:
            return False
        return any(n.startswith(self._memory_root) for n in names) and not any(n.startswith(self._root) for n in names)


def check_kinds(told: Any, where: str) -> None:
    """A quantization's description, read from a stranger's file, is made of what is read from it later."""
    kinds = {"config_groups": dict, "quantized_layers": dict, "sparsity_config": dict, "quantization": dict,
             "ignore": list, "exclude_modules": list, "targets": list, "weights": dict, "input_activations": dict,
             "quant_method": str, "quant_algo": str, "format": str}  # fmt: skip
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {str(told)[:80]}, expected an object: it is broken.")
    for key, kind in kinds.items():
        value = told.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{where}: {key} is a {type(value).__name__}, expected a {kind.__name__}: it is broken.")
    for pattern in (one for key in ("ignore", "exclude_modules", "targets") for one in told.get(key) or []):
        if not isinstance(pattern, str):
            raise ValueError(f"{where}: {str(pattern)[:80]} stands among names of modules: it is broken.")
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{where}: '{pattern[:80]}' is no regular expression ({error}).") from None
    for key in ("config_groups", "quantized_layers"):
        for name, inner in (told.get(key) or {}).items():
            check_kinds(inner, f"{where}: {key} '{str(name)[:80]}'")
    if told.get("quantization") is not None:
        check_kinds(told["quantization"], f"{where}: quantization")


def rebuild(section: Mapping[str, Any], renamer: Renamer, *, exclude_key: str) -> dict[str, Any]:
    """A quantization's description for the member. exclude_key: where the excluded modules go if no list is there."""
    lists = [key for key in ("ignore", "exclude_modules") if key in section] or [exclude_key]
    rebuilt = {**section, **{key: renamer.excluded(section.get(key) or []) for key in lists}}
    if section.get("quantized_layers"):
        rebuilt["quantized_layers"] = renamer.keys(section["quantized_layers"])
    if section.get("config_groups"):
        groups = {
            name: {**group, "targets": renamer.patterns(group["targets"])} if group.get("targets") else group
            for name, group in section["config_groups"].items()
        }
        rebuilt["config_groups"] = {name: g for name, g in groups.items() if g.get("targets") != []}
    return rebuilt

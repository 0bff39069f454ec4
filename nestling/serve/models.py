"""The model ids of a server: the nest, each member, and who thinks and who answers, for clients that can only choose a
model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nestling.policy import HANDOVERS, Policy
from nestling.request import Runtime
from nestling.serve.refusals import Refused
from nestling.serve.settings import ServeSettings

ARROW = "->"


class Models:
    """Ids of the members of a runtime, under a name."""

    def __init__(self, runtime: Runtime, settings: ServeSettings, *, nest: str, created: int) -> None:
        self.runtime, self.settings, self.created = runtime, settings, created
        self.name = settings.name or nest
        self.default = settings.policy()
        self.default.check(runtime.members)

    def policies(self) -> dict[str, Policy]:
        """Every listed id and what it stands for: the nest, its members, the pairs."""
        members = self.runtime.members
        pairs = [(think, answer) for think in members for answer in members if think != answer]
        return {
            self.name: self.default,
            **{f"{self.name}:{one}": self._of(one, one) for one in members},
            **{f"{self.name}:{think}{ARROW}{answer}": self._of(think, answer) for think, answer in pairs},
        }

    def find(self, model: str) -> Policy:
        """What a request's `model` stands for; a name of a member alone will do, and none is the nest."""
        if not model:
            return self.default
        inner = model.removeprefix(f"{self.name}:")
        think, arrow, answer = inner.partition(ARROW)
        members = self.runtime.members
        if inner != model or model != self.name:
            if inner in members:
                return self._of(inner, inner)
            if arrow and think in members and answer in members:
                return self._of(think, answer)
        if model == self.name:
            return self.default
        raise Refused(
            404,
            f"there is no model '{model[:200]}'. Models: {', '.join(list(self.policies())[:20])}.",
            param="model",
            code="model_not_found",
        )

    def listing(self) -> dict[str, Any]:
        """The body of /v1/models."""
        return {"object": "list", "data": [self.entry(one) for one in self.policies()]}

    def entry(self, model: str) -> dict[str, Any]:
        """One model as OpenAI describes it, and what it stands for."""
        policy, members = self.find(model), self.runtime.members
        return {
            "id": model,
            "object": "model",
            "created": self.created,
            "owned_by": "nestling",
            "nestling": {
                "members": list(members),
                "handovers": list(getattr(self.runtime, "handovers", HANDOVERS)),
                "max_tokens": self.settings.max_tokens,
                "policy": {
                    "think": policy.think or members[0],
                    "answer": policy.answer or members[0],
                    "thinking_token_budget": policy.thinking_token_budget,
                    "handover": policy.handover,
                },
            },
        }

    def _of(self, think: str, answer: str) -> Policy:
        return replace(self.default, think=think, answer=answer)

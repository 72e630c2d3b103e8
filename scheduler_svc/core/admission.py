"""Which requests can never be served by a given memory: they are refused before they wait."""

from __future__ import annotations

from scheduler_svc.core.limits import Geometry


def why_never_fits(geometry: Geometry, prompt_tokens: int, max_tokens: int) -> str | None:
    """The reason with both numbers, or None when the request fits an empty pool."""
    total = prompt_tokens + max_tokens
    asked = f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) is {total}"
    if total > geometry.max_model_len:
        return f"{asked}; max_model_len is {geometry.max_model_len}"
    if total > geometry.pool_tokens:
        return f"{asked}; the whole KV pool holds {geometry.pool_tokens} tokens"
    return None

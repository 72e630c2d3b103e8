"""Which requests can never be served by a given memory: they are refused before they wait."""

from __future__ import annotations

from scheduler_svc.core.limits import Geometry


def why_never_fits(
    geometry: Geometry, prompt_tokens: int, max_tokens: int, is_reserved: bool = False
) -> str | None:
    """The reason with both numbers, or None when the request fits an empty pool.

    `is_reserved`: under a policy that reserves all pages at once.
    """
    total = prompt_tokens + max_tokens
    asked = f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) is {total}"
    if total > geometry.max_model_len:
        return f"{asked}; max_model_len is {geometry.max_model_len}"
    pool_tokens = geometry.pool_tokens(is_reserved)
    if total > pool_tokens:
        return f"{asked}; the whole KV pool holds {pool_tokens} tokens"
    return None

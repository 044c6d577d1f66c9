"""Attention with a 2-D ALiBi bias that is never built."""

from thinsection.attention.api import Decision, alibi2d_attention, explain
from thinsection.attention.reference import alibi_slopes

__all__ = ["Decision", "alibi2d_attention", "alibi_slopes", "explain"]

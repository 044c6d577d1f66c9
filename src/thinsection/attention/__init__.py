"""Attention with a 2-D ALiBi bias that is never built, and LongNet's dilated attention.

Both take O(tokens) memory, have gradients, and run on any device.
"""

from thinsection.attention.api import Decision, alibi2d_attention, explain
from thinsection.attention.dilated import Branch
from thinsection.attention.dilated_api import dilated_attention
from thinsection.attention.reference import alibi_slopes

__all__ = [
    "Branch",
    "Decision",
    "alibi2d_attention",
    "alibi_slopes",
    "dilated_attention",
    "explain",
]

"""A call that PyTorch's compiler does not trace, for attention by blocks in compiled models.

Only a call within a compiled model imports this module, since it imports PyTorch's compiler.
"""

from inspect import signature

import torch

from thinsection.attention.traced import call

_WHY_NOT_TRACED = (
    "blocks of attention depend on values, so a compiled graph ends before them and goes on after "
    "them; with fullgraph=True pass impl='flex' or impl='reference' to alibi2d_attention"
)
# PyTorch 2.6 does not take a reason
if "reason" in signature(torch.compiler.disable).parameters:
    call_untraced = torch.compiler.disable(  # type: ignore[no-untyped-call]
        call, reason=_WHY_NOT_TRACED
    )
else:
    call_untraced = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

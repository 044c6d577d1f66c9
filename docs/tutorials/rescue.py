# %% [markdown]
# # A job that ran out of memory
# TITAN adds to every attention score a bias that falls with the distance of two tiles. The published code builds it for
# all pairs: 46 GB at 31,000 tiles. Here it is never built, and the answer is the same.

# %%
import torch

from thinsection.attention import alibi2d_attention, alibi_slopes, explain

torch.manual_seed(0)
rows, columns = torch.meshgrid(torch.arange(30), torch.arange(20), indexing="ij")
cells = torch.stack(
    [columns.flatten(), rows.flatten()], 1
)  # 600 tiles of a slide, in grid units
q, k, v = torch.randn(3, 1, 12, 1 + len(cells), 64)

# %% [markdown]
# ## Exact
# `reference` is the definition, in plain PyTorch. `chunked` computes block by block.

# %%
slopes = alibi_slopes(12)
plain = alibi2d_attention(q, k, v, cells, slopes, impl="reference")
ours = alibi2d_attention(q, k, v, cells, slopes, impl="chunked")
print("largest difference:", (plain - ours).abs().max().item())
print(explain(q).why)

# %% [markdown]
# ## Bounded
# The definition needs a bias of 12 N² numbers; the refusal says how much, before anything is allocated.

# %%
many = torch.zeros(40_000, 2, dtype=torch.int64)
try:
    big = torch.zeros(1, 12, 1 + len(many), 64)
    alibi2d_attention(big, big, big, many, slopes, impl="reference")
except MemoryError as error:
    print(error)

# %% [markdown]
# ## In other people's code
# `rescue.titan` puts this attention into TITAN as Hugging Face, slide2vec, Mussel or TRIDENT load it, checks it against
# the model's own on a small probe, and takes it back at the end of the block:
#
# ```python
# from thinsection import rescue
#
# with rescue.titan(model):
#     embedding = model.encode_slide_from_patch_features(features, coords, patch_size_lv0=1024)
# ```
#
# Without a model, `rescue.titan()` takes every TITAN that is loaded inside the block. `thinsection rescue titan -- COMMAND`
# does this for another tool's command: [Rescue](../rescue.md).
#
# `frames.openfold3` does the same for token frames and pair losses of structures: [token frames](../frames.md).

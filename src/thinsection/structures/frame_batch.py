"""What `token_frame_atoms` reads from a batch: checked, and spread from tokens to atoms.

Legend: T tokens, A atoms, `*` batch and sample dimensions. Token features may lack or have length 1
in dimensions that x has.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

from thinsection.errors import StructureError, require

KEYS = (
    *("token_mask", "num_atoms_per_token", "asym_id", "start_atom_index"),
    *("is_protein", "is_dna", "is_rna", "is_atomized", "restype"),
)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_NUM_RESTYPES = 32  # one-hot: 20 amino acids and UNK, A G C U N, DA DG DC DT DN, gap
_FRAME_ATOMS = (  # residue types, first of their three columns, offsets
    *((slice(21), 0, (0, 1, 2)), (slice(21, 26), 3, (7, 11, 5))),  # amino acids; RNA
    (slice(26, 31), 3, (7, 10, 5)),  # DNA
)
_TOKENS = 1 << 16  # tokens whose one-hot residue types are converted at a time
_require = partial(require, error=StructureError)


def check_shapes(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raises StructureError where keys, dtypes or shapes do not fit; looks at no value."""
    missing, shape = [key for key in KEYS if key not in batch], tuple(x.shape)
    _require(not missing, f"batch must have {', '.join(KEYS)}", f"none of {', '.join(missing)}")
    placed = x.ndim >= 2 and x.shape[-1] == 3 and x.shape[-2] > 0
    _require(placed, "x must be of shape (..., N_atom >= 1, 3)", shape)
    _require(x.dtype in _DTYPES, "x must be float32, float64 or bfloat16", x.dtype)
    tokens = tuple(batch["token_mask"].shape)
    for key in KEYS:
        expected = (*tokens, _NUM_RESTYPES) if key == "restype" else tokens
        got = tuple(batch[key].shape)
        _require(got == expected, f"{key} must be of shape {expected}, as token_mask", got)
    atoms = tuple(atom_mask.shape)
    for name, lead in (("token_mask", tokens[:-1]), ("atom_mask", atoms[:-1])):
        tail = shape[-2 - len(lead) : -2]
        fits = len(tail) == len(lead) and all(n in (1, m) for n, m in zip(lead, tail))
        _require(fits, f"{name} must spread over the batch dimensions {shape[:-2]} of x", lead)
    _require(atoms[-1] == shape[-2], f"atom_mask must cover the {shape[-2]} atoms of x", atoms)


def check_values(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raises StructureError for values that make the result meaningless (synchronises a GPU)."""
    token_mask, atoms = batch["token_mask"], f"the {x.shape[-2]} atoms of x"
    whole = not bool((token_mask[..., 1:] > token_mask[..., :-1]).any())
    got = "a hole; drop absent tokens or mask their atoms"
    _require(whole, "token_mask must be 1 for all tokens before the padding", got)
    total = int(_atoms_per_token(batch).sum(dim=-1).max())
    _require(total == x.shape[-2], f"num_atoms_per_token must add up to {atoms}", total)
    low, high = (int(end) for end in batch["start_atom_index"].aminmax())
    inside = low >= 0 and high < x.shape[-2]
    _require(inside, f"start_atom_index must lie within {atoms}", f"{low} to {high}")
    broken = (~x.isfinite().all(dim=-1) & atom_mask.bool()).nonzero()
    if len(broken):
        first = tuple(broken[0].tolist())
        got = f"{x[first].tolist()} for atom {first}; mask the atom out"
        raise StructureError(f"x must be finite where atom_mask is 1, got {got}")


def atom_chains(batch: Mapping[str, Tensor], num_atoms: int) -> Tensor:
    """asym_id of each atom, int64 (*, A); 0 beyond the atoms of a batch element's tokens."""
    counts = _atoms_per_token(batch)
    chains = (batch["asym_id"] * batch["token_mask"]).long()
    atoms = counts.new_zeros((*counts.shape[:-1], num_atoms))
    for at in product(*map(range, counts.shape[:-1])):
        spread = chains[at].repeat_interleave(counts[at])[:num_atoms]
        atoms[at][: len(spread)] = spread
    return atoms


def backbone_offsets(restype: Tensor) -> tuple[Tensor, Tensor]:
    """Where the frame atoms lie, counted from a standard residue's first atom.

    Returns:
        Offsets int64 (*, T, 6) of N, CA, C, C3', C1', C4' (-1 where the residue type has none) and
        their existence (*, T, 6), 0/1 int64. A token without residue type has 0 and 0.
    """
    table = torch.full((_NUM_RESTYPES, 12), -1.0)
    table[:, 6:] = 0
    for kinds, first, offsets in _FRAME_ATOMS:
        table[kinds, first : first + 3] = torch.tensor(offsets).float()
        table[kinds, first + 6 : first + 9] = 1
    table, flat = table.to(restype.device), restype.reshape(-1, _NUM_RESTYPES)
    parts = [(part.float() @ table).long() for part in torch.split(flat, _TOKENS)]
    both = torch.cat(parts).reshape(*restype.shape[:-1], 12)
    return both[..., :6], both[..., 6:]


def _atoms_per_token(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["num_atoms_per_token"].long() * batch["token_mask"].long()

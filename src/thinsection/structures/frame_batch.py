"""What `token_frame_atoms` reads from a batch: checked, and spread from tokens to atoms.

Legend: T tokens, A atoms, `*` batch and sample dimensions. Token features may lack or have length 1
in dimensions that x has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from thinsection.errors import StructureError

KEYS = (
    *("token_mask", "num_atoms_per_token", "asym_id", "start_atom_index"),
    *("is_protein", "is_dna", "is_rna", "is_atomized", "restype"),
)
_NUM_RESTYPES = 32  # one-hot: 20 amino acids and UNK, A G C U N, DA DG DC DT DN, gap
_RNA, _DNA = range(21, 26), range(26, 31)
_TOKENS = 1 << 16  # tokens whose one-hot residue types are converted at a time


def check_shapes(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raises StructureError where keys, dtypes or shapes do not fit; looks at no value."""
    missing = [key for key in KEYS if key not in batch]
    if missing:
        raise StructureError(f"batch must have {', '.join(KEYS)}, got none of {', '.join(missing)}")
    if x.ndim < 2 or x.shape[-1] != 3 or x.shape[-2] == 0:
        raise StructureError(f"x must be of shape (..., N_atom >= 1, 3), got {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise StructureError(f"x must be float32, float64 or bfloat16, got {x.dtype}")
    tokens = batch["token_mask"].shape
    for key in KEYS:
        expected = (*tokens, _NUM_RESTYPES) if key == "restype" else tuple(tokens)
        if tuple(batch[key].shape) != expected:
            raise StructureError(
                f"{key} must be of shape {expected}, as token_mask, got {tuple(batch[key].shape)}"
            )
    _check_spreads("token_mask", tokens[:-1], x)
    _check_spreads("atom_mask", atom_mask.shape[:-1], x)
    if atom_mask.shape[-1] != x.shape[-2]:
        raise StructureError(
            f"atom_mask must cover the {x.shape[-2]} atoms of x, got {tuple(atom_mask.shape)}"
        )


def check_values(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raises StructureError for values that make the result meaningless (synchronises a GPU)."""
    token_mask = batch["token_mask"]
    if bool((token_mask[..., 1:] > token_mask[..., :-1]).any()):
        raise StructureError(
            "token_mask must be 1 for all tokens before the padding, got a hole; "
            "drop absent tokens or mask their atoms"
        )
    totals = _atoms_per_token(batch).sum(dim=-1)
    if int(totals.max()) != x.shape[-2]:
        raise StructureError(
            f"num_atoms_per_token must add up to the {x.shape[-2]} atoms of x, "
            f"got {int(totals.max())}"
        )
    start = batch["start_atom_index"]
    if bool(((start < 0) | (start >= x.shape[-2])).any()):
        raise StructureError(
            f"start_atom_index must lie within the {x.shape[-2]} atoms of x, "
            f"got {int(start.min())} to {int(start.max())}"
        )
    broken = ~x.isfinite().all(dim=-1) & atom_mask.bool()
    if bool(broken.any()):
        first = tuple(broken.nonzero()[0].tolist())
        raise StructureError(
            f"x must be finite where atom_mask is 1, got {x[first].tolist()} for atom {first}; "
            "mask the atom out"
        )


def atom_chains(batch: Mapping[str, Tensor], num_atoms: int) -> Tensor:
    """asym_id of each atom, int64 (*, A); 0 beyond the atoms of a batch element's tokens."""
    counts = _atoms_per_token(batch)
    lead = counts.shape[:-1]
    flat_counts = counts.reshape(-1, counts.shape[-1])
    chains = (batch["asym_id"] * batch["token_mask"]).long().reshape(flat_counts.shape)
    atoms = torch.zeros((len(flat_counts), num_atoms), dtype=torch.int64, device=counts.device)
    for row, (ids, repeats) in enumerate(zip(chains, flat_counts, strict=True)):
        spread = ids.repeat_interleave(repeats)[:num_atoms]
        atoms[row, : len(spread)] = spread
    return atoms.reshape(*lead, num_atoms)


def backbone_offsets(restype: Tensor) -> tuple[Tensor, Tensor]:
    """Where the frame atoms lie, counted from a standard residue's first atom.

    Returns:
        Offsets int64 (*, T, 6) of N, CA, C, C3', C1', C4' (-1 where the residue type has none) and
        their existence (*, T, 6), 0/1 int64. A token without residue type has 0 and 0.
    """
    table = torch.full((_NUM_RESTYPES, 12), -1.0)
    table[:, 6:] = 0
    table[: _RNA.start, :3] = torch.tensor([0.0, 1.0, 2.0])
    table[: _RNA.start, 6:9] = 1
    for kinds, c1_prime in ((_RNA, 11.0), (_DNA, 10.0)):
        table[kinds.start : kinds.stop, 3:6] = torch.tensor([7.0, c1_prime, 5.0])
        table[kinds.start : kinds.stop, 9:] = 1
    table = table.to(restype.device)
    flat = restype.reshape(-1, _NUM_RESTYPES)
    parts = [(part.float() @ table).long() for part in torch.split(flat, _TOKENS)]
    both = torch.cat(parts).reshape(*restype.shape[:-1], 12)
    return both[..., :6], both[..., 6:]


def _atoms_per_token(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["num_atoms_per_token"].long() * batch["token_mask"].long()


def _check_spreads(name: str, lead: torch.Size, x: Tensor) -> None:
    target = x.shape[:-2]
    tail = target[len(target) - len(lead) :]
    fits = len(lead) <= len(target) and all(n in (1, m) for n, m in zip(lead, tail, strict=True))
    if not fits:
        raise StructureError(
            f"{name} must spread over the batch dimensions {tuple(x.shape[:-2])} of x, "
            f"got {tuple(lead)}"
        )

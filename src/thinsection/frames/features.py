"""Features of tokens and atoms: checks, the chain of each atom, and places of frame atoms.

Legend: T tokens, A atoms, `*` batch and sample dimensions.
"""

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from thinsection.errors import StructureError

KEYS = (
    "token_mask",
    "num_atoms_per_token",
    "asym_id",
    "start_atom_index",
    "is_protein",
    "is_dna",
    "is_rna",
    "is_atomized",
    "restype",
)
NUM_RESTYPES = 32  # one-hot: 20 amino acids and UNK, A G C U N, DA DG DC DT DN, gap
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_AMINO_ACIDS = slice(0, 21)
_RNA = slice(21, 26)
_DNA = slice(26, 31)
_TOKENS = 1 << 16  # tokens whose one-hot residue types are converted in one step


def check_shapes(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raise StructureError if keys, dtypes or shapes do not fit; values are not looked at."""
    missing = [key for key in KEYS if key not in batch]
    if missing:
        raise StructureError(
            f"batch must have {', '.join(KEYS)}, got no {', '.join(missing)}"
        )
    shape = tuple(x.shape)
    if x.ndim < 2 or shape[-1] != 3 or shape[-2] == 0:
        raise StructureError(f"x must be of shape (..., N_atom >= 1, 3), got {shape}")
    if x.dtype not in _DTYPES:
        raise StructureError(
            f"x must be float64, float32, bfloat16 or float16, got {x.dtype}"
        )
    tokens = tuple(batch["token_mask"].shape)
    for key in KEYS:
        shape_of_key = tuple(batch[key].shape)
        expected = (*tokens, NUM_RESTYPES) if key == "restype" else tokens
        last = shape_of_key[-1:] or (1,)
        if not _spreads(shape_of_key, expected) or last != expected[-1:]:
            raise StructureError(
                f"{key} must have the shape of token_mask, {expected}, got {shape_of_key}"
            )
    atoms = tuple(atom_mask.shape)
    for name, lead in (("token_mask", tokens[:-1]), ("atom_mask", atoms[:-1])):
        if not _spreads(lead, shape[:-2]):
            raise StructureError(
                f"{name} must broadcast to the batch dimensions {shape[:-2]} of x, got {lead}"
            )
    if atoms[-1] != shape[-2]:
        raise StructureError(
            f"atom_mask must cover the {shape[-2]} atoms of x, got {atoms}"
        )


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """True if a tensor with this shape expands to `over`: its last lengths are equal or 1."""
    pairs = zip(reversed(shape), reversed(over), strict=False)
    return len(shape) <= len(over) and all(n in (1, m) for n, m in pairs)


def expand_features(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The features `KEYS`, each expanded to (*, T) as token_mask, restype to (*, T, 32)."""
    tokens = batch["token_mask"].shape
    features = {key: batch[key].expand(tokens) for key in KEYS if key != "restype"}
    features["restype"] = batch["restype"].expand(*tokens, NUM_RESTYPES)
    return features


def check_values(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raise StructureError if values make the result meaningless (synchronises a GPU)."""
    token_mask = batch["token_mask"]
    num_atoms = x.shape[-2]
    if bool((token_mask[..., 1:] > token_mask[..., :-1]).any()):
        raise StructureError(
            "token_mask must be 1 for all tokens before the padding, got a 0 between them; "
            "remove absent tokens or mask their atoms"
        )
    total = int(_atoms_per_token(batch).sum(dim=-1).max())
    if total != num_atoms:
        raise StructureError(
            f"num_atoms_per_token must add up to the {num_atoms} atoms of x, got {total}"
        )
    first, last = (int(end) for end in batch["start_atom_index"].aminmax())
    if first < 0 or last >= num_atoms:
        raise StructureError(
            f"start_atom_index must be within the {num_atoms} atoms of x, got {first} to {last}"
        )
    broken = (~x.isfinite().all(dim=-1) & atom_mask.bool()).nonzero()
    if len(broken):
        atom = tuple(broken[0].tolist())
        raise StructureError(
            f"x must be finite where atom_mask is 1, got {x[atom].tolist()} "
            f"for atom {atom}; mask the atom out"
        )


def atom_chains(batch: Mapping[str, Tensor], num_atoms: int) -> Tensor:
    """asym_id of each atom, int64 (*, A); 0 for atoms that belong to no token."""
    counts = _atoms_per_token(batch)
    chains = (batch["asym_id"] * batch["token_mask"]).long()
    atoms = counts.new_zeros((*counts.shape[:-1], num_atoms))
    for element in product(*map(range, counts.shape[:-1])):
        spread = chains[element].repeat_interleave(counts[element])[:num_atoms]
        atoms[element][: len(spread)] = spread
    return atoms


def _atoms_per_token(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["num_atoms_per_token"].long() * batch["token_mask"].long()


def backbone_offsets(restype: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets of frame atoms from a residue's first atom, and 0/1 if they exist, int64 (*, T, 6).

    Columns are N, CA, C, C3', C1', C4'. If the residue type has no such atom, the offset is -1 and
    the other value 0. For a token without a residue type both are 0.
    """
    offsets = torch.full((NUM_RESTYPES, 6), -1.0)
    exists = torch.zeros(NUM_RESTYPES, 6)
    for restypes, columns, values in (
        (_AMINO_ACIDS, slice(0, 3), (0.0, 1.0, 2.0)),
        (_RNA, slice(3, 6), (7.0, 11.0, 5.0)),
        (_DNA, slice(3, 6), (7.0, 10.0, 5.0)),
    ):
        offsets[restypes, columns] = torch.tensor(values)
        exists[restypes, columns] = 1
    table = torch.cat((offsets, exists), dim=1).to(restype.device)
    one_hot = restype.reshape(-1, NUM_RESTYPES)
    parts = [(part.float() @ table).long() for part in torch.split(one_hot, _TOKENS)]
    both = torch.cat(parts).reshape(*restype.shape[:-1], 12)
    return both[..., :6], both[..., 6:]

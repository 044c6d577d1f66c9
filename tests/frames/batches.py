"""Random batches of tokens and atoms, shaped as OpenFold3 makes them."""

from dataclasses import dataclass

import torch
from torch import Tensor

PROTEIN, RNA, DNA, ATOM = range(4)
_STANDARD_ATOMS = {PROTEIN: 5, RNA: 13, DNA: 12}  # as few as have the frame's atoms
_RESTYPE = {PROTEIN: 7, RNA: 22, DNA: 28, ATOM: 20}


@dataclass(frozen=True, kw_only=True)
class Case:
    batch: dict[str, Tensor]
    x: Tensor
    atom_mask: Tensor

    def __iter__(self):  # so that a case is the three arguments
        return iter((self.batch, self.x, self.atom_mask))


def features(
    kinds: list[int], chains: list[int], padding: int = 0
) -> dict[str, Tensor]:
    """Features (T,) of tokens of these kinds and chains, then padding."""
    counts = torch.tensor(
        [_STANDARD_ATOMS.get(kind, 1) for kind in kinds] + [0] * padding
    )
    kind = torch.tensor(kinds + [-1] * padding)
    restype = torch.zeros(len(kind), 32)
    for row, value in enumerate(kinds):
        restype[row, _RESTYPE[value]] = 1
    real = (kind >= 0).int()
    return {
        "token_mask": real.float(),
        "num_atoms_per_token": counts.int(),
        "asym_id": torch.tensor(chains + [0] * padding).int(),
        "start_atom_index": ((counts.cumsum(0) - counts) * real).int(),
        "is_protein": (kind == PROTEIN).int(),
        "is_dna": (kind == DNA).int(),
        "is_rna": (kind == RNA).int(),
        "is_atomized": (kind == ATOM).int(),
        "restype": restype,
    }


def random_case(
    seed: int,
    *,
    num_tokens: int = 30,
    num_chains: int = 3,
    samples: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    distinct: int | None = None,
    atom_fraction: float = 0.5,
    absent: float = 0.15,
    padding: int = 2,
) -> Case:
    """Tokens of all kinds, interleaved chains; few `distinct` coordinates give ties, duplicates."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_tokens, generator=generator)
    standard = torch.randint(0, 3, (num_tokens,), generator=generator)
    kinds = torch.where(uniform < atom_fraction, ATOM, standard).tolist()
    chains = torch.randint(
        1, num_chains + 1, (num_tokens,), generator=generator
    ).tolist()
    batch = features(kinds, chains, padding)
    num_atoms = int(batch["num_atoms_per_token"].sum())
    shape = (*samples, num_atoms, 3)
    if distinct is None:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 6
    else:
        x = torch.randint(0, distinct, shape, generator=generator).double() * 1.5
    mask = (torch.rand((*samples, num_atoms), generator=generator) >= absent).float()
    x[mask == 0] = torch.nan
    return Case(batch=batch, x=x.to(dtype), atom_mask=mask)


def atoms_only(positions: list[list[float]], chains: list[int] | None = None) -> Case:
    """Atomised tokens at these positions, all present."""
    chains = chains or [1] * len(positions)
    x = torch.tensor(positions)
    return Case(
        batch=features([ATOM] * len(positions), chains),
        x=x,
        atom_mask=torch.ones(len(positions)),
    )

"""A structure as tokens and atoms, in the flat arrays that frames are computed from.

Legend: T tokens, A atom slots. A standard residue's slots begin with its frame atoms' template
(N, CA, C; or the nucleotide's backbone), observed or not; its other observed atoms follow.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PROTEIN, RNA, DNA, ATOM = range(4)
KINDS = ("protein", "rna", "dna", "atom")
_NUM_RESTYPES = 32

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Tokens and atoms of one structure, tokens in file order, atoms in token order.

    Attributes:
        atom_positions: (A, 3) float32, Å; NaN where not observed.
        atom_name: (A,) into `names`.
        token_kind: (T,) PROTEIN, RNA, DNA or ATOM (a ligand's or modified residue's atom).
        token_num_atoms: (T,) slots of each token.
        token_chain: (T,) into `chains`.
        token_residue: (T,) residue number in its chain (author numbering).
        token_residue_name: (T,) into `names`.
        token_restype: (T,) 0 to 31, the order of OpenFold3's one-hot.
        names: atom and residue names.
        chains: label_asym_id of each chain; copies made by symmetry as 'A-2'.
    """

    atom_positions: npt.NDArray[np.float32]
    atom_name: Ints
    token_kind: npt.NDArray[np.int8]
    token_num_atoms: Ints
    token_chain: Ints
    token_residue: Ints
    token_residue_name: Ints
    token_restype: npt.NDArray[np.int8]
    names: tuple[str, ...]
    chains: tuple[str, ...]

    @property
    def num_atoms(self) -> int:
        return len(self.atom_name)

    @property
    def num_tokens(self) -> int:
        return len(self.token_kind)

    @property
    def token_start(self) -> npt.NDArray[np.int64]:
        """(T,) first slot of each token."""
        counts = self.token_num_atoms.astype(np.int64)
        starts: npt.NDArray[np.int64] = counts.cumsum() - counts
        return starts

    @property
    def observed(self) -> npt.NDArray[np.bool_]:
        """(A,) whether the atom has a position."""
        return ~np.isnan(self.atom_positions[:, 0])

    def tensors(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(batch, x, atom_mask) for `token_frame_atoms`.

        Memory: 60 bytes per token (the one-hot as uint8), 4 bytes per atom beside the positions.
        """
        kind = torch.from_numpy(self.token_kind)
        restype = torch.zeros((self.num_tokens, _NUM_RESTYPES), dtype=torch.uint8)
        restype.scatter_(1, torch.from_numpy(self.token_restype).long()[:, None], 1)
        names = {"is_protein": PROTEIN, "is_rna": RNA, "is_dna": DNA, "is_atomized": ATOM}
        batch = {
            "token_mask": torch.ones(self.num_tokens),
            "num_atoms_per_token": torch.from_numpy(self.token_num_atoms),
            "asym_id": torch.from_numpy(self.token_chain),
            "start_atom_index": torch.from_numpy(self.token_start),
            **{name: (kind == code).int() for name, code in names.items()},
            "restype": restype,
        }
        return batch, torch.from_numpy(self.atom_positions), torch.from_numpy(self.observed).float()

    def placed(self, rotation: npt.ArrayLike, shift: npt.ArrayLike, suffix: str = "") -> Self:
        """A copy moved by x -> rotation @ x + shift (float64), its chains renamed by `suffix`."""
        moved = self.atom_positions @ np.asarray(rotation, np.float64).T + np.asarray(shift)
        chains = tuple(name + suffix for name in self.chains)
        return replace(self, atom_positions=moved.astype(np.float32), chains=chains)

    def of_chains(self, wanted: set[str]) -> Self:
        """Only the chains of these names."""
        keep_chain = np.array([name in wanted for name in self.chains], dtype=bool)
        tokens = keep_chain[self.token_chain]
        kept = {"token_": tokens, "atom_": np.repeat(tokens, self.token_num_atoms)}
        columns: dict[str, Any] = {
            name: getattr(self, name)[keep]
            for prefix, keep in kept.items()
            for name in _columns(prefix)
        }
        renumber = (np.cumsum(keep_chain) - 1).astype(np.int32)
        columns["token_chain"] = renumber[columns["token_chain"]]
        chains = tuple(name for name in self.chains if name in wanted)
        return replace(self, **columns, chains=chains)


def _columns(prefix: str) -> list[str]:
    """Names of the fields of `Structure` that hold an entry per token, or per atom."""
    return [field.name for field in fields(Structure) if field.name.startswith(prefix)]


def joined(parts: list[Structure]) -> Structure:
    """One structure of several that share `names`; each part's chains stay apart."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*_columns("token_"), *_columns("atom_"))
    }
    num_chains = [len(part.chains) for part in parts]
    offsets = np.repeat(np.cumsum([0, *num_chains[:-1]]), [part.num_tokens for part in parts])
    columns["token_chain"] = (columns["token_chain"] + offsets).astype(np.int32)
    return replace(parts[0], **columns, chains=tuple(n for part in parts for n in part.chains))

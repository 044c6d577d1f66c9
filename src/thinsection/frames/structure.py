"""A structure as tokens (the same as in OpenFold3) and atoms.

Legend: T tokens, A atom slots. The slots of a standard residue begin with the template of its frame
atoms (N, CA, C; or the backbone of the nucleotide), observed or not; its other observed atoms
follow.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.frames.features import NUM_RESTYPES

if TYPE_CHECKING:  # Python 3.10 has no Self
    from typing import Self

PROTEIN, RNA, DNA, ATOM = range(4)
KINDS = ("protein", "rna", "dna", "atom")

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Tokens and atoms of one structure; tokens are in file order, atoms in the order of tokens."""

    atom_positions: npt.NDArray[np.float32]  # (A, 3), Å; NaN where not observed
    atom_name: Ints  # (A,) indices into `names`
    # (T,) PROTEIN, RNA, DNA or ATOM (an atom of a ligand, for example)
    token_kind: npt.NDArray[np.int8]
    token_num_atoms: Ints  # (T,) number of slots of each token
    token_chain: Ints  # (T,) indices into `chains`
    token_residue: Ints  # (T,) the author's residue number in the chain
    # (T,) indices into `names`: insertion code beside this number, '' if none
    token_insertion: Ints
    token_residue_name: Ints  # (T,) indices into `names`
    # (T,) 0 to 31, in the order of OpenFold3's one-hot residue types
    token_restype: npt.NDArray[np.int8]
    names: tuple[str, ...]  # names of atoms and residues, and insertion codes
    # label_asym_id of each chain; symmetry copies are named like 'A-2'
    chains: tuple[str, ...]
    notes: tuple[str, ...] = ()  # a sentence on each part of the file that was left out

    @property
    def num_tokens(self) -> int:
        return len(self.token_kind)

    @property
    def observed(self) -> npt.NDArray[np.bool_]:
        """(A,) True if the atom has a position."""
        return ~np.isnan(self.atom_positions[:, 0])

    def tensors(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(batch, x, atom_mask) for `token_frame_atoms`. Memory: 60 bytes per token, 4 per atom."""
        kind = torch.from_numpy(self.token_kind)
        counts = torch.from_numpy(self.token_num_atoms)
        restype = torch.zeros((self.num_tokens, NUM_RESTYPES), dtype=torch.uint8)
        restype.scatter_(1, torch.from_numpy(self.token_restype).long()[:, None], 1)
        batch = {
            "token_mask": torch.ones(self.num_tokens),
            "num_atoms_per_token": counts,
            "start_atom_index": counts.long().cumsum(0) - counts,
            "asym_id": torch.from_numpy(self.token_chain),
            "restype": restype,
            "is_protein": (kind == PROTEIN).int(),
            "is_rna": (kind == RNA).int(),
            "is_dna": (kind == DNA).int(),
            "is_atomized": (kind == ATOM).int(),
        }
        x = torch.from_numpy(self.atom_positions)
        atom_mask = torch.from_numpy(self.observed).float()
        return batch, x, atom_mask

    def placed(
        self, rotation: npt.ArrayLike, shift: npt.ArrayLike, suffix: str = ""
    ) -> "Self":
        """A copy with x -> rotation @ x + shift (float64), and `suffix` added to chain names."""
        matrix = np.asarray(rotation, np.float64)
        moved = self.atom_positions @ matrix.T + np.asarray(shift)
        return replace(
            self,
            atom_positions=moved.astype(np.float32),
            chains=tuple(name + suffix for name in self.chains),
        )

    def of_chains(self, wanted: set[str]) -> "Self":
        """A structure with only the chains of these names."""
        is_kept = np.array([name in wanted for name in self.chains], dtype=bool)
        tokens = is_kept[self.token_chain]
        atoms = np.repeat(tokens, self.token_num_atoms)
        columns: dict[str, Any] = {}
        for name in _TOKEN_COLUMNS:
            columns[name] = getattr(self, name)[tokens]
        new_number = (np.cumsum(is_kept) - 1).astype(np.int32)
        columns["token_chain"] = new_number[columns["token_chain"]]
        return replace(
            self,
            atom_positions=self.atom_positions[atoms],
            atom_name=self.atom_name[atoms],
            chains=tuple(name for name in self.chains if name in wanted),
            **columns,
        )


# fields of `Structure` that have a value for each token
_TOKEN_COLUMNS = tuple(
    field.name for field in fields(Structure) if field.name.startswith("token_")
)


def joined(parts: list[Structure]) -> Structure:
    """Joins structures that share `names` into one; their chains stay separate."""
    columns: dict[str, Any] = {}
    for name in ("atom_positions", "atom_name", *_TOKEN_COLUMNS):
        columns[name] = np.concatenate([getattr(part, name) for part in parts])
    token_chains = []
    chains: list[str] = []
    for part in parts:
        token_chains.append((part.token_chain + len(chains)).astype(np.int32))
        chains.extend(part.chains)
    columns["token_chain"] = np.concatenate(token_chains)
    return replace(parts[0], chains=tuple(chains), **columns)

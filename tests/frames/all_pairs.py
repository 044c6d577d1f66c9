"""Token frames by all pairs: the plain form, for comparison and benchmarks. O(N_atom^2) memory."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from thinsection.frames.features import atom_chains, backbone_offsets


def token_frame_atoms_all_pairs(  # noqa: PLR0917 - as the function that it specifies
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    angle_threshold: float = 25.0,
    eps: float = 1e-8,
    inf: float = 1e9,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """As `frames.token_frame_atoms`, from every pair of atoms, unchecked.

    Memory: about 7 * N_atom^2 numbers of x's dtype per sample at the peak.
    """
    lead, num_atoms = x.shape[:-2], x.shape[-2]
    num_tokens = batch["token_mask"].shape[-1]
    chain = atom_chains(batch, num_atoms)
    allowed = atom_mask[..., :, None] * atom_mask[..., None, :]
    allowed = allowed * (chain[..., :, None] == chain[..., None, :])
    distance = (
        torch.sum(eps + (x[..., :, None, :] - x[..., None, :, :]) ** 2, dim=-1) ** 0.5
    )
    distance = distance * allowed + inf * (1 - allowed)
    nearest = torch.topk(distance, k=3, dim=-1, largest=False).indices

    start = batch["start_atom_index"].long().expand(*lead, num_tokens)
    is_atom = batch["is_atomized"].bool()
    is_protein = batch["is_protein"].bool() & ~is_atom
    is_nucleotide = (batch["is_dna"] + batch["is_rna"]).bool() & ~is_atom
    offset, exists = backbone_offsets(batch["restype"])
    closest = (
        nearest[..., 1].gather(-1, start),
        start,
        nearest[..., 2].gather(-1, start),
    )

    atoms, usable = [], batch["token_mask"].expand(*lead, num_tokens)
    for i, own in enumerate(closest):
        atom = torch.where(is_atom, own, torch.zeros_like(own))
        atom = torch.where(is_protein, start + offset[..., i], atom)
        atom = torch.where(is_nucleotide, start + offset[..., 3 + i], atom)
        known = is_atom | (is_protein & exists[..., i].bool())
        known = known | (is_nucleotide & exists[..., 3 + i].bool())
        atoms.append(atom)
        usable = usable * known * atom_mask.expand(*lead, num_atoms).gather(-1, atom)
    a, b, c = (x.gather(-2, atom[..., None].expand(*atom.shape, 3)) for atom in atoms)

    u, v = a - b, c - b
    norms = [(eps + torch.sum(w**2, dim=-1)) ** 0.5 for w in (u, v)]
    cosine = torch.einsum("...i,...i->...", u, v) / (norms[0] * norms[1])
    low, high = (
        math.cos(t * math.pi / 180) for t in (180 - angle_threshold, angle_threshold)
    )
    usable = usable * (((cosine > low) & (cosine < high)) | ~is_atom)
    spread = chain.expand(*lead, num_atoms)
    ids = [spread.gather(-1, atom) for atom in atoms]
    return (a, b, c), usable * (ids[0] == ids[1]) * (ids[1] == ids[2])

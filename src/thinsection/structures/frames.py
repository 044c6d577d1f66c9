"""Frames of tokens (three atoms each) as AlphaFold 3 defines them, without N_atom^2.

Only the rows of the start atoms of atomised tokens are ever read of the all-pairs distances, and
only columns of their own chain can give a valid frame. So only those are formed.

Legend: T tokens, A atoms of one sample, `*` batch and sample dimensions. Token features may lack or
have length 1 in dimensions that x has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import BudgetError, StructureError, require
from thinsection.neighbors.api import DEFAULT_BUDGET_BYTES, Impl, choose
from thinsection.neighbors.reference import NO_SELF, NeighborQuery, order_by_group

KEYS = (
    *("token_mask", "num_atoms_per_token", "asym_id", "start_atom_index"),
    *("is_protein", "is_dna", "is_rna", "is_atomized", "restype"),
)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NUM_RESTYPES = 32  # one-hot: 20 amino acids and UNK, A G C U N, DA DG DC DT DN, gap
# residue types (amino acids, RNA, DNA), first of their three columns, offsets
_RNA, _DNA = (slice(21, 26), 3, (7, 11, 5)), (slice(26, 31), 3, (7, 10, 5))
_FRAME_ATOMS = ((slice(21), 0, (0, 1, 2)), _RNA, _DNA)
_TOKENS = 1 << 16  # tokens whose one-hot residue types are converted at a time
ANGLE_THRESHOLD = 25.0  # degrees from a line, AlphaFold 3's
Coordinates = tuple[Tensor, Tensor, Tensor]
# of one structure: positions (A, 3), mask and chains (A,) of atoms; start atoms (T,) of tokens, and
# whether they are searched for
_Sample = tuple[Tensor, ...]
_Pair = tuple[Tensor, Tensor]
_Nearest = Callable[[_Sample], _Pair]
_NUMBERS_PER_PAIR = (
    10  # differences, their squares (3 each), their sum, the mask, both masked
)
_require = partial(require, error=StructureError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOptions:
    """How `token_frame_atoms` works; none changes a frame where distances differ."""

    # 'chain' searches each atom's own chain, ties go to the lower index; 'rows' forms the whole row
    # of each atomised token's start atom: the original's choice among ties and in invalid frames
    impl: Literal["chain", "rows"] = "chain"
    search: Impl = "auto"  # how 'chain' searches, as in `nearest_neighbors`
    # look at values first (holes in token_mask, NaN), which costs a GPU a synchronisation
    check: bool = True
    budget_bytes: int = DEFAULT_BUDGET_BYTES  # bound on the memory of the search

    def __post_init__(self) -> None:
        known, got = ("chain", "rows"), self.impl
        rule = f"impl must be one of {', '.join(known)}"
        require(got in known, rule, f"{got!r}{nearest(got, known)}")


class FrameAtoms(NamedTuple):
    """The frame of each token by atom index."""

    indices: Tensor  # (3, *, T) int64: atoms a, b and c
    valid: Tensor  # (*, T) 0/1, in the dtype to which masks and features promote
    cos_angle: Tensor  # (*, T), of a-b-c


def token_frame_atoms(  # noqa: PLR0917 - the signature of the function that it replaces
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    angle_threshold: float = ANGLE_THRESHOLD,
    eps: float = 1e-8,
    inf: float = 1e9,
    options: FrameOptions = FrameOptions(),
) -> tuple[Coordinates, Tensor]:
    """The three frame atoms of each token and whether they make a frame.

    Standard residues: N, CA, C; nucleotides: C3', C1', C4'; atomised tokens: their atom b between
    its two nearest atoms a and c of the same chain, valid if the angle is wide of a line. Frames
    and mask are those of OpenFold3 0.5's `get_token_frame_atoms` to the bit where no two distances
    are equal; gradients flow to x through the coordinates only.

    Args:
        batch: token features (*, T), or what spreads over token_mask: token_mask,
            num_atoms_per_token, asym_id, start_atom_index, is_protein, is_dna, is_rna, is_atomized
            and one-hot restype (*, T, 32); all 0 for padding.
        x: (*, N_atom, 3) positions, Å, float64, float32, bfloat16 or float16.
        atom_mask: (*, N_atom) 0/1, spread over the dimensions of x; absent atoms may be NaN.
        angle_threshold: degrees from a line, exclusive.
        eps: added to each squared difference, Å^2.
        inf: stands for 'not a neighbour' in 'rows'; no distance reaches it.
        options: how to search; see `FrameOptions`.

    Returns:
        (a, b, c), each (*, N_token, 3), and the mask (*, N_token). Invalid ones are atoms of x too.

    Memory: about 9 * 8 bytes per token and sample beyond the result, 24 bytes per atom, and for the
        search of one sample 72 per atom of atomised tokens' chains, within `options.budget_bytes`.
    Raises StructureError for keys, shapes and dtypes; with `options.check` also for values.

    Source: the contract of OpenFold3 0.5 (Apache-2.0); AlphaFold 3, supplement, section 4.3.2.
    """
    with torch.no_grad():
        how = {"angle_threshold": angle_threshold, "eps": eps, "inf": inf}
        frames = frame_atoms(batch, x.detach(), atom_mask, **how, options=options)
    a, b, c = (_gather_positions(x, index) for index in frames.indices)
    return (a, b, c), frames.valid


def frame_atoms(
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    *,
    angle_threshold: float = ANGLE_THRESHOLD,
    eps: float = 1e-8,
    inf: float = 1e9,
    options: FrameOptions = FrameOptions(),
) -> FrameAtoms:
    """As `token_frame_atoms`, by index and with the angle; for tables. Same Memory and Raises."""
    check_shapes(batch, x, atom_mask)
    tokens, tail = batch["token_mask"].shape, {"restype": (_NUM_RESTYPES,)}
    batch = {key: batch[key].expand(*tokens, *tail.get(key, ())) for key in KEYS}
    if options.check:
        check_values(batch, x, atom_mask)
    chains, atomized = atom_chains(batch, x.shape[-2]), batch["is_atomized"]
    wanted, nearest_two = atomized.bool(), partial(_nearest_in_rows, eps=eps, inf=inf)
    if options.impl == "chain":  # the original asks for the token mask later
        wanted = (atomized * batch["token_mask"]).bool()
        nearest_two = partial(_nearest_in_chain, eps=eps)
    columns = (atom_mask, chains, batch["start_atom_index"].long(), wanted)
    ends, found = _two_nearest(x, columns, partial(nearest_two, options=options))
    indices, usable = _frames(batch, ends, atom_mask, chains)
    cos_angle = _cos_angle(*(_gather_positions(x, index) for index in indices), eps=eps)
    low, high = (
        math.cos(d * math.pi / 180) for d in (180 - angle_threshold, angle_threshold)
    )
    wide = (cos_angle < high) * (cos_angle > low)  # of atomised tokens only
    valid = (wide * atomized + (1 - atomized)) * usable * (found | (atomized == 0))
    return FrameAtoms(indices, valid, cos_angle)


def _two_nearest(
    x: Tensor, columns: _Sample, nearest_two: _Nearest
) -> tuple[Tensor, Tensor]:
    """Second and third (2, *, T) of each start atom's row of distances, itself where there is none.
    The start atom counts. And (*, T) whether both exist."""
    lead = x.shape[:-2]
    mask, chains, start, wanted = (c.expand(*lead, c.shape[-1]) for c in columns)
    ends, found = torch.stack((start, start)), torch.zeros_like(wanted)
    for at in product(*map(range, lead)):
        sample = tuple(values[at] for values in (x, mask, chains, start, wanted))
        tokens, atoms = nearest_two(sample)
        found[at][tokens] = atoms[1] >= 0
        for end, atom in zip(ends, atoms, strict=True):
            end[at][tokens] = torch.where(atom < 0, end[at][tokens], atom)
    return ends, found


def _nearest_in_chain(sample: _Sample, *, eps: float, options: FrameOptions) -> _Pair:
    """Tokens (t,), their two atoms (2, t) or -1. Memory: 52 bytes an atom, and the search's."""
    x, mask, chains, start, wanted = sample
    tokens = (wanted & mask[start].bool()).nonzero()[:, 0]
    if not tokens.numel():
        return tokens, tokens.new_empty(2, 0)
    ids, token_chain = torch.unique(chains[start[tokens]], return_inverse=True)
    place = torch.searchsorted(ids, chains).clamp_(max=ids.numel() - 1)
    atoms = ((ids[place] == chains) & mask.bool()).nonzero()[:, 0]
    atom_chain = place[atoms]
    order, token_order = order_by_group(atom_chain), order_by_group(token_chain)
    atoms, tokens = atoms[order], tokens[token_order]
    no_self = torch.full_like(tokens, NO_SELF)  # the start atom counts as its own first
    of_tokens = (x[start[tokens]], token_chain[token_order], no_self)
    query = NeighborQuery(x[atoms], atom_chain[order], *of_tokens)
    choice = choose(query, 3, impl=options.search, budget_bytes=options.budget_bytes)
    positions = choice.search(
        query, 3, eps=eps, budget_bytes=options.budget_bytes
    ).positions
    found = positions[:, 1:].T
    return tokens, torch.where(found < 0, -1, atoms[found.clamp(min=0)])


def _nearest_in_rows(
    sample: _Sample, *, eps: float, inf: float, options: FrameOptions
) -> _Pair:
    """As above, by torch.topk over whole rows, so that its choice among ties is the original's.
    Masks and chains decide later what is valid. Memory: A * 10 numbers a row, in the budget."""
    x, mask, chains, start, wanted = sample
    tokens, num_atoms = wanted.nonzero()[:, 0], x.shape[0]
    if num_atoms < 3 or not tokens.numel():
        return tokens[:0], tokens.new_empty(2, 0)
    need = _NUMBERS_PER_PAIR * max(4, x.element_size()) * num_atoms
    rule = f"budget_bytes must be >= {need} for impl 'rows'"
    require(options.budget_bytes >= need, rule, options.budget_bytes, error=BudgetError)
    ends = []
    for atom in torch.split(start[tokens], options.budget_bytes // need):
        allowed = (
            mask[atom][:, None]
            * mask[None, :]
            * (chains[atom][:, None] == chains[None, :])
        )
        distance = (
            torch.sum(eps + (x[atom][:, None, :] - x[None, :, :]) ** 2, dim=-1) ** 0.5
        )
        distance = distance * allowed + inf * (1 - allowed)
        ends.append(torch.topk(distance, k=3, dim=-1, largest=False).indices[:, 1:])
    return tokens, torch.cat(ends).T


def _frames(
    batch: Mapping[str, Tensor], ends: Tensor, atom_mask: Tensor, chains: Tensor
) -> _Pair:
    """Atoms (3, *, T) by kind of token, and (*, T) 0/1 whether all exist, present, in one chain."""
    atomized, usable = batch["is_atomized"], batch["token_mask"]
    protein = batch["is_protein"] * (1 - atomized)
    nucleotide = (batch["is_dna"] + batch["is_rna"]) * (1 - atomized)
    start = batch["start_atom_index"].long()
    offsets, exists = backbone_offsets(batch["restype"])
    lead, last = ends.shape[1:-1], chains.shape[-1] - 1
    masks, chains = (values.expand(*lead, last + 1) for values in (atom_mask, chains))
    indices: list[Tensor] = []
    for i, own in enumerate((ends[0], start, ends[1])):
        as_protein, as_nucleotide = start + offsets[..., i], start + offsets[..., 3 + i]
        of_kind = as_protein * protein.long() + as_nucleotide * nucleotide.long()
        index = (own * atomized.long() + of_kind).expand(ends.shape[1:]).clamp(0, last)
        indices.append(index)
        exist = atomized + exists[..., i] * protein + exists[..., 3 + i] * nucleotide
        one_chain = chains.gather(-1, index) == chains.gather(-1, indices[0])
        usable = usable * exist * masks.gather(-1, index) * one_chain
    return torch.stack(indices), usable


def _cos_angle(a: Tensor, b: Tensor, c: Tensor, *, eps: float) -> Tensor:
    u, v = a - b, c - b
    u_norm, v_norm = ((eps + torch.sum(w**2, dim=-1)) ** 0.5 for w in (u, v))
    return torch.einsum("...i,...i->...", u, v) / (u_norm * v_norm)


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -2, index[..., None].expand(*index.shape, 3))


def check_shapes(batch: Mapping[str, Tensor], x: Tensor, atom_mask: Tensor) -> None:
    """Raises StructureError where keys, dtypes or shapes do not fit; looks at no value."""
    missing, shape = [key for key in KEYS if key not in batch], tuple(x.shape)
    _require(
        not missing,
        f"batch must have {', '.join(KEYS)}",
        f"none of {', '.join(missing)}",
    )
    placed = x.ndim >= 2 and x.shape[-1] == 3 and x.shape[-2] > 0
    _require(placed, "x must be of shape (..., N_atom >= 1, 3)", shape)
    _require(
        x.dtype in _DTYPES, "x must be float64, float32, bfloat16 or float16", x.dtype
    )
    tokens = tuple(batch["token_mask"].shape)
    for key in KEYS:
        expected = (*tokens, _NUM_RESTYPES) if key == "restype" else tokens
        got = tuple(batch[key].shape)
        fits = _spreads(got, expected) and (got[-1:] or (1,)) == expected[-1:]
        _require(fits, f"{key} must be of shape {expected}, as token_mask", got)
    atoms = tuple(atom_mask.shape)
    for name, lead in (("token_mask", tokens[:-1]), ("atom_mask", atoms[:-1])):
        rule = f"{name} must spread over the batch dimensions {shape[:-2]} of x"
        _require(_spreads(lead, shape[:-2]), rule, lead)
    _require(
        atoms[-1] == shape[-2],
        f"atom_mask must cover the {shape[-2]} atoms of x",
        atoms,
    )


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Whether a tensor of the shape expands to the other: its last dimensions are those, or 1."""
    pairs = zip(reversed(shape), reversed(over))
    return len(shape) <= len(over) and all(n in (1, m) for n, m in pairs)


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
    """Where frame atoms lie from a residue's first atom, and whether they exist, int64 (*, T, 6).
    Of N, CA, C, C3', C1', C4': -1 where the residue type has none. Without one: 0 and 0."""
    table = torch.tensor([-1.0] * 6 + [0.0] * 6).repeat(_NUM_RESTYPES, 1)
    for kinds, first, offsets in _FRAME_ATOMS:
        table[kinds, first : first + 3] = torch.tensor(offsets).float()
        table[kinds, first + 6 : first + 9] = 1
    table, flat = table.to(restype.device), restype.reshape(-1, _NUM_RESTYPES)
    parts = [(part.float() @ table).long() for part in torch.split(flat, _TOKENS)]
    both = torch.cat(parts).reshape(*restype.shape[:-1], 12)
    return both[..., :6], both[..., 6:]


def _atoms_per_token(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["num_atoms_per_token"].long() * batch["token_mask"].long()

"""Tokens by OpenFold3's own parser, bond filter and tokenizer, beside those of `read_structure`.

    python -m tests.support.openfold3_tokens FOLDER

FOLDER has mmCIF files (.cif). openfold3 0.5.0 and biotite must be installed. The made entries of
`tests.frames.made_entries` are judged too. Prints the entries whose tokens differ, and counts.
Exit code 1 where a made entry differs.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import biotite.structure
import numpy as np
from openfold3.core.data.io.structure.cif import parse_mmcif
from openfold3.core.data.primitives.structure import cleanup
from openfold3.core.data.primitives.structure.tokenization import tokenize_atom_array
from tests.frames.cif_text import write_cif
from tests.frames.made_entries import MADE

from thinsection.frames import read_structure
from thinsection.frames.structure import ATOM

# (chain, number with code, name) -> (tokens, whether single atoms, names of observed atoms)
Tokens = dict[tuple[str, str, str], tuple[int, bool, frozenset[str]]]


def tokens_by_openfold3(path: Path) -> Tokens:
    """Tokens of the asymmetric unit, by the steps that do not choose data for training."""
    atoms = parse_mmcif(path, expand_bioassembly=False, include_bonds=True).atom_array
    cleanup.convert_MSE_to_MET(atoms)
    for step in (
        cleanup.remove_waters,
        cleanup.remove_hydrogens,
        cleanup.prefilter_bonds,
        cleanup.remove_std_residue_terminal_atoms,
    ):
        atoms = step(atoms)
    tokenize_atom_array(atoms)
    tokens: Tokens = {}
    starts = biotite.structure.get_residue_starts(atoms, add_exclusive_stop=True)
    for start, stop in itertools.pairwise(starts):
        residue = atoms[start:stop]
        number = f"{residue.auth_seq_id[0]}{str(residue.ins_code[0]).strip('.? ')}"
        key = (str(residue.label_asym_id[0]), number, str(residue.res_name[0]))
        tokens[key] = (
            len(np.unique(residue.token_id)),
            bool(residue.is_atomized[0]),
            frozenset(map(str, residue.atom_name)),
        )
    return tokens


def our_tokens(path: Path) -> Tokens:
    """The same by `read_structure`."""
    structure = read_structure(path)
    tokens: Tokens = {}
    end = 0
    for token in range(structure.num_tokens):
        start, end = end, end + int(structure.token_num_atoms[token])
        slots = np.arange(start, end)[structure.observed[start:end]]
        name = structure.names[structure.token_residue_name[token]]
        is_selenium = name == "MSE"
        atoms = {structure.names[atom] for atom in structure.atom_name[slots]}
        if is_selenium:
            name = "MET"
            atoms = {"SD" if atom == "SE" else atom for atom in atoms}
        insertion = structure.names[structure.token_insertion[token]]
        number = f"{structure.token_residue[token]}{insertion}"
        key = (structure.chains[structure.token_chain[token]], number, name)
        count, _, earlier = tokens.get(key, (0, False, frozenset()))
        is_single = bool(structure.token_kind[token] == ATOM)
        tokens[key] = (count + 1, is_single, earlier | atoms)
    return tokens


def compare(path: Path) -> str:
    """'equal', or the first residues that differ, or why OpenFold3 does not read the file."""
    try:
        theirs = tokens_by_openfold3(path)
    except (KeyError, ValueError) as error:
        return f"not read by OpenFold3: {type(error).__name__} {error}"
    ours = our_tokens(path)
    if list(ours.items()) == list(theirs.items()):
        return "equal"
    keys = dict.fromkeys([*theirs, *ours])
    different = [key for key in keys if ours.get(key) != theirs.get(key)]
    return f"{len(different)} residues differ, first {different[:3]}"


def main() -> int:
    paths = sorted(Path(sys.argv[1]).glob("*.cif"))
    results = {path.stem: compare(path) for path in paths}
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name, entry in MADE.items():
            path = write_cif(Path(folder) / "made.cif", entry.parts, entry.bonds)
            made[f"made: {name}"] = compare(path)
    for name, result in (results | made).items():
        if result != "equal":
            sys.stdout.write(f"{name}: {result}\n")
    read = [text for text in results.values() if not text.startswith("not read")]
    sys.stdout.write(f"{read.count('equal')} of {len(read)} entries equal\n")
    equal = list(made.values()).count("equal")
    sys.stdout.write(f"{equal} of {len(made)} made entries equal\n")
    return int(equal < len(made))


if __name__ == "__main__":
    sys.exit(main())

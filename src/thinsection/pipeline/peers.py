"""The tools whose folders are written and read, and how they call the tile encoders we have."""

from typing import Any

from thinsection.registry import Entry, Registry


def _tool(name: str, help: str, module: str = "peer_layouts") -> Entry:
    return Entry(name=name, help=help, target=f"thinsection.pipeline.{module}:{name.upper()}")


# of `peer_layouts.Layout`
LAYOUTS: Registry[Any] = Registry(
    "layout",
    "thinsection.layouts",
    (
        _tool("trident", "TRIDENT's job_dir: coordinates, features, slide features."),
        _tool("clam", "CLAM's patches, h5_files, pt_files and its lists."),
        _tool("stamp", "STAMP's feature_dir, coordinates in µm, clini and slide tables."),
        _tool("slide2vec", "slide2vec's tilings, tile embeddings and lists.", "peer_slide2vec"),
    ),
)

# ours -> TRIDENT's `enc_name`, STAMP's `ExtractorName`, slide2vec's registry; '' where it has none.
# STAMP's virchow and virchow2 take the class token alone: ours is its virchow-full.
_TOOLS = ("trident", "stamp", "slide2vec")
_NAMES = {
    "conch_v15": ("conch_v15", "conch1_5", "conchv15"),
    "gigapath": ("gigapath", "gigapath", "gigapath"),
    "h0_mini": ("h0-mini", "", "h0-mini"),
    "h_optimus_0": ("hoptimus0", "h-optimus-0", "h-optimus-0"),
    "h_optimus_1": ("hoptimus1", "h-optimus-1", "h-optimus-1"),
    "hibou_b": ("", "", "hibou-b"),
    "hibou_l": ("hibou_l", "", "hibou-l"),
    "kaiko_vitb16": ("kaiko-vitb16", "", ""),
    "kaiko_vitb8": ("kaiko-vitb8", "", ""),
    "kaiko_vitl14": ("kaiko-vitl14", "", ""),
    "kaiko_vits16": ("kaiko-vits16", "", ""),
    "kaiko_vits8": ("kaiko-vits8", "", ""),
    "lunit_vits8": ("lunit-vits8", "", "lunit"),
    "midnight_12k": ("midnight12k", "", "midnight"),
    "phikon": ("phikon", "", "phikon"),
    "phikon_v2": ("phikon_v2", "", "phikonv2"),
    "uni": ("uni_v1", "uni", "uni"),
    "uni2_h": ("uni_v2", "uni2", "uni2"),
    "virchow": ("virchow", "virchow-full", "virchow"),
    "virchow2": ("virchow2", "", "virchow2"),
}


def peer_encoder(tool: str, encoder: str, label: str) -> str:
    """The tool's name of embeddings whose folder of ours is `features_LABEL`.

    What the label says beside the encoder (own weights, stain normalisation) stays in the name;
    an encoder that the tool does not have keeps ours.
    """
    if tool not in _TOOLS or not label.startswith(encoder):
        return label
    theirs = _NAMES.get(encoder, ("",) * len(_TOOLS))[_TOOLS.index(tool)]
    return (theirs or encoder) + label[len(encoder) :]


def own_encoder(tool: str, name: str) -> str:
    """Our name of an encoder of the tool's; its own where we have none."""
    if tool not in _TOOLS:
        return name
    at = _TOOLS.index(tool)
    return next((ours for ours, names in _NAMES.items() if names[at] == name), name)

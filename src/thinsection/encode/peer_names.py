"""How other tools call the encoders that we have: for their folders, and as names of ours."""

from functools import cache

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


# slide encoders
_POOLERS = {"gigapath_slide": "gigapath", "prov_gigapath": "gigapath", "titan_slide": "titan"}


@cache
def _ours() -> dict[str, str]:
    named = {_plain(t): ours for ours, theirs in _NAMES.items() for t in theirs if t}
    return {"conch_v1_5": "conch_v15", **named, **{name: name for name in _NAMES}}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def our_name(name: str) -> str:
    """Our name of a tile encoder that a tool calls so; the name itself where none does."""
    return _ours().get(_plain(name), name)


def our_slide_encoder(name: str) -> str:
    """Our name of a slide encoder that a tool calls so; the name itself where none does."""
    return _POOLERS.get(_plain(name), name)

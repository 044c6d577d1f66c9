"""A tile encoder: mean and spread of red, green and blue."""

# --8<-- [start:encoder]
import torch
from torch import Tensor

from thinsection.encode import EncoderSpec, TileEncoder, TilePixels


class ColourStats(TileEncoder):
    """Mean and standard deviation of red, green and blue, 6 numbers."""

    spec = EncoderSpec(name="colour_stats", dim=6, tile_px=256, tile_mpp=None)

    def encode(self, tiles_u8: TilePixels) -> Tensor:
        """Embeddings [B, 6] of tiles uint8 [B, H, W, 3], a tensor or a NumPy array."""
        pixels = torch.as_tensor(tiles_u8, device=self.device).flatten(1, 2) / 255
        return torch.cat([pixels.mean(dim=1), pixels.std(dim=1)], dim=1)


# --8<-- [end:encoder]

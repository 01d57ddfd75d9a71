"""The network: configuration, layers that know their constants, f of the paper and of the certified family, stem and head."""

from lipmdeq.model.blocks import FixedPointMap, Fusion, PostFusion, ResidualBlock, read
from lipmdeq.model.config import PRESETS, UNDONE, ModelConfig, configure
from lipmdeq.model.layers import GN, MGN, Chain, Conv, ConvNorm, DownPath, SReLU, Up, UpPath, VariationalDropout
from lipmdeq.model.network import MDEQ, Bottleneck, Head, build
from lipmdeq.model.potential import Held, Potential, PotentialMap, UnitConv, matrix_norm_bound, norm_bounds

"""Norms of convolutions as operators, each exact, upper or lower, and the constraint that keeps them below c in training."""

from lipmdeq.norms.convolution import Norm, conv_norm, lower_norm, reshaped_norm
from lipmdeq.norms.guard import NormGuard, project

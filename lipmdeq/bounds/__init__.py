"""Closed forms, floats and numpy only: constants of single operations, L in four readings, what L guarantees, the way back."""

from lipmdeq import attach

_HOMES = {
    "operations": "check_choice check_constant check_range check_whole empirical_ratio fusion_weights lip_compose lip_conv "
    "lip_conv_reshaped lip_convex lip_down lip_dropout lip_gn lip_mgn lip_relu lip_residual lip_srelu lip_sum lip_up",
    "matrices": "frobenius perron spectral",
    "spec": "ABLATIONS READINGS LipschitzSpec Operations PotentialSpec",
    "banach": "a_posteriori_error a_priori_error a_priori_error_from_step jfb_angle jfb_error neumann_error phantom_error "
    "relative_residual_bound steps steps_to_error",
    "inverse": "feasible largest",
}
__getattr__, __dir__, __all__ = attach(__name__, _HOMES)

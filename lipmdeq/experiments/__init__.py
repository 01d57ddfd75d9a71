"""Runs and what is made of them: parameters, training, records, the paper's tables and figures, the commands.

Light, as ``lipmdeq`` itself: torch is imported only when a name that needs it is used for the first time.
"""

from lipmdeq import attach

_HOMES = {
    "parameters": "ParameterError RunConfig RunError",
    "training": "Run new_model open_data test_images train",
    "step": "Batch Sums evaluate jacobian_weight learning_rate make_adjoint make_solver residual_traces",
    "world": "World",
    "checkpoints": "export_weights half_sha256 load_checkpoint load_model save_checkpoint weights_sha256",
    "record": "Record certificate_of content_sha256 matches_config read_record read_sealed",
    "depth_report": "Depth depth",
    "report": "Summary curves",
    "tables": "Grid Table load promised",
    "rows": "Row Value over_seeds read_rows spread",
    "figures": "PARTS ROUNDING figure3 figure4 figure5 trace work work_paper write",
}
__getattr__, __dir__, __all__ = attach(__name__, _HOMES)

"""The constant L of the whole fixed-point map f, composed from its operations (Section 3.4).

f = post-fusion ∘ fusion ∘ residual, L = L̂ · ‖M‖ · L̄ with the n × n comparison matrix M of the fusion layer:

| reading  | up path j→i, d = j−i | ‖M‖                              |
|----------|----------------------|----------------------------------|
| printed  | 2^d                  | Frobenius, √ΣL̃_i²                |
| reported | conv · norm · 2^d    | Frobenius: the paper's L values  |
| spectral | conv · norm · 2^d    | ‖M‖₂                             |
| perron   | conv · norm · 2^d    | ρ(M), in the norm with weights D |

"printed" leaves out the 1x1 conv and norm of the up path and is no bound for a model that has them; the
others are bounds, each at least as tight as the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lipmdeq.bounds.banach import a_posteriori_error, steps
from lipmdeq.bounds.matrices import frobenius, perron, spectral
from lipmdeq.bounds.operations import (
    check_choice,
    check_range,
    check_whole,
    fusion_weights,
    lip_compose,
    lip_conv_reshaped,
    lip_down,
    lip_dropout,
    lip_gn,
    lip_relu,
    lip_up,
)

READINGS = ("printed", "reported", "spectral", "perron")
# Rows of the paper's ablation table. A name says what f does, here, in `lipmdeq.model` and in configurations alike: S4, S6
# and S7 fuse with weights that sum to one, with "-sum" every weight is one. The authors' code ran S4, S6-sum and S7-sum;
# the paper's text describes S4-sum, S6 and S7.
ABLATIONS = ("S1", "S2", "S3", "S4", "S4-sum", "S5", "S6", "S6-sum", "S7", "S7-sum", "MDEQ")


@dataclass(frozen=True, eq=False)  # holds an array, which has no plain ==
class Operations:
    """Constants of the operations inside f, from which every L here is composed; infinity means "no bound".

    Attributes:
        norm, act, drop: norms with affine part, activations, dropout.
        conv, conv_residual, conv_down: 1x1 convs; 3x3 convs of the residual block; 3x3 stride-2 convs.
        post_norm: the norm after fusion.
        mix1, mix2: (weight of the identity, weight of the branch) in the residual block and in the fusion.
        weights: n × n fusion weights, diagonal unused.
    """

    norm: float
    act: float
    drop: float
    conv: float
    conv_residual: float
    conv_down: float
    post_norm: float
    mix1: tuple[float, float]
    mix2: tuple[float, float]
    weights: np.ndarray

    @property
    def L_hat(self) -> float:
        """Residual block, Eq. (hat): norm3∘act∘(skip + branch · norm2∘dropout∘conv∘act∘norm1∘conv)."""
        skip, branch = self.mix1
        inner = (self.norm, self.conv_residual, self.act, self.norm, self.conv_residual, self.drop)
        return lip_compose(self.norm, self.act, skip + lip_compose(branch, *inner))

    @property
    def L_bar(self) -> float:
        """Post-fusion, Eq. (bar): norm ∘ conv1x1 ∘ act."""
        return lip_compose(self.post_norm, self.conv, self.act)

    def fusion_matrix(self, up: str = "full") -> np.ndarray:
        """M (n × n): M_ii = skip, M_ij = branch · w_ij · L_fuse(i, j); up paths "full" or "printed" (2^d)."""
        check_choice("up", up, ("printed", "full"))
        skip, branch = self.mix2
        extra = (self.conv, self.norm) if up == "full" else ()
        n = len(self.weights)
        M = np.diag(np.full(n, float(skip)))
        for d in range(1, n):  # a path depends on the level difference d alone
            down = lip_compose(branch, lip_down(d, self.conv_down, self.norm, self.act))
            raised = lip_compose(branch, lip_up(2**d), *extra)
            low, high = np.arange(d, n), np.arange(n - d)
            M[low, high] = down * self.weights[low, high]
            M[high, low] = raised * self.weights[high, low]
        return M

    def L_tilde(self, reading: str = "reported") -> np.ndarray:
        """Fusion row by row, Eq. (tilde): L̃_i = √ΣM_ij² (shape n), with the up path of that reading."""
        check_choice("reading", reading, READINGS)
        return np.linalg.norm(self.fusion_matrix("printed" if reading == "printed" else "full"), axis=1)

    def fusion_norm(self, reading: str = "perron") -> float:
        """‖M‖ in that reading."""
        check_choice("reading", reading, READINGS)
        if reading in ("printed", "reported"):
            return frobenius(self.fusion_matrix("printed" if reading == "printed" else "full"))
        return spectral(self.fusion_matrix()) if reading == "spectral" else perron(self.fusion_matrix())[0]

    def L(self, reading: str = "perron") -> float:
        """Eq. (overall): L = L̂ · ‖M‖ · L̄; the Perron reading holds in the norm with weights D."""
        return lip_compose(self.L_hat, self.fusion_norm(reading), self.L_bar)


@dataclass(frozen=True)
class LipschitzSpec:
    """Hyperparameters of Lipschitz MDEQ that fix its Lipschitz constant, under the paper's names.

    Attributes:
        a: slope of the scaled ReLU, in (0, 1].
        c: target norm of the conv operators, > 0.
        gamma: bound γ̄ on |γ| of the norms, > 0.
        alpha1, alpha2: convex mixes in the residual block and in the fusion, in (0, 1).
        n: number of resolutions, whole, 1 … 64. With n = 1 nothing is fused and M = [[1 − α2]]: the convex
            mix with an empty sum.
        p: dropout rate, in [0, 1). `train=False` in the methods switches dropout off.
        post_affine: the paper's L̄ = γ̄ca counts γ̄ for the norm after fusion too. If that norm has no
            affine part (as in the CIFAR model) its constant is 1, not γ̄: set False, then L̄ = ca. The same
            for γ̄ = 1; for γ̄ < 1 only False is sound.
    """

    a: float = 0.4
    c: float = 2.0
    gamma: float = 1.0
    alpha1: float = 0.5
    alpha2: float = 0.3
    n: int = 4
    p: float = 0.3
    post_affine: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # frozen: the checked and converted values are stored once, here
        set_(self, "a", check_range("a", self.a, 0, 1, "(]"))
        for name in ("c", "gamma"):
            set_(self, name, check_range(name, getattr(self, name)))
        for name in ("alpha1", "alpha2"):
            set_(self, name, check_range(name, getattr(self, name), 0, 1))
        set_(self, "n", check_whole("n", self.n, 1, 64))
        set_(self, "p", check_range("p", self.p, 0, 1, "[)"))
        if not isinstance(self.post_affine, bool):
            raise ValueError(f"post_affine = {self.post_affine!r}: must be True or False")

    def operations(self, train: bool = True) -> Operations:
        """The constants of all operations of this spec."""
        return Operations(
            norm=self.gamma,
            act=self.a,
            drop=lip_dropout(self.p, train),
            conv=self.c,
            conv_residual=self.c,
            conv_down=self.c,
            post_norm=self.gamma if self.post_affine else 1.0,
            mix1=(1 - self.alpha1, self.alpha1),
            mix2=(1 - self.alpha2, self.alpha2),
            weights=fusion_weights(self.n),
        )

    def L_hat(self, train: bool = True) -> float:
        """Residual block: (1−α1)γ̄a + α1γ̄³c²a²/(1−p)."""
        return self.operations(train).L_hat

    @property
    def L_bar(self) -> float:
        """Post-fusion: γ̄ca."""
        return self.operations().L_bar

    def L_tilde(self, reading: str = "reported") -> np.ndarray:
        """Fusion, row norms L̃_i of M (shape n)."""
        return self.operations().L_tilde(reading)

    def fusion_matrix(self, up: str = "full") -> np.ndarray:
        """Comparison matrix M of the fusion layer (n × n)."""
        return self.operations().fusion_matrix(up)

    def comparison_matrix(self, train: bool = True) -> np.ndarray:
        """Comparison matrix N = L̄ M L̂ of the whole f (n × n): ‖f_i(z)−f_i(z')‖ ≤ Σ_j N_ij‖z_j−z'_j‖."""
        return self.L_bar * self.fusion_matrix() * self.L_hat(train)

    def L(self, reading: str = "perron", train: bool = True) -> float:
        """The Lipschitz constant of f in one of the `READINGS`."""
        return self.operations(train).L(reading)

    def L_backward(self, reading: str = "perron", train: bool = True) -> float:
        """Backward map x ↦ xJ(z*) + v: ‖J(z*)‖ ≤ L; in the dual norm (weights 1/D) for "perron"."""
        return self.L(reading, train)

    @property
    def D(self) -> np.ndarray:
        """Weights (shape n, min 1) of ‖z‖_D² = Σd_i²‖z_i‖², the norm of the Perron reading, for every p."""
        return perron(self.fusion_matrix())[1]

    @property
    def cond_D(self) -> float:
        """max(D)/min(D): the price of reading a statement about ‖·‖_D in plain l2."""
        return float(self.D.max() / self.D.min())

    def test_mode(self) -> LipschitzSpec:
        """The same spec with dropout off, p = 0."""
        return replace(self, p=0.0)

    def reshaped(self, train: bool = True) -> Operations:
        """What c proves if it bounds the reshaped kernels only: 3c for 3x3, 2c with stride 2, c for 1x1."""
        c3, c2 = lip_conv_reshaped(self.c, 3, 1), lip_conv_reshaped(self.c, 3, 2)
        return replace(self.operations(train), conv_residual=c3, conv_down=c2)

    def ablation(
        self, row: str, *, train: bool = True, eps: float = 1e-5, gamma: float = math.inf, conv: float = math.inf
    ) -> Operations:
        """The constants when a change of the paper's ablation table is undone, or all of them ("MDEQ").

        S1 no clip of γ (constant `gamma`), S2 GN for MGN (γ̄/√eps), S3 free convs (constant `conv`), S4 the
        uniform mean 1/(n−1) for the softmax weights of the fusion, S5/S6/S7 plain sums x + g(x) for the
        first/second/both mixes. "-sum" behind S4, S6 or S7: every weight of the fusion is one. "MDEQ": GN,
        ReLU, plain sums everywhere, while γ and the conv norms are taken to be this spec's gamma and c (MDEQ
        bounds neither). Without a number for `gamma` (S1) or `conv` (S3) there is no bound: L is infinite.
        """
        check_choice("ablation", row, ABLATIONS)
        ops = self.operations(train)
        everything = row == "MDEQ"
        changes: dict = {}
        if row == "S1":
            # only a norm with an affine part is freed
            changes = {"norm": gamma, "post_norm": gamma if self.post_affine else 1.0}
        if row == "S2" or everything:
            changes |= {"norm": lip_gn(ops.norm, eps), "post_norm": lip_gn(ops.post_norm, eps)}
        if row == "S3":
            changes = dict.fromkeys(("conv", "conv_residual", "conv_down"), conv)
        undone, _, fusion = row.partition("-")
        if undone == "S4" or fusion == "sum" or everything:
            changes["weights"] = fusion_weights(self.n, "mean" if row == "S4" else "sum")
        if undone in ("S5", "S7") or everything:
            changes["mix1"] = (1.0, 1.0)
        if undone in ("S6", "S7") or everything:
            changes["mix2"] = (1.0, 1.0)
        if everything:
            changes["act"] = lip_relu()
        return replace(ops, **changes)


@dataclass(frozen=True)
class PotentialSpec:
    """The certified family, ``block: potential``: L is its one parameter tau, whatever the weights.

    f = M·P ∘ h. The residual layers h_j(z) = z − (2/T_j)·K_jᵀσ(K_j z + b_j + u_j), T_j ≥ ‖K_j‖², are 1-Lipschitz, because J = I −
    2AᵀSA, A = K/√T, is symmetric with −I ≼ J ≼ I. So are the paths P_ij. M ≥ 0 has ‖M‖₂ = tau. Hence L = 1·tau in the plain norm.
    Dropout only sets entries of 0 ≼ S ≼ I to 0, or scales S by 1 − p, so L is the same in train and in test mode; n and α2
    shape M, whose norm stays tau. Nothing else enters. :mod:`lipmdeq.model` holds the layers and the proofs.
    """

    tau: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", check_range("tau", self.tau, 0, 1))

    def L(self, train: bool = True) -> float:
        """The Lipschitz constant of f in the plain norm: tau in both modes."""
        return self.tau

    def steps(self, tol: float = 1e-3) -> int:
        """Picard steps from z_0 = 0 after which the relative residual is at most `tol`: never None, since tau < 1."""
        return steps(self.tau, tol)

    @property
    def error_factor(self) -> float:
        """The a-posteriori factor 1/(1 − tau), at any z ‖z − z*‖ is at most this times the residual ‖f(z) − z‖."""
        return a_posteriori_error(self.tau, 1.0)

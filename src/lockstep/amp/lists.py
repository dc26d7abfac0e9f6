"""Which function runs in which type at O1: apex's lists, in three tables that may be changed before `initialize`.

A name is looked up where it stands (``torch``, ``torch.nn.functional`` or ``torch.Tensor``) when casting is turned on;
one that this torch does not have is passed over.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def _words(text: str) -> list[str]:
    return text.split()


_HALF = _words(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv
    addr matmul mm mv addbmm baddbmm bmm"""
)
_FLOAT = _words(
    """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist
    norm prod std sum var renorm"""
)
_PROMOTE = _words("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne")


class Overrides:
    """The lists of one namespace.

    Attributes:
        MODULE: Where the names are looked up.
        FP16_FUNCS: Run in half.
        FP32_FUNCS: Run in float32.
        CASTS: Run in the widest type of their arguments.
        SEQUENCE_CASTS: The same, for functions that take a list of tensors.
        BANNED_FUNCS: Refused by apex for half arguments, run in float32 here: names and what apex said.
    """

    def __init__(
        self,
        module: Any,
        half: list[str],
        single: list[str],
        promote: list[str],
        sequence: list[str],
        banned: list[tuple[str, str]],
    ) -> None:
        self.MODULE = module
        self.FP16_FUNCS, self.FP32_FUNCS, self.CASTS = half, single, promote
        self.SEQUENCE_CASTS, self.BANNED_FUNCS = sequence, banned


functional_overrides = Overrides(
    F,
    half=_words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear"),
    single=_words(
        """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm
    local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
    cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss
    multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss"""
    ),
    promote=[],
    sequence=[],
    banned=[("binary_cross_entropy", "amp does not work out-of-the-box with `F.binary_cross_entropy`")],
)

torch_overrides = Overrides(
    torch, half=list(_HALF), single=list(_FLOAT), promote=list(_PROMOTE), sequence=["cat", "stack"], banned=[]
)

tensor_overrides = Overrides(
    torch.Tensor,
    half=["__matmul__", *_HALF],
    single=["__ipow__", "__pow__", "__rpow__", "cpu", *_FLOAT],
    promote=[
        *_words(
            """__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__
    __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__"""
        ),
        *_PROMOTE,
    ],
    sequence=[],
    banned=[],
)

ALL = (functional_overrides, torch_overrides, tensor_overrides)

# torch promotes half and float by itself in all but these; wrapping what needs no wrapping would slow every addition.
NATIVE_PROMOTION = frozenset(
    _words(
        """add div mul eq ge gt le lt ne addcdiv addcmul atan2 cat stack __add__ __div__ __eq__ __ge__ __gt__
    __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __radd__ __rmul__
    __rsub__ __sub__ __truediv__ __rdiv__ __rtruediv__"""
    )
)

# On a CUDA device autocast promotes these too; on a CPU torch refuses half and float together.
PROMOTED_BY_CUDA = (
    (torch, _words("vdot tensordot scatter_add index_put")),
    (torch.Tensor, _words("vdot scatter_add index_put")),
)

# In place, torch refuses these where others than the first argument have another type; apex cast the others to it.
IN_PLACE = _words("addmm_ addmv_ addr_ addbmm_ baddbmm_")

# Recurrent layers and cells call these, in torch._VF (private; as in torch 2.9 to 2.14). Autocast casts their weights,
# and leaves a float input or hidden state to turn the result into float; apex cast those too.
RECURRENT = _words("rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell rnn_tanh rnn_relu gru lstm")

"""What can be asked of a tensor whose values are not here: shape, dtype, gradient, hooks, identity."""

from typing import Any

import torch
from torch import Tensor

_PROPERTIES = (
    "shape ndim dtype device layout requires_grad grad grad_fn grad_dtype names name itemsize nbytes output_nr "
    "retains_grad _version _backward_hooks _post_accumulate_grad_hooks is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xla is_xpu is_ipu is_hpu is_mtia is_maia is_vulkan"
).split()
_METHODS = (
    "size dim ndimension numel nelement stride storage_offset element_size dim_order is_contiguous is_floating_point "
    "is_complex is_signed is_inference is_shared is_pinned is_conj is_neg get_device requires_grad_ register_hook "
    "register_post_accumulate_grad_hook retain_grad untyped_storage _is_view _is_zerotensor __hash__ __len__"
).split()


def _metadata() -> set[Any]:
    allowed: set[Any] = set()
    for name in _PROPERTIES:
        prop = getattr(Tensor, name, None)
        if prop is not None and hasattr(prop, "__get__"):
            allowed.add(prop.__get__)
            if name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
                allowed.add(prop.__set__)
                if hasattr(prop, "__delete__"):
                    allowed.add(prop.__delete__)
    allowed |= {getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)}
    allowed |= {
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_signed,
        torch.is_tensor,
        torch.get_device,
    }
    allowed |= {
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
    }
    allowed |= {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
    return allowed


METADATA = _metadata()
"""Functions that need nothing but metadata."""

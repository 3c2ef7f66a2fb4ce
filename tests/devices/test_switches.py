"""Switches of the process are the caller's again, in whatever order ranks have turned them back."""

import threading

import pytest
import torch
from fakes.nets import cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgpu_core import parallel_apply


def switches():
    cuda = torch.backends.cuda
    found = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    own = [torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, torch.is_anomaly_enabled()]
    return [*found, *own, torch.get_default_dtype()]


@pytest.mark.parametrize("fails", [False, True])
def test_they_are_put_back(fails):
    before = switches()
    entered, inside, left = (threading.Event() for _ in range(3))

    def first():
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            entered.set()
            assert inside.wait(10)
        left.set()

    def second():
        assert entered.wait(10)
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            inside.set()
            assert left.wait(10)
        torch.set_default_dtype(torch.float64)
        torch.autograd.set_detect_anomaly(True)
        torch._C._set_mkldnn_enabled(False)
        if fails:
            raise KeyError("a rank")

    if fails:
        with pytest.raises(KeyError):
            parallel_apply([first, second], [(), ()], devices=cpu(2))
    else:
        parallel_apply([first, second], [(), ()], devices=cpu(2))
    assert switches() == before

"""Every backend of this repository through the kit that plugin authors get."""

import pytest
import torch

from gmm_registry.testing import BackendParityTests


class TestEagerOnCpu(BackendParityTests):
    device, impl, required = "cpu", "eager", True


class TestTorchGroupedMmOnCpu(BackendParityTests):
    device, impl, required = "cpu", "torch_grouped_mm", hasattr(torch.nn.functional, "grouped_mm")


@pytest.mark.hardware
class TestEagerOnCuda(BackendParityTests):
    device, impl = "cuda", "eager"


@pytest.mark.hardware
class TestTorchGroupedMmOnCuda(BackendParityTests):
    device, impl = "cuda", "torch_grouped_mm"


@pytest.mark.hardware
class TestCudaGroupedGemmOnCuda(BackendParityTests):
    device, impl, width = "cuda", "cuda_grouped_gemm", 8


@pytest.mark.hardware
class TestQuackOnCuda(BackendParityTests):
    device, impl, width = "cuda", "quack", 8


@pytest.mark.hardware
class TestTritonOnCuda(BackendParityTests):
    device, impl = "cuda", "triton"

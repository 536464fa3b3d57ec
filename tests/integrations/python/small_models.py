# SPDX-License-Identifier: Apache-2.0
"""A small model for tests, and the one thread of PyTorch's that its bits hold for."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(61, 48),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 48, 130),
        torch.nn.GELU(),
        torch.nn.LayerNorm(130),
        torch.nn.Linear(130, 61),
    )
    return model.to(dtype)

# SPDX-License-Identifier: Apache-2.0
"""ziggurat.torch's optimizers are those of the engine's table: classes, settings, moments."""

import inspect
import sys

import pytest

torch = pytest.importorskip("torch")

import ziggurat.torch
from ziggurat._library.state_kinds import begins_with_param, formats, has_codes, moments_of, optimizers
from ziggurat._optimizer.plain_optimizer import plain_optimizer


def weight():
    return torch.nn.Parameter(torch.linspace(-1.0, 1.0, 24).reshape(4, 6))


@pytest.mark.parametrize("name", optimizers())
def test_a_class_has_the_settings_of_the_table(name):
    its = optimizers()[name]
    kind = getattr(ziggurat.torch, its.title)
    assert kind._kind == name
    arguments = inspect.signature(kind).parameters
    optimizer = kind([weight()])
    for setting, default in its.settings.items():
        default = tuple(default) if setting == "betas" else default
        if kind.__init__.__module__ == "ziggurat.torch":  # it is written out
            assert arguments[setting].default == default
        given = optimizer.defaults[setting]
        assert (tuple(given) if setting == "betas" else given) == default


@pytest.mark.parametrize("name", optimizers())
def test_a_step_makes_the_moments_of_the_table(name):
    param = weight()
    param.grad = torch.full_like(param, 0.5)
    optimizer = getattr(ziggurat.torch, optimizers()[name].title)([param])
    optimizer.step()
    assert set(optimizer.state_dict()["state"][0]) == {"step", *moments_of(name)}
    optimizer.close()


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd"])
def test_a_class_that_nobody_writes_out_steps_like_one_that_is(name):
    its = optimizers()[name]
    more = {"momentum": 0.5} if name == "sgd" else {"betas": (0.8, 0.9)}
    params = []
    for kind in (getattr(ziggurat.torch, its.title), plain_optimizer(its)):
        param = weight()
        optimizer = kind([param], 1e-2, weight_decay=0.1, **more)
        for step in range(3):
            param.grad = torch.cos(torch.arange(24.0)).reshape(4, 6) * (step + 1)
            optimizer.step()
        optimizer.close()
        params.append(param.detach())
    assert torch.equal(*params)


def test_a_class_that_the_table_lacks_is_no_attribute():
    with pytest.raises(AttributeError, match="'ziggurat.torch' has no attribute 'AdaMax'"):
        ziggurat.torch.AdaMax  # noqa: B018
    with pytest.raises(TypeError, match=r"Lion\(\) has no argument 'eps'"):
        plain_optimizer(optimizers()["lion"])([weight()], eps=1e-8)


def test_formats_say_what_python_asks_of_them():
    assert [name for name, its in formats().items() if its.codes] == ["8bit"]
    assert has_codes("8bit") and not has_codes("fp32") and not has_codes("odd") and not has_codes(None)
    assert begins_with_param("fp32", 4) and not begins_with_param("fp32", 2)
    assert begins_with_param("split", 2) and not begins_with_param("odd", 4)
    assert [name for name, its in formats().items() if its.rounds_state] == ["bf16-moments", "bf16"]


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))

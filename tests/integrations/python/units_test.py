# SPDX-License-Identifier: Apache-2.0
"""Parameters that the engine keeps, through Python without PyTorch: the bits of parameters that are lent, threads that wait
for one another, and what is refused."""

import sys
import threading
from array import array

import pytest

import ziggurat

COUNTS = {"embedding": 20_000, "scale": 3, "first": 30_000, "bias": 77}
UNITS = {"embedding": 0, "scale": 0, "first": 1, "bias": 1}


def values_of(count, seed):
    return array("f", [((i * 7 + seed * 3) % 11) / 8 - 0.5 for i in range(count)])


def address(values):
    return values.buffer_info()[0]


@pytest.fixture
def runtime():
    opened = ziggurat.Runtime(threads=2)
    yield opened
    opened.close()


def streamed(runtime, folder, tier="nvme", device_memory="1MiB"):
    params = [ziggurat.Param(name, (count,), "fp32", None, unit=UNITS[name]) for name, count in COUNTS.items()]
    settings = {"store": str(folder), "placement": f"params={tier},optimizer=nvme", "device_memory": device_memory}
    return ziggurat.Engine(runtime, params, settings)


def train(engine, steps):
    for step in steps:
        for index, count in enumerate(COUNTS.values()):
            if step == 2 and index == 1:
                continue  # without a gradient
            gradient = values_of(count, step + index)
            engine.add_gradient(index, "fp32", address(gradient), count)
        engine.step([ziggurat.GroupStep(lr=0.01)])


def read(engine):
    all_values = []
    for index, count in enumerate(COUNTS.values()):
        values = array("f", bytes(4 * count))
        engine.read_param(index, address(values))
        all_values.append(values)
    return all_values


@pytest.mark.parametrize("tier", ["nvme", "host", "device"])
def test_the_bits_of_parameters_that_are_lent(runtime, tmp_path, tier):
    lent = [values_of(count, index) for index, count in enumerate(COUNTS.values())]
    params = [
        ziggurat.Param(name, (count,), "fp32", address(values))
        for (name, count), values in zip(COUNTS.items(), lent, strict=True)
    ]
    engine = ziggurat.Engine(runtime, params, {"store": str(tmp_path / "lent")})
    train(engine, range(4))
    engine.wait()
    engine.close()

    engine = streamed(runtime, tmp_path / "streamed", tier)
    for index, count in enumerate(COUNTS.values()):
        first = values_of(count, index)
        engine.write_param(index, address(first))
    train(engine, range(2))
    engine.make_durable()
    engine.close()
    engine = streamed(runtime, tmp_path / "streamed", tier)
    assert engine.resumed and engine.generation == 2
    train(engine, range(2, 4))
    assert read(engine) == lent
    engine.close()


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_a_frozen_parameter_is_given_to_each_engine_and_needs_no_store(runtime, tmp_path, tier):
    base, adapter = values_of(20_000, 3), values_of(77, 1)
    params = [
        ziggurat.Param("adapter", (77,), "fp32", None),
        ziggurat.Param("base", (20_000,), "fp32", None, frozen=True),
    ]
    settings = {"store": str(tmp_path), "placement": f"params={tier},optimizer=nvme", "device_memory": "1MiB"}
    for generation in range(2):
        engine = ziggurat.Engine(runtime, params, settings)
        assert engine.generation == generation
        engine.write_param(1, address(base))
        if generation == 0:
            engine.write_param(0, address(adapter))
        engine.add_gradient(0, "fp32", address(adapter), 77)
        with pytest.raises(ziggurat.InvalidArgument, match="the parameter is frozen"):
            engine.add_gradient(1, "fp32", address(base), 20_000)
        engine.step([ziggurat.GroupStep(lr=0.01)])
        found = array("f", bytes(4 * 20_000))
        engine.read_param(1, address(found))
        assert found == base
        engine.make_durable()
        engine.close()
    engine = ziggurat.Engine(runtime, params[1:], {**settings, "store": str(tmp_path / "none")})
    engine.write_param(0, address(base))
    with pytest.raises(ziggurat.InvalidArgument, match="every parameter is frozen"):
        engine.step([ziggurat.GroupStep(lr=0.01)])
    engine.close()
    assert not list((tmp_path / "none").iterdir())


def test_a_gradient_is_read_as_it_is_so_far(runtime, tmp_path):
    engine = streamed(runtime, tmp_path)
    gradient, sum_so_far = values_of(77, 1), array("f", bytes(4 * 77))
    assert not engine.read_gradient(3, address(sum_so_far))
    for _ in range(2):
        engine.add_gradient(3, "fp32", address(gradient), 77, 0.5)
    assert engine.read_gradient(3, address(sum_so_far))
    assert sum_so_far == gradient
    engine.close()


def test_a_thread_waits_for_what_another_releases(runtime, tmp_path):
    engine = streamed(runtime, tmp_path, "host", "320KiB")  # of the units, one at a time
    engine.expect_units([0, 1])
    held = []

    def use(unit):
        for _ in range(50):
            engine.acquire(unit)
            held.append(unit)
            assert len(held) == 1
            held.remove(unit)
            engine.release(unit)

    threads = [threading.Thread(target=use, args=(unit,)) for unit in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.acquire(0)
    with pytest.raises(ziggurat.ResourceExhausted, match="release one before, or give"):
        engine.acquire(1)
    engine.release(0)
    engine.close()


def test_what_is_refused(runtime, tmp_path):
    engine = streamed(runtime, tmp_path)
    with pytest.raises(ziggurat.InvalidArgument, match="'bias'\\): the parameter is away: acquire its unit 1"):
        engine.address_of(3)
    engine.acquire(1)
    places = ziggurat._library.native.Places([3, 2])
    engine.find(places)
    assert list(places.addresses) == [engine.address_of(3), engine.address_of(2)]
    assert engine.address_of(3) != engine.address_of(2)
    with pytest.raises(ziggurat.InvalidArgument, match="unit 1 is acquired"):
        engine.step([ziggurat.GroupStep(lr=0.01)])
    engine.release(1)
    with pytest.raises(ziggurat.InvalidArgument, match="is not acquired"):
        engine.release(1)
    engine.close()
    with pytest.raises(ziggurat.InvalidArgument, match="device_memory"):
        ziggurat.Engine(runtime, [ziggurat.Param("w", (4,), "fp32", None)], {"store": str(tmp_path / "other")})


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))

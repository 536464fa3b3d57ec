# SPDX-License-Identifier: Apache-2.0
"""Several threads in one model of ziggurat.torch.offload(): one at a time uses it, and another that comes meanwhile is refused by
name and harms nothing.

Run by pytest; as a script it exits with 77 where PyTorch or pytest is missing, or PyTorch is older than offload() takes.
"""

import sys
import threading
from collections.abc import Callable

try:
    import pytest
    import torch
    from forked_runs import forked_runs
    from small_models import one_thread  # noqa: F401, a fixture
    from streamed_models import gpt, loss_of, offloaded, pinned, same_with_and_without, stepped, tokens_of, train
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    import missing_peer

    missing_peer.skip(missing)

import ziggurat
from ziggurat.torch import gathered, offload

DEPTH = 70  # PyTorch runs reentrant backwards beyond the 60th in threads of its own


def in_thread(use: Callable[[], object]) -> BaseException | None:
    """Runs `use` in a thread, and returns its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            use()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def gather(model: torch.nn.Module) -> None:
    with gathered(model.narrow.weight):
        model.narrow.weight.sum()


USES = {
    "forward": lambda model, loss: model(tokens_of(5)[:, :-1]),
    "evaluation": lambda model, loss: torch.no_grad()(model)(tokens_of(5)[:, :-1]),
    "backward": lambda model, loss: loss.backward(),
    "gathered": lambda model, loss: gather(model),
    "state_dict": lambda model, loss: model.state_dict(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["forward", "backward", "gathered"])
def test_a_thread_that_comes_while_another_uses_the_model_is_refused(use, where):
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        plain = not hasattr(model, "_offloaded")
        found: list[BaseException | None] = []

        def meet(*_):
            if not found and not plain:
                found.append(in_thread(lambda: USES[use](model, loss)))

        loss = loss_of(model, tokens_of(6))
        block = model.blocks[1].mlp
        hooked = {
            "forward": block.register_forward_hook,
            "backward": block.register_full_backward_hook,
            "gathered": lambda hook: None,
        }[where](meet)
        if where == "gathered":
            with gathered(model.narrow.weight):
                meet()
        loss_of(model, tokens_of(7)).backward()
        if hooked is not None:
            hooked.remove()
        if not plain:
            assert not pinned(model)
            assert isinstance(found[0], ziggurat.InvalidArgument)
            assert "is needed in thread 'other' while thread 'MainThread' uses the model" in str(found[0])
        optimizer.zero_grad()  # a backward that fails has made some
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


@pytest.mark.parametrize("call", ["step", "forward"])
def test_a_thread_that_trains_while_another_copies_the_model_is_refused(call):
    """Else the copies would be from before the step and from after."""

    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        plain = not hasattr(model, "_offloaded")
        loss = loss_of(model, tokens_of(6))
        loss.backward()
        calls = {"step": optimizer.step, "forward": lambda: loss_of(model, tokens_of(7))}
        found: list[BaseException | None] = []
        hooked = model.blocks[1].register_state_dict_pre_hook(lambda *_: found.append(in_thread(calls[call])))
        if not plain:
            model.state_dict()
            assert "is needed in thread 'other' while thread 'MainThread' uses the model" in str(found[0])
        hooked.remove()
        optimizer.step()
        optimizer.zero_grad()
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_thread_that_comes_while_another_opens_the_engine_is_refused():
    model = offload(gpt(), memory="1GiB")
    optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
    found: list[BaseException | None] = []
    opened, optimizer.open = optimizer.open, lambda: (
        found.append(in_thread(lambda: model(tokens_of(5)[:, :-1]))),
        opened(),
    )
    train(model, optimizer, range(1))
    assert "thread 'other' while another one opens the engine" in str(found[0])
    optimizer.close()


def test_threads_that_take_turns_are_as_one():
    def run(offload):
        model = offload(gpt())
        optimizer = stepped(model)
        losses: list[float] = []
        for step in range(3):
            loss: list[torch.Tensor] = []
            assert in_thread(lambda: loss.append(loss_of(model, tokens_of(step)))) is None
            assert in_thread(loss[0].backward) is None
            losses += train(model, optimizer, range(step, step + 1))
        optimizer.close()
        return losses

    same_with_and_without(run)


def test_a_thread_that_has_ended_uses_nothing():
    """What create_graph keeps until the step would have the thread's use go on."""

    def run(offload):
        model = offload(gpt(), memory="1GiB")
        optimizer = stepped(model)
        params = list(model.parameters())

        def differentiate() -> None:
            torch.autograd.grad(loss_of(model, tokens_of(5)), params, create_graph=True)

        assert in_thread(differentiate) is None
        with gathered(params):
            sums = [param.sum().item() for param in params]
        losses = train(model, optimizer, range(1, 3))
        optimizer.close()
        return sums, losses

    same_with_and_without(run)


def test_threads_without_order_have_right_values_or_an_error():
    model = gpt()
    optimizer = offloaded(model)
    with torch.no_grad():
        expected = model(tokens_of(5)[:, :-1])
    begin = threading.Barrier(3)
    errors: list[BaseException] = []
    right: list[bool] = []

    def compute() -> None:
        begin.wait()
        for _ in range(30):
            try:
                with torch.no_grad():
                    right.append(torch.equal(model(tokens_of(5)[:, :-1]), expected))
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(right), len(errors))
    assert right and all(right)
    assert all(isinstance(error, ziggurat.InvalidArgument) for error in errors)
    assert all("use an offloaded model in one thread at a time" in str(error) for error in errors)
    assert not pinned(model)
    train(model, optimizer, range(1, 2))
    optimizer.close()


def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have(monkeypatch):
    """One that had come to the model and not yet been let in."""
    model = gpt()
    optimizer = offloaded(model)
    comes, goes_on = threading.Event(), threading.Event()

    def is_of_pytorch(thread: threading.Thread) -> bool:
        comes.set()
        goes_on.wait()
        return False

    def use() -> None:
        with pytest.raises(ziggurat.InvalidArgument, match="a forked process has no engine"):
            model(tokens_of(5)[:, :-1])

    monkeypatch.setattr("ziggurat._streaming.one_thread._is_of_pytorch", is_of_pytorch)
    other = threading.Thread(target=lambda: model(tokens_of(5)[:, :-1]))
    with forked_runs() as runs:
        other.start()
        comes.wait()
        try:
            assert runs.status_of(runs.started(use), within=60) == 0
        finally:
            goes_on.set()
            other.join()
    optimizer.close()


def test_threads_of_pytorch_run_backward_for_the_one_that_waits():
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(DEPTH))

        def forward(self, x: torch.Tensor, begin: int = 0) -> torch.Tensor:
            def rest(x: torch.Tensor) -> torch.Tensor:
                x = torch.tanh(self.layers[begin](x))
                return x if begin == DEPTH - 1 else self.forward(x, begin + 1)

            return checkpoint(rest, x, use_reentrant=True)

    def run(offload):
        torch.manual_seed(1)
        model = offload(Deep(), memory="1MiB")
        optimizer = ziggurat.torch.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 8, requires_grad=True)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses

    same_with_and_without(run)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))

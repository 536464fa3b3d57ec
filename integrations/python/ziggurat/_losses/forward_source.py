# SPDX-License-Identifier: Apache-2.0
"""Reads in the source of a causal language model's forward what it does with its logits."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from ziggurat._library.native import Unimplemented


def head_of_forward(kind: type[Any]) -> str:
    """Returns the name of the module that makes the logits, if forward does nothing else with them than to
    scale or limit them, to give them to its loss_function and to return them:

        logits = self.lm_head(hidden_states)
        loss = self.loss_function(logits, labels, ...)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    Errors: Unimplemented, with the line that does something else."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        raise _not_understood(kind, "its source cannot be read") from None
    losses = [call for call in _calls(function) if _own(call.func) == "loss_function"]
    if len(losses) != 1:
        raise _not_understood(kind, f"it calls its loss_function {len(losses)} times, not once")
    logits = _logits_of(losses[0])
    if logits is None:
        raise _not_understood(kind, f"line '{ast.unparse(losses[0])}'")
    heads = []
    known: set[ast.AST] = set(_given_on(function, logits))
    for line in ast.walk(function):
        if not isinstance(line, ast.Assign) or not _is_name(line.targets[0], logits):
            continue
        known.update(line.targets if len(line.targets) == 1 else ())
        inner = _unscaled(line.value)
        if _is_name(inner, logits):
            known.add(inner)
        elif isinstance(inner, ast.Call) and len(inner.args) == 1 and not inner.keywords:
            heads.append(_own(inner.func))
        else:
            heads.append(None)
    for node in ast.walk(function):
        if _is_name(node, logits) and node not in known:
            line_text = source.splitlines()[node.lineno - 1].strip()  # type: ignore[attr-defined]
            raise _not_understood(kind, f"line '{line_text}'")
    if len(heads) != 1 or heads[0] is None:
        raise _not_understood(kind, f"its '{logits}' are not one call of one head")
    return heads[0]


_TANH = ("torch.tanh", "nn.functional.tanh")


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _own(node: ast.AST) -> str | None:
    """Returns NAME if the node is self.NAME."""
    own = isinstance(node, ast.Attribute) and _is_name(node.value, "self")
    return node.attr if own else None  # type: ignore[attr-defined]


def _is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _logits_of(loss: ast.Call) -> str | None:
    """Returns the name of the logits that a call of loss_function gets, if it gets the labels too."""
    given: dict[str | None, ast.AST] = dict(zip(("logits", "labels"), loss.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in loss.keywords}
    logits = given.get("logits")
    if not _is_name(given.get("labels"), "labels") or not isinstance(logits, ast.Name):
        return None
    return logits.id


def _unscaled(value: ast.AST) -> ast.AST:
    """Returns the value before it was scaled, limited by tanh, or made fp32."""
    while True:
        if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Div)):
            value = value.left
        elif isinstance(value, ast.Call) and ast.unparse(value.func) in _TANH:
            value = value.args[0]
        elif (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("float", "contiguous")
            and not value.args
        ):
            value = value.func.value
        else:
            return value


def _given_on(function: ast.AST, logits: str) -> Iterator[ast.AST]:
    """Yields the logits where they are given to the loss, returned, or asked for their device."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _own(node.func) == "loss_function":
            yield from (one for one in node.args[:1] if _is_name(one, logits))
        if isinstance(node, ast.keyword) and node.arg == "logits":
            yield node.value
        if isinstance(node, ast.Tuple) and _is_name(node.elts[0] if node.elts else None, logits):
            yield node.elts[0]
        if isinstance(node, ast.Attribute) and node.attr == "device":
            yield node.value


def _not_understood(kind: type[Any], why: str) -> Unimplemented:
    return Unimplemented(
        f"chunked_loss=True: the forward of {kind.__name__} may need its logits: {why}; leave "
        "chunked_loss out, or compute the loss with ziggurat.torch.chunked_cross_entropy()"
    )

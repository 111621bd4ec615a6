"""What follows a layer in a graph of `torch.compile` becomes part of its kernels: a ReLU, or an addition and a ReLU.

The compiler fuses pointwise operators with each other and with reductions, but not into an operator that it does not
know. `JoinJunctions` is a pass over its graph of forward and backward together: it rewrites

    relu(layer(x))       and   relu(layer(x) + z)

into one operator each way, whose forward adds and activates, and whose backward masks the gradient and returns what
goes to `z`. Where the gradient of the output is itself a sum, the backward adds it up too. The compiler's own passes
then see fewer operators. A graph in which something else looks at the values in between stays as it is.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

# The arguments of the two operators by name, in the order of their schemas.
FORWARD = (
    "x", "weight", "bias", "residual", "mean", "matrix", "num_batches", "momentum", "is_covariance", "group_size",
    "num_iters", "eps", "exact", "relu",
)  # fmt: skip
BACKWARD = (
    "grad", "more", "x", "weight", "state", "output", "group_size", "num_iters", "eps", "exact", "needs_input",
    "needs_residual",
)  # fmt: skip


def install() -> None:
    """Let the compiler run the pass over what it compiles now; called while a graph is made.

    Passes that the user has set run first.
    """
    from torch._inductor import config

    given, kind = config.joint_custom_pre_pass, _pass_class()
    if not isinstance(given, kind):
        config.joint_custom_pre_pass = kind(() if given is None else (given if isinstance(given, list) else [given]))


@functools.cache
def _pass_class() -> Any:
    """The class of the pass: its base is imported with the compiler, not with this package."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class JoinJunctions(CustomGraphPass):
        def __init__(self, first: Sequence[Any]):
            self.first = tuple(first)

        def __call__(self, graph: Graph) -> None:
            for each in self.first:
                each(graph)
            join(graph)

        def uuid(self) -> Any:
            # None keeps the compiler from caching what a pass without an identity has changed.
            known = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.first]
            return None if None in known else (get_hash_for_files((__file__,)), *known)

    return JoinJunctions


def join(graph: Graph) -> int:
    """Join what can be joined, and return how many layers have been."""
    count = 0
    for layer in [node for node in graph.nodes if _is_layer(node)]:
        # Found one by one: joining a layer replaces nodes that the next junction may consist of.
        junction = _junction_of(layer)
        if junction is not None:
            _join(graph, junction)
            count += 1
    if count:
        from torch._inductor.pattern_matcher import stable_topological_sort

        # A layer now comes after what is added to it, and so must those who read its statistics.
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
    return count


def _is_layer(node: Node) -> bool:
    forward = torch.ops.iternorm.fused_forward.default
    # An operator that changes running statistics stands in a graph without mutation under this name.
    functional = node.target is torch.ops.higher_order.auto_functionalized_v2 and node.args[0] is forward
    return node.op == "call_function" and (node.target is forward or functional)


def _asked(layer: Node) -> dict[str, Any]:
    return dict(layer.kwargs) if layer.kwargs else dict(zip(FORWARD, layer.args, strict=True))


class Junction(NamedTuple):
    """A layer's node and its output's, what is added to it, and the nodes that are then left out, the last first."""

    layer: Node
    output: Node
    residual: Node | None
    followers: tuple[Node, ...]


def _junction_of(layer: Node) -> Junction | None:
    asked = _asked(layer)
    output = _item(layer, 0)
    if asked["relu"] or asked["residual"] is not None or output is None:
        return None
    residual, follower = None, _only_user(output)
    followers = [follower]
    if follower is not None and _is_sum(follower):
        first, second = follower.args[:2]
        residual = second if first is output else first
        if not isinstance(residual, Node) or residual is output or not _is_alike(residual, output):
            return None
        followers.append(_only_user(follower))
    last = followers[-1]
    if last is None or last.target is not torch.ops.aten.relu.default:
        return None
    return Junction(layer, output, residual, tuple(reversed(followers)))  # pyright: ignore[reportArgumentType]


def _join(graph: Graph, junction: Junction) -> None:
    layer, output, residual, followers = junction
    _ask(layer, {**_asked(layer), "residual": residual, "relu": True})
    activated = followers[0]
    output.meta = dict(activated.meta)
    activated.replace_all_uses_with(output)
    for node in followers:
        graph.erase_node(node)
    state = _item(layer, 1)
    for user in [] if state is None else list(state.users):
        if user.target is torch.ops.iternorm.fused_backward.default:
            _join_backward(graph, user, output, residual is not None)


def _ask(layer: Node, asked: dict[str, Any]) -> None:
    if layer.kwargs:
        layer.kwargs = asked
    else:
        layer.args = tuple(asked.values())


def _join_backward(graph: Graph, backward: Node, output: Node, has_residual: bool) -> None:
    """Let the operator mask its gradient itself, if the mask is all that precedes it."""
    asked: dict[str, Any] = dict(zip(BACKWARD, backward.args, strict=True))
    masked = asked["grad"]
    grad = _masked_by(masked, output)
    # Without a residual, a second user of the masked gradient would need it in memory all the same.
    if grad is None or (not has_residual and _only_user(masked) is None):
        return
    needs_residual = len(masked.users) > 1
    more = None
    if needs_residual and _is_sum(grad) and _only_user(grad) is not None:
        # What comes back through a shortcut, and through the layers beside it.
        first, second = grad.args
        if all(isinstance(part, Node) and _is_alike(part, output) for part in (first, second)):
            grad, more = first, second
    asked.update(grad=grad, more=more, output=output, needs_residual=needs_residual)
    backward.args = tuple(asked.values())
    if needs_residual:
        backward.meta["val"] = (*backward.meta["val"][:3], masked.meta["val"])
        with graph.inserting_after(backward):
            passed = graph.call_function(operator.getitem, (backward, 3))
        passed.meta = dict(masked.meta)
        masked.replace_all_uses_with(passed)


def _masked_by(node, output: Node) -> Node | None:
    """The gradient of a ReLU's output, if `node` is what the ReLU's backward makes of it."""
    if not isinstance(node, Node):
        return None
    aten = torch.ops.aten
    if node.target is aten.threshold_backward.default:
        grad, result, threshold = node.args
        return grad if _aliased(result) is output and threshold == 0 else None  # pyright: ignore[reportReturnType]
    if node.target is not aten.where.self:
        return None
    condition, zero, grad = node.args
    if not (isinstance(condition, Node) and condition.target is aten.le.Scalar and _is_zero(zero)):
        return None
    compared, threshold = condition.args
    return grad if _aliased(compared) is output and threshold == 0 else None  # pyright: ignore[reportReturnType]


def _aliased(node: Any) -> Any:
    """What a node stands for: autograd's graph has aliases of saved outputs."""
    while isinstance(node, Node) and node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.args[0]
    return node


def _is_zero(node: Any) -> bool:
    aten = torch.ops.aten
    if isinstance(node, Node) and node.target is aten.full.default:
        node = node.args[1]
    elif isinstance(node, Node) and node.target is aten.scalar_tensor.default:
        node = node.args[0]
    return isinstance(node, int | float) and node == 0


def _item(node: Node, index: int) -> Node | None:
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
    return found[0] if len(found) == 1 else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum(node: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs


def _is_alike(first: Node, second: Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device

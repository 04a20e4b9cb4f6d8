"""Functions of torch that Thunder does not know, or not with these arguments, are traced by others or run as they are."""

from __future__ import annotations

import collections
import heapq
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Applied, AppliedEach, Beside
from coded import coded
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")


def _binary(y: torch.Tensor) -> torch.Tensor:
    target, ones = (y.detach() > 0).double(), torch.ones(4, dtype=torch.float64)
    weighted = F.binary_cross_entropy_with_logits(y, target, weight=ones * 3, pos_weight=ones / 2, reduction="sum")
    module = nn.BCEWithLogitsLoss(pos_weight=ones * 2)(y, target)
    parts = F.binary_cross_entropy_with_logits(y, target, ones * 3, reduce=False) * y
    return weighted + module + parts + F.binary_cross_entropy(input=y.sigmoid(), target=target, weight=ones * 2)


def _clear(y: torch.Tensor) -> torch.Tensor:
    plain, ordered = {"a": y, "b": y * 2}, collections.OrderedDict(a=y, b=y * 3, c=y * 4)
    first, last = ordered.popitem(last=False)[1], ordered.popitem()[1]
    total = plain["b"] + ordered["b"]
    plain.clear()
    ordered.clear()
    plain["a"] = first * last
    return total * plain["a"] + len(plain) + len(ordered)


Functions = dict[str, Callable[..., torch.Tensor]]


def _parts(y: torch.Tensor) -> list[torch.Tensor]:
    return [*y.chunk(2, dim=-1), torch.chunk(y, 3)[0], *torch.unbind(y), *y[:, None].unbind(dim=1), *y[:1].unbind(-2)]


def _attend(y: torch.Tensor) -> torch.Tensor:
    heads = y.view(1, 4, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads.repeat(1, 2, 1, 1), heads, heads, None, 0.0, True, enable_gqa=True)


def _pairs(y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(y.reshape(-1, 2))


def _shaped(y: torch.Tensor) -> torch.Tensor:
    pairs = torch.cat([_pairs(y), torch.polar(y.abs(), y).flatten(), torch.complex(y, y * 2).reshape(16)])
    wide = pairs.view(4, 10).transpose(0, 1).permute(1, 0).unsqueeze(0).squeeze(0).expand(2, 4, 10)
    return (
        torch.view_as_real(torch.stack([wide, wide]).contiguous()) * torch.arange(1, 21).view(10, 2) + wide.abs().sum()
    )


def _append(y: torch.Tensor) -> torch.Tensor:
    parts = [y]
    parts.append(torch.cat(parts) * 2)
    parts += [torch.stack(parts).sum(0)]
    return torch.cat(tensors=parts)


def _replace(y: torch.Tensor) -> torch.Tensor:
    parts = [y, y * 2]
    first = torch.cat(parts)
    parts.reverse()
    second = torch.cat(tensors=parts)
    parts[0] = y * 3
    return first + second * torch.cat(parts)


def _resize(y: torch.Tensor) -> torch.Tensor:
    sizes = [2, 8]
    wide = y.reshape(sizes)
    sizes[0] = 8
    return wide @ torch.ones(sizes, dtype=y.dtype)


def _index(y: torch.Tensor) -> torch.Tensor:
    rows, named = [0, 1], {"parts": [y, y * 2]}
    few, joined = y[rows, :] + y[..., rows].mT, torch.cat(named["parts"])
    rows.append(2)
    named["parts"].append(y)
    return few.sum() + joined


def _edit(y: torch.Tensor) -> torch.Tensor:
    parts, named = [y], {"first": y, "second": y * 2}
    parts.insert(0, y * 3)
    parts.insert(-1, y * 5)
    copied = list(parts)
    copied.clear()
    name, last = named.popitem()
    return torch.cat(parts) * len(name) + last.sum() * len(named) + len(copied)


def _nll(y: torch.Tensor) -> torch.Tensor:
    scores, targets = y.log_softmax(1), torch.tensor([1, 3, 0, 2])
    losses = F.nll_loss(scores, targets) + F.nll_loss(scores, targets, None, False, 3) * F.nll_loss(
        scores, targets, y[0].detach()
    )
    return losses + F.nll_loss(scores, targets, None, None, 1, False)


def _zeros(y: torch.Tensor) -> torch.Tensor:
    return y - y.detach()


TARGETS, WEIGHT = torch.tensor([0, -100, 2, 1]), torch.tensor([0.5, 1.0, 3.0, 2.0], dtype=torch.float64)
BYTES = TARGETS.clamp(0).byte()
TRACED: Functions = {
    "containers that are edited": _edit,
    "lists in indices that change": _index,
    "nll_loss": _nll,
    "complex shapes": _shaped,
    "lists that grow": _append,
    "lists that change": _replace,
    "sizes that change": _resize,
    "targets of bytes": lambda y: F.cross_entropy(y, BYTES) * F.nll_loss(y, target=BYTES, weight=WEIGHT),
    "elements at a bound": lambda y: (
        _zeros(y).clamp(min=0) + _zeros(y).clamp_(-1, 0) * y + torch.clamp(y, max=y.detach())
    ),
    "equal elements": lambda y: _zeros(y).max(-1)[0] + torch.max(_zeros(y), 0, keepdim=True).values,
    "pools of equal elements": lambda y: (
        F.max_pool1d(_zeros(y)[None], [3], 1, 1)[0] + F.max_pool1d(_zeros(y), 2)[:, :1]
    ),
    "rows of zeros": lambda y: F.normalize(_zeros(y), dim=-1, eps=1.0) + F.normalize(y, p=3.0),
    "parts of nothing": lambda y: y * (len(y[:0].unbind(0)) + len(torch.unbind(y[:, :0], 1)) + 2),
    "multinomial": lambda y: y * (torch.multinomial(y[:, :1].exp(), 1) + 2),  # of one category
    "linspace": lambda y: sum(y * torch.linspace(-1.3, y.shape[0], n, dtype=y.dtype).cos().mean() for n in (1, 2, 7)),
    "argmin": lambda y: y * y.argmin(-1) + torch.argmin(y, dim=0, keepdim=True),
    "isfinite": lambda y: y * torch.isfinite(y / (y > 0)) + (y / (y > 0)).isfinite(),
    "dropout of features in evaluation": lambda y: F.dropout2d(y[0], 0.5, False) * F.feature_alpha_dropout(y[1], 0.5),
    "eye": lambda y: y @ torch.eye(4, dtype=y.dtype) + torch.eye(4, m=4),
    "a wide eye": lambda y: torch.eye(4, 5, dtype=torch.int64, device=y.device)[:, 1:] * y,
    "as_tensor": lambda y: torch.as_tensor(y) * torch.as_tensor([1.0, 2.0, 0.5, 3.0]),
    "as_tensor of a dtype": lambda y: torch.as_tensor(y, dtype=torch.float32),
    "binary cross entropies": _binary,
    "dictionaries that become empty": _clear,
    "inputs by keyword": lambda y: (
        F.layer_norm(input=F.relu(input=y), normalized_shape=(4,), weight=y[0])
        * F.softmax(input=y, dim=-1)
        * F.cross_entropy(input=y, target=torch.tensor([0, 1, 2, 1]), weight=torch.ones(4, dtype=y.dtype))
        + F.embedding(input=torch.tensor([0, 1, 2, 1]), weight=y)
    ),
    "norm": lambda y: y / y.norm(p=2, dim=-1, keepdim=True) + y.norm(p=1, dim=0) * torch.norm(y, p="fro", dim=(0, 1)),
    "norm of a matrix": lambda y: (
        y.norm(2) + y.norm(1) + torch.norm(y, 3) + y.norm(float("inf")) + y.norm(2, 1) + y.norm()
    ),
    "reshape": lambda y: y.reshape(shape=(16,)) * torch.reshape(y, shape=[16]).sum(),
    "parts": lambda y: sum((i + 1) * part.square().sum() for i, part in enumerate(_parts(y))),
    "products of matrices": lambda y: (
        y.mm(torch.addmm(y[0], y, y.mT, beta=0.5)) + y[:1].addmm(y[:1], y) + torch.mv(y, y[0])
    ),
    "repeat_interleave": lambda y: (
        torch.repeat_interleave(y, 2, dim=0, output_size=8) * y.repeat_interleave(2, 0, output_size=8)
    ),
    "grouped attention": _attend,
    "named results": lambda y: y.max(dim=-1).values * torch.min(y, dim=1, keepdim=True).values + y.topk(2).values.sum(),
    "named extremes": lambda y: y.aminmax(dim=0).max - torch.aminmax(y).min,
    "named indices": lambda y: y.sort(dim=-1, descending=True).values * torch.sort(y, dim=0).indices,
    "results without a rule of Thunder": lambda y: y.median(dim=-1).values + y.cummax(0).values * torch.mode(y).indices,
    "unpacked results": lambda y: torch.stack([value.double() for value in y.max(-1)]).sum(0) * len(y.max(-1)),
    "a slice of results": lambda y: y.max(-1)[:1][0] * y.min(-1)[0],
    "without a dimension": lambda y: y * y.max() + torch.max(y, -y) + torch.median(y),
    "an unused result without dimensions": lambda y: torch.var_mean(y)[0] + torch.std_mean(y)[1],
    "what needs no gradient": lambda y: y * y.detach().floor() * torch.hstack([y.detach()[:, :2], y.detach()[:, 2:]]),
    "another result": lambda y: torch.linalg.slogdet(y)[1],
    "round, straight through": lambda y: y + (y.round() - y).detach() * y,
    "floor": lambda y: torch.floor(y) + y.ceil(),
    "round": lambda y: y.round(),
    "trunc": lambda y: y.trunc() * y,
    "quotients": lambda y: torch.div(y, y[0] + 3, rounding_mode="trunc") + torch.div(y[0], y, rounding_mode="floor"),
    "bernoulli": lambda y: (y > 0).to(y.dtype).mul(y.sigmoid().ceil()).bernoulli(),
    "dropout of all": lambda y: F.dropout(y, 1.0) + F.alpha_dropout(y, 1.0, True) + F.dropout2d(y[None], 1.0)[0],
    "dropout of none": lambda y: F.dropout2d(y[None], 0.0)[0] * F.alpha_dropout(y, 0.0, True),
    "floor in place": lambda y: (y * 2).floor_(),
    "zeros in place": lambda y: (y * 2).zero_(),
    "a constant in place": lambda y: (y * 2).t().copy_(torch.ones(4, 4)),
}
"""Functions that are traced. Those that are constant have gradients of zeros."""
try:
    torch.aminmax(torch.ones(1, requires_grad=True)).min.backward()
except RuntimeError:  # torch 2.11 has no gradient for it
    del TRACED["named extremes"]

ROW = torch.tensor([0])
LEAVES: Functions = {
    "fractional_max_pool2d": lambda y: F.fractional_max_pool2d(
        y[None], 2, output_size=(2, 2), _random_samples=y.new_zeros(1, 1, 2)
    ),
    "multi_margin_loss": lambda y: F.multi_margin_loss(y, BYTES.long(), weight=WEIGHT),
    "soft_margin_loss": lambda y: F.soft_margin_loss(y, y.detach().sign()),
    "flip": lambda y: y.flip(0) + torch.flip(y, (0, 1)) * y,
    "heaviside": lambda y: torch.heaviside(y.detach(), y.new_ones(4)) * y,
    "hstack": lambda y: torch.hstack([y, y * 2]),
    "index_put": lambda y: y.index_put((ROW,), y[1] * y[2]),
    "index_add": lambda y: y.index_add(0, ROW, y[:1] * 2) + torch.zeros_like(y).index_add_(0, ROW, y[:1], alpha=3),
    "lerp": lambda y: y.lerp(y * y, 0.3) + (y * 2).lerp_(y, 0.5),
    "minimum": lambda y: torch.minimum(y, y * y),
    "__mod__": lambda y: y % 2.0,
    "remainder": lambda y: y.remainder(0.7) * (y * 2).remainder_(0.3),
    "pad": lambda y: F.pad(y[None], (1, 1), mode="reflect"),
    "unfold": lambda y: y.unfold(0, 2, 1) ** 2,
    "meshgrid": lambda y: torch.meshgrid([y[0], y[1]], indexing="ij")[0] * 2,
    "prod": lambda y: (y * torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=y.dtype)).prod(-1),
}
"""Functions that run as they are, under the names that a warning has."""

SMOOTHED: Functions = {
    "ignored": lambda y, t, w: F.cross_entropy(y, t, label_smoothing=0.1),
    "ignore_index": lambda y, t, w: F.cross_entropy(y, t.clamp(0, 2), ignore_index=2, label_smoothing=0.1),
    "weighted": lambda y, t, w: F.cross_entropy(y, t, w, label_smoothing=0.1),
    "positions": lambda y, t, w: F.cross_entropy(y.view(2, 2, 4).mT, t.view(2, 2), w, label_smoothing=0.1),
    "region": lambda y, t, w: checkpoint(lambda y: F.cross_entropy(y, t, label_smoothing=0.2), y, use_reentrant=False),
    "probabilities": lambda y, t, w: F.cross_entropy(y, torch.ones_like(y) / 4, label_smoothing=0.1),
}
"""Cross entropies of which Thunder's own are wrong."""


COMPLEX: Functions = {
    "rotary": lambda y: torch.view_as_real(_pairs(y) * torch.polar(torch.ones(8).double(), torch.arange(8).double())),
    "product": lambda y: torch.view_as_real((_pairs(y) * (1 + 2j) - _pairs(y * y)) / 2j),
    "power": lambda y: torch.view_as_real(_pairs(y) ** 2),
    "a constant": lambda y: y * torch.polar(y.new_ones(4, 4), y.new_ones(4, 4)).real,
    "exponential": lambda y: torch.view_as_real(torch.exp(_pairs(y))),
    "matrix": lambda y: torch.view_as_real(_pairs(y).view(2, 4) @ _pairs(y).view(4, 2).conj()),
    "parts": lambda y: _pairs(y).real * torch.imag(_pairs(y)) * 1j.imag,
    "converted": lambda y: (y.to(torch.complex128) * 1j).imag,
}
COMPLEX_OPERATORS = ("__mul__", "__sub__", "__truediv__", "pow", "exp", "__matmul__", "conj", "real", "imag")


@pytest.mark.parametrize(
    ("functions", "args", "leaves", "named"),
    [
        (TRACED, (), (), ()),
        (LEAVES, (), ("auto",), tuple(LEAVES)),
        (SMOOTHED, (TARGETS, WEIGHT), ("auto",), ("cross_entropy",)),
        (COMPLEX, (), ("auto",), COMPLEX_OPERATORS),
    ],
    ids=["traced", "leaves", "smoothed", "complex"],
)
def test_values_and_gradients_are_those_of_eager_mode(functions: Functions, args: Any, leaves: Any, named: Any) -> None:
    torch.manual_seed(0)
    both = Beside(AppliedEach(functions.values()).double(), leaf_modules=leaves)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        both.check_each(functions, torch.randn(4, 4, dtype=torch.float64), *args)
    texts = [str(each.message) for each in shown if "is not traced, but runs as it is" in str(each.message)]
    count = {name: sum(f"torch's {name} is" in text for text in texts) for name in named}
    expected = {**dict.fromkeys(named, 1), **({"flip": 2} if "flip" in named else {})}  # the function and the method
    assert count == expected and len(texts) == sum(expected.values()), texts


class _Special(nn.Module):
    """A function of two parameters with each pair of zeros, infinities, NaN and other numbers."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 2.0, -1.0, 0.5], dtype=dtype)
        self.function, (self.a, self.b) = (
            function,
            map(nn.Parameter, torch.cartesian_prod(numbers, numbers).T.contiguous()),
        )

    def forward(self) -> torch.Tensor:
        return self.function(self.a * 1, self.b * 1)


SPECIAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda a, b: torch.stack(
        [F.relu(a), (b * 1).relu_(), torch.relu(input=a), F.relu(b, inplace=True), a.relu()]
    ),
    "elu": lambda a, b: torch.stack([F.elu(a, 1.5), nn.ELU()(b), F.celu(a, 1.5), torch.celu(b)]),
    "selu": lambda a, b: F.selu(a) + nn.SELU()(b),
    "rounded quotients": lambda a, b: torch.div(a, b, rounding_mode="floor") + torch.div(b, a, rounding_mode="trunc"),
    "a rounded quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "powers of zero": lambda a, b: a**0 * b + b.pow(0.0) + torch.pow(a, 0),
    "hard": lambda a, b: F.hardsigmoid(a) + F.hardshrink(b) - F.softshrink(b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECIAL)
def test_zeros_and_numbers_that_are_not_finite_have_the_values_and_gradients_of_eager_mode(
    name: str, dtype: torch.dtype
) -> None:
    both = Beside(_Special(SPECIAL[name], dtype), leaf_modules=())
    outputs = [net() for net in both.both]
    for output in outputs:
        output.backward(torch.ones_like(output))
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    both.compare_gradients(rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("executors", [["torchcompile"], []], ids=["fused", "decomposed"])
def test_activations_that_are_decomposed_pass_on_what_is_not_finite(executors: list[str]) -> None:
    jit = {"executors": [*executors, *map(thunder.get_executor, ("torch", "python"))]}
    module = _Special(lambda a, b: torch.stack([a.relu(), F.elu(a), F.celu(a, 1.5), F.selu(a)]), torch.float32)
    both = Beside(module, jit=jit)
    outputs = [net() for net in both.both]
    for output in outputs:
        output.backward(torch.ones_like(output))
    torch.testing.assert_close(*outputs, equal_nan=True)
    both.compare_gradients(equal_nan=True)


def test_the_gradient_of_parts_is_one_concatenation() -> None:
    model = Beside(Applied(TRACED["parts"], 4)).model
    model(torch.ones(4, 4)).sum().backward()
    trace = str(thunder.last_backward_traces(model)[-1])
    assert "torch.cat(" in trace and "pad(" not in trace


@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), [(2, 4, 6), (3, 4, 6)]),
        (nn.InstanceNorm2d(4, track_running_stats=True, momentum=None), [(2, 4, 3, 3)]),
        (nn.BatchNorm1d(4), [(5, 4), (0, 4), (5, 4)]),
    ],
    ids=["instances", "instances without momentum", "batches, one of them empty"],
)
def test_running_statistics_are_those_of_eager_mode(norm: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    both = Beside(nn.Sequential(norm).double())
    for training in (True, False):
        for each in both.both:
            each.train(training)
        for shape in shapes:
            both.check(torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name in COMPLEX if name != "a constant"])
def test_the_strict_mode_refuses_gradients_of_complex_values(name: str) -> None:
    model = Beside(Applied(COMPLEX[name], 4).double(), leaf_modules=()).model
    with pytest.raises(NotImplementedError, check=coded("trace.wrong-gradient-of-complex")):
        model(torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["flip", "hstack", "pad", "meshgrid", "prod", "unfold", "weighted"])
def test_the_strict_mode_refuses_them(name: str) -> None:
    model = Beside(Applied({**LEAVES, **SMOOTHED}[name], 4).double(), leaf_modules=()).model
    with pytest.raises((NotImplementedError, RuntimeError)):
        model(torch.ones(4, 4, dtype=torch.float64), *((TARGETS, WEIGHT) if name in SMOOTHED else ())).sum().backward()


def test_a_list_that_native_code_has_changed_is_not_unpacked_with_its_former_items() -> None:
    def scale(y: torch.Tensor) -> torch.Tensor:
        values = [3.0, 1.0]
        heapq.heapify(values)
        first, second = values
        return y * first + second

    with pytest.warns(UserWarning, match="is not traced, but runs as it is"):
        Beside(nn.Sequential(Applied(scale, 4)).double()).check(torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y.masked_select(y > 0),
        lambda y: y[(y > 0).nonzero()],
        lambda y: F.cross_entropy(y.view(2, 2, 2, 2), torch.zeros(2, 2, 2, dtype=torch.uint8)),
        lambda y: y @ y[:3],
        lambda y: torch.flip(y, (7,)),
        lambda y: y.chunk(2, dims=1)[0],
    ],
    ids=["masked_select", "nonzero", "bytes", "a mistake", "a mistake in a leaf", "a mistake in a replaced function"],
)
def test_errors_stay_if_a_function_cannot_run_so(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with warnings.catch_warnings(), pytest.raises((NotImplementedError, RuntimeError, IndexError, TypeError)):
        warnings.filterwarnings("error", message="fsdp: .*runs as it is")
        Beside(Applied(call, 4)).model(torch.ones(4, 4))


@pytest.mark.parametrize("leaves", [(), ("1",)])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_scalars_have_the_default_dtype(default: torch.dtype, leaves: tuple[str, ...]) -> None:
    class Scalars(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tensor(0.1), torch.tensor(1), x * torch.tensor(0.1)

    both, x = Beside(nn.Sequential(nn.Linear(2, 2), Scalars()), leaf_modules=leaves), torch.ones(2, 2)
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            actual, expected = (net(x) for net in both.both)
        finally:
            torch.set_default_dtype(torch.float32)
        assert [(each.dtype, each.tolist()) for each in actual] == [(each.dtype, each.tolist()) for each in expected]


class _Attending(nn.Module):
    """Calls attention of torch with its options, and layers that contain it."""

    def __init__(self) -> None:
        super().__init__()
        made = partial(nn.MultiheadAttention, 4, 2, batch_first=True)
        self.plain = nn.ModuleList([made(), made(bias=False), made(add_bias_kv=True), made(add_zero_attn=True)])
        self.cross = made(kdim=2, vdim=2)
        self.layers = nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        y = self.cross(x, x[..., :2], x[..., 2:], key_padding_mask=padding, need_weights=False)[0]
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for attention in self.plain:
            y = y + attention(x, y, y, attn_mask=causal, need_weights=False)[0]
            y = y + attention(y, x, x, average_attn_weights=False)[1].sum((0, 1))[:, :1]
        return self.layers(x, y, tgt_mask=causal, tgt_is_causal=True)


def test_attention_of_torch_is_traced() -> None:
    x, padding = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[False, False, True], [False] * 3])
    Beside(_Attending().double(), leaf_modules=()).check(x, padding)


class _Results(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        assert x.max(-1)._fields == ("values", "indices")
        both = collections.OrderedDict(topk=[torch.topk(x, 2)], inner=collections.OrderedDict(max=x.max(-1)))
        return {"largest": x.max(-1), "both": both, "sum": x.sum()}


def test_forward_returns_plain_containers() -> None:
    x = torch.randn(3, 4)
    output = thunder.jit(_Results(), transforms=[fsdp(leaf_modules=())])(x)
    torch.testing.assert_close(output["largest"], tuple(x.max(-1)))
    assert type(output["both"]) is dict is type(output["both"]["inner"])
    torch.testing.assert_close(output["both"], {"topk": [tuple(torch.topk(x, 2))], "inner": {"max": tuple(x.max(-1))}})


class _Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@pytest.mark.parametrize("leaves", [(), ("0",)], ids=["traced", "leaf"])
def test_named_tuples_of_forward_are_refused_but_for_those_of_torch(leaves: tuple[str, ...]) -> None:
    makes = (lambda y: y.max(-1), lambda y: {"pairs": [_Pair(y, None)]})
    given, refused = (Beside(nn.Sequential(Applied(make, 4)), leaf_modules=leaves) for make in makes)
    x = torch.randn(3, 4)
    torch.testing.assert_close(given.model(x), tuple(given.module(x)))
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "named tuple (_Pair)")):
        refused.model(x)

"""Every kernel of `mixlab/engine/kernels` beside what PyTorch does in its place, in turn, best of several runs.

python benchmarks/kernels.py               # a minute or two on 2 quiet cores
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import mixlab
from mixlab.core.grid import Grid
from mixlab.engine.backends.depthwise import strip_gradient, strip_starts
from mixlab.engine.kernels import kernels
from mixlab.engine.kernels.attention import run_attention
from mixlab.engine.kernels.depthwise import convolve_channels, taps_gradient
from mixlab.engine.kernels.factor import run_factor
from mixlab.engine.kernels.linear import run_linear, run_weight
from mixlab.models.mixers.mlstm import ROWS, Mlstm, MlstmOptions
from mixlab.models.mixers.recurrent import RecurrentLayer
from mixlab.ops.attention import attention, join_heads, split_heads
from mixlab.ops.convattention import factorised_attention
from mixlab.ops.longconv import Form, long_conv
from mixlab.ops.mlstm_layer import MLSTM_LAYER
from mixlab.ops.recurrent import RECURRENT_MAPS

ROUNDS = 30
ONEDNN = torch.ops.mkldnn._linear_pointwise
LINEAR = (
    (25088, 64, 256),
    (25088, 256, 64),
    (6272, 128, 512),
    (1568, 320, 1280),
    (1568, 1280, 320),
    (392, 512, 2048),
    (196, 320, 1280),
    (49, 512, 2048),
    (49, 2048, 512),
)
DEPTHWISE = (  # sides, channels and kernels of convformer_s18, hpx_former_s18 and vil_tiny
    *((56, 128, 7), (28, 256, 7), (14, 640, 7), (7, 1024, 7)),
    *((56, 192, 5), (28, 384, 5), (14, 960, 5), (7, 1536, 5)),
    (14, 384, 3),
)
ATTENTION = ((196, 10, 32), (49, 16, 32), (197, 3, 64), (785, 3, 64))  # caformer_s18, deit_tiny
PLANES = ((56, 64), (28, 128), (14, 320), (7, 512))  # sides and channels of hpx_former_s18


def in_turn(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the best run of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def tell(what: str, best: dict[str, float]) -> None:
    ours, *others = best.items()
    rest = "; ".join(f"{name} {spent:.2f} ms, {spent / ours[1]:.2f} times" for name, spent in others)
    print(f"{what:44} {ours[0]} {ours[1]:.2f} ms; {rest}", flush=True)


def linear_layers() -> None:
    for rows, depth, columns in LINEAR:
        x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
        runs: dict[str, Callable[[], object]] = {
            "kernel": lambda x=x, w=weight, b=bias: run_linear(x, w, b),
            "oneDNN": lambda x=x, w=weight, b=bias: ONEDNN(x, w, b, "none", [], ""),
            "F.linear": lambda x=x, w=weight, b=bias: F.linear(x, w, b),
        }
        tell(f"linear {rows} x {depth} x {columns}", in_turn(runs))


def weight_gradients() -> None:
    for rows, wide, high in LINEAR[:6]:  # of the layers above with many rows
        gradient, x, out = torch.randn(rows, high), torch.randn(rows, wide), torch.empty(high, wide)
        runs: dict[str, Callable[[], object]] = {
            "kernel": lambda g=gradient, x=x, out=out: run_weight(g, x, out, None, adds=False),
            "BLAS": lambda g=gradient, x=x, out=out: torch.mm(g.t(), x, out=out),
        }
        tell(f"gradient of a weight, {rows} x {wide} x {high}", in_turn(runs))


def long_convolutions() -> None:
    for batch in (1, 8):
        for side, channels in PLANES:
            x, taps = torch.randn(batch, side, side, channels), torch.randn(2 * side - 1, 2 * side - 1, channels)
            forms: tuple[Form, ...] = ("native", "fft", "matrix")
            runs = {form: lambda x=x, taps=taps, form=form: long_conv(x, taps, form=form) for form in forms}
            tell(f"{batch} x {side} x {side} x {channels}, whole plane", in_turn(runs))
        line, taps = torch.randn(batch, 3136, 64), torch.randn(6271, 64)
        runs = {form: lambda x=line, taps=taps, form=form: long_conv(x, taps, form=form) for form in ("native", "fft")}
        tell(f"{batch} x 3136 x 64, whole sequence", in_turn(runs))


def depthwise_convolutions() -> None:
    for batch in (1, 8):
        for side, channels, kernel in DEPTHWISE:
            x, weight = torch.randn(batch, side, side, channels), torch.randn(channels, 1, kernel, kernel)
            image, around = x.permute(0, 3, 1, 2), (kernel // 2, kernel // 2)
            runs: dict[str, Callable[[], object]] = {
                "kernel": lambda x=x, w=weight, p=around: convolve_channels(x, w, None, p),
                "oneDNN": lambda x=image, w=weight, p=around: F.conv2d(x, w, None, padding=p, groups=len(w)),
            }
            tell(f"{kernel} x {kernel} over {batch} x {side} x {side} x {channels}", in_turn(runs))


def depthwise_gradients() -> None:
    for side, channels, kernel in DEPTHWISE:
        x, gradient = (torch.randn(8, side, side, channels) for _ in range(2))
        maps, around = [one.permute(0, 3, 1, 2) for one in (x, gradient)], (kernel // 2, kernel // 2)
        runs: dict[str, Callable[[], object]] = {
            "kernel": lambda x=x, g=gradient, k=kernel, p=around: taps_gradient(x, g, (k, k), p),
            "strips of oneDNN's": lambda m=maps, k=kernel, p=around: [
                strip_gradient(*m, (k, 3), p, start) for start in strip_starts(k)
            ],
        }
        tell(f"its kernels' gradient, {kernel} x {kernel}, 8 x {side} x {side} x {channels}", in_turn(runs))


def factorised_attentions() -> None:
    for batch in (1, 8):
        for tokens, channels in ((3137, 152), (785, 152), (3137, 64), (785, 128), (197, 320)):
            query, key, value = torch.randn(batch, tokens, 3 * channels).chunk(3, -1)
            near = torch.randn(batch, tokens - 1, channels)

            def plain(q: Tensor = query, k: Tensor = key, v: Tensor = value, near: Tensor = near) -> Tensor:
                mixed = factorised_attention(q, k, v, 8)
                mixed[:, 1:].addcmul_(q[:, 1:], near)
                return mixed

            about = {"scale": (channels // 8) ** -0.5, "near": near, "prefix": 1}
            runs: dict[str, Callable[[], object]] = {
                "kernel": lambda parts=(query, key, value), a=about: run_factor(*parts, 8, **a),
                "PyTorch": plain,
            }
            tell(f"factorised attention {batch} x {tokens} x {channels}", in_turn(runs))


def attentions() -> None:
    """Forwards, and both ways as a step of training goes."""
    for batch in (1, 8):
        for tokens, heads, width in ATTENTION:
            qkv = torch.randn(batch, tokens, 3 * heads * width)
            gradient = torch.randn(batch, tokens, heads * width)

            def plain(x: Tensor = qkv, heads: int = heads) -> Tensor:
                return join_heads(F.scaled_dot_product_attention(*split_heads(x, heads)))

            def trained(form: Callable[..., Tensor], x: Tensor = qkv, g: Tensor = gradient, heads: int = heads) -> None:
                x = x.clone().requires_grad_()
                torch.autograd.grad(form(x, heads), x, g)

            what = f"attention {batch} x {tokens} x {heads} heads of {width}"
            with torch.inference_mode():
                tell(what, in_turn({"kernel": lambda x=qkv, h=heads: run_attention(x, h), "PyTorch": plain}))
            runs: dict[str, Callable[[], object]] = {
                "kernel": lambda run=trained: run(attention),
                "PyTorch": lambda run=trained, form=plain: run(form),
            }
            tell(f"{what}, there and back", in_turn(runs))


def branches_in_one_call() -> None:
    """A block of each family for one image, as steps and layer by layer."""
    for name, side in (("vil_tiny", 14), ("vil_tiny", 28), ("convformer_s18", 56), ("convformer_s18", 14)):
        model = mixlab.create_model(name).eval()
        residual = model.stages[0 if side != 14 or name == "vil_tiny" else 2].blocks[0].token
        dim = residual.branches[0].norm.weight.numel()
        tokens, grid = torch.randn(1, side * side, dim), Grid(side, side)
        assert residual.fused(tokens, grid) is not None
        runs: dict[str, Callable[[], object]] = {
            "one call": lambda r=residual, x=tokens, g=grid: r(x, g),
            "layer by layer": lambda r=residual, x=tokens, g=grid: r.merge(x, r.update(x, g)),
        }
        tell(f"branch of {name}, {side * side} tokens of {dim}", in_turn(runs))


def lstm_layers() -> None:
    for batch in (1, 8):
        for side, dim in ((32, 192), (16, 384)):
            layers = [RecurrentLayer(dim, dim // 4, "lstm", bidirectional=True) for _ in range(2)]
            image = torch.randn(batch, side, side, dim)
            walks = [*layers[0].walks(vertical=True), *layers[1].walks(vertical=False)]
            weights = [weight for walk in walks for weight in walk.weights]
            ways = ([walk.vertical for walk in walks], [walk.backwards for walk in walks])
            runs = {
                "kernel": lambda x=image, w=weights, ways=ways: RECURRENT_MAPS.compute(x, w, "lstm", *ways),
                "PyTorch": lambda x=image, w=weights, ways=ways: RECURRENT_MAPS.reference(x, w, "lstm", *ways),
            }
            tell(f"LSTM over {batch} x {side} x {side} x {dim}", in_turn(runs))


def matrix_memories() -> None:
    for batch, side in ((1, 14), (8, 14), (1, 28), (1, 56)):
        layer = Mlstm(192, MlstmOptions(bias=True), ROWS).eval()
        parts, norm = [torch.randn(batch, side * side, 384) for _ in range(3)], layer.norm
        call = (*parts, *layer.cell(), norm.weight, norm.bias, layer.skip, "chunkwise", 0, norm.eps)
        runs = {
            "kernel": lambda call=call: MLSTM_LAYER.compute(*call),
            "PyTorch": lambda call=call: MLSTM_LAYER.reference(*call),
        }
        tell(f"mLSTM layer over {batch} x {side * side} x 192", in_turn(runs))


def main() -> None:
    found = kernels()
    if found is None:
        raise SystemExit("There are no kernels here: install Mixlab where there is a GCC.")
    print(f"vectors of {found.lanes}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        linear_layers()
        weight_gradients()
        long_convolutions()
        depthwise_convolutions()
        depthwise_gradients()
        factorised_attentions()
        lstm_layers()
        matrix_memories()
        branches_in_one_call()
    attentions()


if __name__ == "__main__":
    main()

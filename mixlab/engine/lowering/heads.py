"""The final norm with the pooling, and the head."""

from torch import nn

from mixlab.engine.draft import CannotLower, Draft, Tokens
from mixlab.engine.lowering.layers import activation, layer_norm
from mixlab.engine.steps import Place
from mixlab.models.heads import BilateralPool, ClassTokenPool, Head, LinearHead, MeanPool, MlpHead, Readout


def readout(draft: Draft, module: Readout, outputs: list[Tokens]) -> Place:
    """Features (B, width)."""
    used = outputs[-len(module.norms) :]
    mark, path = draft.mark(), draft.path(module)
    try:
        with draft.part(path):
            return pooled(draft, module, used)
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    grids = [tokens.grid for tokens in used]
    reads = [(tokens.place, tokens.shape) for tokens in used]
    return draft.call(lambda *all: module(list(zip(all, grids, strict=True))), (used[0].images, module.width), *reads)


def pooled(draft: Draft, module: Readout, used: list[Tokens]) -> Place:
    """The features of one scale."""
    draft.exactly(module, Readout)
    draft.require(len(used) == 1 and module.aggregate is None, "several scales are summed")
    draft.watch(module.norms)
    norm, tokens, pool = module.norms[0], used[0], module.pool
    draft.others.append(vars(pool))
    about = layer_norm(draft, norm, tokens.channels if module.norm_first else module.width)
    if module.norm_first and type(pool) is MeanPool:
        tokens = tokens._replace(place=draft.there(draft.norm(about, tokens.place, tokens.rows)))
    vectors = read(draft, pool, tokens)
    if module.norm_first and type(pool) is MeanPool:
        return vectors
    if module.norm_first:
        draft.require(module.width == tokens.channels * pool.parts, "a norm is over other channels")
        return draft.there(draft.norm(about, vectors, tokens.images * pool.parts))
    return draft.there(draft.norm(about, vectors, tokens.images))


def read(draft: Draft, pool: object, tokens: Tokens) -> Place:
    """The tokens of every image as one vector: their mean, or some of them side by side."""
    grid, channels = tokens.grid, tokens.channels
    if type(pool) is MeanPool:
        return draft.mean(tokens.place.at(grid.prefix * channels), tokens, grid.image_tokens)
    draft.require(type(pool) in (BilateralPool, ClassTokenPool), f"{type(pool).__name__} is not known to the engine")
    chosen = [grid.prefix, grid.tokens - 1] if type(pool) is BilateralPool else list(range(grid.prefix))
    assert isinstance(pool, BilateralPool | ClassTokenPool)
    draft.require(pool.parts == len(chosen), "class tokens are averaged")
    out = draft.claim(tokens.images * len(chosen) * channels)
    for index, token in enumerate(chosen):
        source = tokens.place.at(token * channels)
        strides = (grid.tokens * channels, channels), (len(chosen) * channels, channels)
        draft.put(source, out.at(index * channels), (tokens.images, 1, channels), *strides)
    return out


def head(draft: Draft, module: Head, features: Place, shape: tuple[int, int], classes: int) -> Place:
    """Class scores (B, classes)."""
    mark, path = draft.mark(), draft.path(module)
    width = classes or shape[1]
    try:
        with draft.part(path):
            scores = classified(draft, module, features, shape)
            draft.as_tensor(scores, (shape[0], width))
            return scores
    except CannotLower as reason:
        draft.rewind(mark)
        draft.pytorch(path, str(reason))
    return draft.call(module, (shape[0], width), (features, shape))


def classified(draft: Draft, module: Head, features: Place, shape: tuple[int, int]) -> Place:
    """The linear layers of a head."""
    draft.exactly(module, LinearHead, MlpHead)
    images, width = shape
    if isinstance(module, LinearHead) and module.norm is not None:
        features = draft.there(draft.norm(layer_norm(draft, module.norm, width), features, images))
    if isinstance(module, MlpHead):
        draft.exactly(module.dropout, nn.Dropout)
        draft.require(not module.dropout.training, "a dropout is in training mode")
        after, then = activation(draft, module.act)
        weights = draft.linear_weights(module.fc, width)
        width = len(weights[0])
        hidden = draft.linear(weights, features, images, after, then)
        features = draft.there(draft.norm(layer_norm(draft, module.norm, width), hidden, images))
    return draft.linear(draft.linear_weights(module.classifier, width), features, images)

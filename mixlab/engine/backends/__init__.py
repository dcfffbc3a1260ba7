"""Who serves the operators of `mixlab.ops`: our own kernels and oneDNN. Importing this package registers them."""

from mixlab.engine.backends import attention as attention
from mixlab.engine.backends import convattention as convattention
from mixlab.engine.backends import depthwise as depthwise
from mixlab.engine.backends import heads as heads
from mixlab.engine.backends import linear as linear
from mixlab.engine.backends import longconv as longconv
from mixlab.engine.backends import maps as maps
from mixlab.engine.backends import mlp as mlp
from mixlab.engine.backends import recurrent as recurrent

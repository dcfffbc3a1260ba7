"""How long a model takes to compile block by block, beside a trivial function, both with a cold cache.

python benchmarks/compile_time.py caformer_s18
"""

import argparse
import time

import torch
import torch._inductor.utils

import mixlab
from mixlab.deploy import compile_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=224)
    arguments = parser.parse_args()
    image = torch.randn(arguments.batch, 3, arguments.image_size, arguments.image_size)
    model = mixlab.create_model(arguments.name).eval()
    with torch.inference_mode(), torch._inductor.utils.fresh_cache():
        expected = model(image)
        start = time.perf_counter()
        torch.compile(lambda x: x * 2 + 1)(torch.randn(8))
        trivial = time.perf_counter() - start
        start = time.perf_counter()
        ours = compile_blocks(model)(image)
        whole = time.perf_counter() - start
    difference = ((ours - expected).abs().max() / expected.std()).item()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - 1
    print(f"a trivial function, first in this process: {trivial:.1f} s")
    print(f"{arguments.name}, after it: {whole:.1f} s for {graphs} graphs")
    print(f"outputs differ from eager by {difference:.1e} of their std")


if __name__ == "__main__":
    main()

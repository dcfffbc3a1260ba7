"""One model on a photo-sized image, then the same frame with other mixers."""

import time

import torch

import mixlab


def main() -> None:
    torch.manual_seed(0)
    photo = torch.randn(1, 3, 480, 640)  # a normalized 640 x 480 image; random until there is data
    for mixers in (None, ["pool", "sepconv", "sepconv", "window_attention"]):
        overrides = {} if mixers is None else {"mixers": mixers}
        model = mixlab.create_model("caformer_s18", num_classes=10, **overrides).eval()
        with torch.inference_mode():
            model(photo)  # warm-up
            start = time.perf_counter()
            logits = model(photo)
            milliseconds = 1000 * (time.perf_counter() - start)
            maps = model.pyramid(photo)
        names = ", ".join(choice.name for choice in model.config.mixers)
        print(f"\ncaformer_s18 with {names}: {mixlab.macs(model, (480, 640)) / 1e9:.1f} GMACs, {milliseconds:.0f} ms")
        print(f"  logits   {tuple(logits.shape)}")
        for stride, level in zip(model.strides, maps, strict=True):
            print(f"  stride {stride:2}  {tuple(level.shape)}")


if __name__ == "__main__":
    main()

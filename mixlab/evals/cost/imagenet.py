"""How long an epoch of ImageNet is."""

IMAGENET = 1_281_167  # training images of ImageNet-1K
IMAGENET_21K = 14_197_122

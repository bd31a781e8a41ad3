"""The networks of the paper, which take every stem, width and sub-network. Reading the names needs no torch."""

NAMED = ("resnet18", "resnet34", "resnet50", "resnet101", "wrn16_8", "vgg16_bn", "efficientnet_b0")

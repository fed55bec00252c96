"""Models of libraries that read images."""

from __future__ import annotations

from typing import Any

from torch import nn

from padded_library_models import IMAGE, ask, ask_as, load

# timm -----------------------------------------------------------------------------------------------------------------


def timm(name: str, as_: str, times: int, **options: Any) -> None:
    def build() -> nn.Module:
        return load("timm:create_model")(name, in_chans=4, num_classes=3, **options)

    ask_as("timm", as_, build, IMAGE, 1, times)


timm("convnext_atto", "ConvNeXt", 32, dims=(4, 8, 8, 8), depths=(1, 1, 1, 1))
timm("resnet10t", "ResNet", 8, stem_width=4, channels=(4, 8, 8, 8))
timm("mobilenetv3_small_050", "MobileNetV3", 8)
timm(
    "vit_tiny_patch16_224",
    "ViT, any size",
    4,
    dynamic_img_size=True,
    img_size=32,
    patch_size=4,
    embed_dim=8,
    depth=1,
    num_heads=2,
)
ask(
    "timm.models._efficientnet_blocks:InvertedResidual",
    4,
    4,
    as_="EfficientNet block, same padding",
    stride=2,
    pad_type="same",
    inputs=IMAGE,
    times=3,
)

# vit-pytorch ----------------------------------------------------------------------------------------------------------

STAGES = {f"s{n}_{what}": size for n in (1, 2, 3) for what, size in (("emb_dim", 4), ("depth", 1), ("heads", 1))}

ask("vit_pytorch.cvt:CvT", num_classes=3, channels=4, inputs=IMAGE, times=8, **STAGES)
ask("vit_pytorch.vit_1d:Transformer", 4, 1, 2, 2, 8)
ask("vit_pytorch.mobile_vit:MobileViTBlock", 4, 1, 4, 3, (2, 2), 8, inputs=IMAGE, times=2)
ask("vit_pytorch.max_vit:MBConv", 4, 4, downsample=True, inputs=IMAGE, times=2)
ask("vit_pytorch.vit_with_patch_merger:PatchMerger", 4, 3)

# others ---------------------------------------------------------------------------------------------------------------

PLANE = {"spatial_dims": 2, "in_channels": 4, "out_channels": 2}

ask("lambda_networks:LambdaLayer", 4, dim_k=2, r=3, heads=2, inputs=IMAGE)
ask("axial_attention:AxialAttention", 4, heads=2, dim_index=1, inputs=IMAGE)
ask("axial_attention:AxialImageTransformer", 4, 1, heads=2, reversible=False, inputs=IMAGE)
ask("monai.networks.nets:UNet", channels=(4, 8), strides=(2,), inputs=IMAGE, times=2, **PLANE)
ask("monai.networks.nets:BasicUNet", features=(4, 4, 4, 4, 4, 4), inputs=IMAGE, times=16, **PLANE)
ask("monai.networks.nets:SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), inputs=IMAGE, times=2, **PLANE)
ask("monai.networks.nets:DenseNet", init_features=4, growth_rate=2, block_config=(1, 1), inputs=IMAGE, times=8, **PLANE)
ask("kornia.filters:GaussianBlur2d", (3, 3), (1.0, 1.0), inputs=IMAGE, least=2)
ask("kornia.filters:Sobel", inputs=IMAGE, least=2)
ask("kornia.geometry.subpix:SpatialSoftArgmax2d", inputs=IMAGE, least=2)

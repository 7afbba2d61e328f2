"""Published weights: read without running anything in them, renamed where a hub has other names, checked strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError

Weights = dict[str, Tensor]
# What stands on an encoder in a published model, and is left behind.
_CLASSIFIERS = ("fc.", "_fc.", "head.", "heads.", "classifier.", "pooler.", "pre_logits.", "fc_norm.", "head_dist.")


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Return the tensors of a .safetensors file, or of a PyTorch state dict read with `weights_only`."""
    file = Path(path)
    if not file.is_file():
        raise ProblemError(f"there is no file {os.fspath(path)!r}: download the weights first, and pass their path.")
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        # Hubs publish state dicts in this form; `weights_only` admits tensors and plain containers and runs no code.
        content = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:
        raise ProblemError(f"{os.fspath(path)!r} holds no weights that can be read safely: {error}") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ProblemError(f"{os.fspath(path)!r} is no state dict: expected a mapping of names to tensors.")
    return {str(name): value for name, value in content.items()}


def load_published(encoder: nn.Module, weights: Mapping[str, Tensor] | str | os.PathLike[str]) -> None:
    """Load published weights into an encoder of ours, every one of them or none.

    Names of torchvision, timm and transformers are understood. A published classifier is left behind; any other
    name or shape that does not fit is an error.

    Args:
        encoder: A `ResNet`, `ViT` or `EfficientNetLite`; the upper layers of one take what is theirs.
        weights: A state dict, or the path of one.
    """
    renamed = _renamed(dict(weights) if isinstance(weights, Mapping) else read_weights(weights))
    own = encoder.state_dict()
    missing = [name for name in own if name not in renamed and not name.endswith("num_batches_tracked")]
    left = (*_CLASSIFIERS, *getattr(encoder, "layers_below", ()))
    extra = [name for name in renamed if name not in own and not name.startswith(left)]
    if missing or extra:
        raise ProblemError(
            f"these weights are not of a {type(encoder).__name__} like this one: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for what, names in (("missing", missing), ("unknown", extra))
                if names
            )
        )
    for name in own:
        if name in renamed and renamed[name].shape != own[name].shape:
            raise ProblemError(
                f"{name!r} has shape {list(renamed[name].shape)}, and {list(own[name].shape)} in this "
                f"{type(encoder).__name__}: make it with the published model's options (depth, image, patch)."
            )
    encoder.load_state_dict({**own, **{name: renamed[name] for name in own if name in renamed}})


def _renamed(weights: Weights) -> Weights:
    """Return weights under our names, which are those of torchvision's ResNets and timm's ViTs."""
    names = [name.removeprefix("module.") for name in weights]
    plain = dict(zip(names, weights.values(), strict=True))
    if any("patch_embeddings.projection." in name for name in names):
        return _joined(_translate(plain, _vit_of_transformers))
    if any(".self_attention.in_proj_weight" in name for name in names):
        return _translate(plain, _vit_of_torchvision)
    if any(".embedder.convolution.weight" in name for name in names):
        return _translate(plain, _resnet_of_transformers)
    if "_conv_stem.weight" in names:
        return _translate(plain, _efficientnet)
    return plain


def _translate(weights: Weights, rule: Callable[[str], str]) -> Weights:
    return {rule(name): value for name, value in weights.items()}


def _replace(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in pairs:
        name = re.sub(pattern, new, name)
    return name


def _vit_of_transformers(name: str) -> str:
    return _replace(
        name.removeprefix("vit."),
        (
            (r"^embeddings\.cls_token", "cls_token"),
            (r"^embeddings\.position_embeddings", "pos_embed"),
            (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
            (r"^(encoder\.layer|layers)\.", "blocks."),  # files have the first name, transformers 5 the second
            (r"\.attention\.(attention\.query|q_proj)\.", ".attn.query."),
            (r"\.attention\.(attention\.key|k_proj)\.", ".attn.key."),
            (r"\.attention\.(attention\.value|v_proj)\.", ".attn.value."),
            (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
            (r"\.layernorm_before", ".norm1"),
            (r"\.layernorm_after", ".norm2"),
            (r"\.intermediate\.dense", ".mlp.fc1"),
            (r"\.output\.dense", ".mlp.fc2"),
            (r"^layernorm\.", "norm."),
        ),
    )


def _joined(weights: Weights) -> Weights:
    """Join the query, key and value of every block into one matrix."""
    result = {name: value for name, value in weights.items() if not re.search(r"\.attn\.(query|key|value)\.", name)}
    for name, value in weights.items():
        if ".attn.query." in name:
            parts = [value, *(weights[name.replace(".query.", f".{other}.")] for other in ("key", "value"))]
            result[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return result


def _vit_of_torchvision(name: str) -> str:
    return _replace(
        name,
        (
            (r"^class_token", "cls_token"),
            (r"^conv_proj", "patch_embed.proj"),
            (r"^encoder\.pos_embedding", "pos_embed"),
            (r"^encoder\.layers\.encoder_layer_", "blocks."),
            (r"\.ln_1", ".norm1"),
            (r"\.ln_2", ".norm2"),
            (r"\.self_attention\.in_proj_", ".attn.qkv."),
            (r"\.self_attention\.out_proj", ".attn.proj"),
            (r"\.mlp\.(linear_1|0)\.", ".mlp.fc1."),
            (r"\.mlp\.(linear_2|3)\.", ".mlp.fc2."),
            (r"^encoder\.ln\.", "norm."),
        ),
    )


def _resnet_of_transformers(name: str) -> str:
    def block(match: re.Match[str]) -> str:
        return f"layer{int(match[1]) + 1}.{match[2]}."

    def part(match: re.Match[str]) -> str:
        return f"{'conv' if match[2] == 'convolution' else 'bn'}{int(match[1]) + 1}"

    name = name.removeprefix("resnet.")
    name = re.sub(r"^embedder\.embedder\.convolution", "conv1", name)
    name = re.sub(r"^embedder\.embedder\.normalization", "bn1", name)
    name = re.sub(r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", block, name)
    name = re.sub(r"layer\.(\d+)\.(convolution|normalization)", part, name)
    return _replace(name, ((r"shortcut\.convolution", "downsample.0"), (r"shortcut\.normalization", "downsample.1")))


def _efficientnet(name: str) -> str:
    """Names of efficientnet_lite_pytorch: blocks are layers 1 to 16, between the stem and the last convolution."""
    parts = {"expand_conv": "expand.0", "bn0": "expand.1", "depthwise_conv": "filter.0", "bn1": "filter.1"}
    parts |= {"project_conv": "project.0", "bn2": "project.1"}

    def block(match: re.Match[str]) -> str:
        return f"layers.{int(match[1]) + 1}.{parts[match[2]]}."

    return _replace(
        re.sub(r"^_blocks\.(\d+)\._(\w+)\.", block, name),
        (
            (r"^_conv_stem\.", "layers.0.0."),
            (r"^_bn0\.", "layers.0.1."),
            (r"^_conv_head\.", "layers.17.0."),
            (r"^_bn1\.", "layers.17.1."),
        ),
    )

"""A backbone of torchvision or timm, and an embedding layer on it."""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from rambo_plugins.demo.train import conv_net


class EmbeddingNet(nn.Module):
    """Images (B, 1 or 3, H, W) to embeddings (B, D): ``embedding(trunk(images))``, not normalised.

    Args:
        trunk: images (B, ``channels``, H, W) to features.
        embedding: features to (B, D).
        channels: 1: colour images are averaged to grey ones; 3: grey images are repeated.
        freeze_bn: batch norm keeps its statistics in training; its weight and bias still learn.
        chunk: the two-stage step. In training with gradients, embed so many images at a time and keep none of their
            activations; the backward pass embeds each chunk again, with the same random numbers (dropout), and takes
            its gradient. The gradient is that of the whole batch and memory that of one chunk, for one more forward
            pass. Batch norm that is not frozen sees one chunk at a time, and its statistics are those of a chunk.
    """

    def __init__(
        self,
        trunk: nn.Module,
        embedding: nn.Module,
        channels: int = 3,
        *,
        freeze_bn: bool = False,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.trunk, self.embedding = trunk, embedding
        self.channels, self.freeze_bn, self.chunk = channels, freeze_bn, chunk

    def forward(self, images: Tensor) -> Tensor:
        if self.chunk is None or not torch.is_grad_enabled():
            return self._embed(images)
        return torch.cat(
            [
                checkpoint(self._embed, part, use_reentrant=False, context_fn=self._contexts)
                for part in images.split(self.chunk)
            ]
        )

    def train(self, mode: bool = True) -> EmbeddingNet:
        super().train(mode)
        if self.freeze_bn:
            for norm in self.norms():
                norm.eval()
        return self

    def _embed(self, images: Tensor) -> Tensor:
        if images.shape[1] != self.channels:
            images = images.mean(1, keepdim=True) if self.channels == 1 else images.expand(-1, self.channels, -1, -1)
        return self.embedding(self.trunk(images))

    def norms(self) -> list[_BatchNorm]:
        return [module for module in self.modules() if isinstance(module, _BatchNorm)]

    def _contexts(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        return contextlib.nullcontext(), self._still_statistics()

    @contextlib.contextmanager
    def _still_statistics(self) -> Iterator[None]:
        """The second pass leaves the running statistics to the first."""
        momenta = [(norm, norm.momentum) for norm in self.norms()]
        try:
            for norm, _ in momenta:
                norm.momentum = 0.0
            yield
        finally:
            for norm, momentum in momenta:
                norm.momentum = momentum


def build_net(
    backbone: str, embedding_size: int, weights: str = "none", *, freeze_bn: bool = False, chunk: int | None = None
) -> EmbeddingNet:
    """A new network.

    Args:
        backbone: "convnet", the demo's, for images of 28 × 28; a classification model of torchvision, whose last linear
            layer is replaced by the embedding layer; or "timm/NAME".
        embedding_size: D.
        weights: "none"; "DEFAULT", pretrained on ImageNet, downloaded unless it was before; or a file: a state dict of
            the backbone, alone or as ``{"model": ...}``, or a checkpoint of this command, embedding layer included.
        freeze_bn, chunk: see ``EmbeddingNet``.

    Raises:
        ValueError: an unknown backbone, or weights that do not fit or cannot be had.
        ImportError: timm is not installed.
    """
    pretrained = weights == "DEFAULT"
    channels = 3
    if backbone == "convnet":
        if pretrained:
            raise ValueError("--weights DEFAULT: there are none for convnet, expected none or a file")
        net = conv_net(embedding_size)
        trunk, embedding, channels = net[:-2], net[-2:], 1
    else:
        trunk, features = _timm(backbone[5:], pretrained) if backbone[:5] == "timm/" else _vision(backbone, pretrained)
        embedding = nn.Linear(features, embedding_size)
    built = EmbeddingNet(trunk, embedding, channels, freeze_bn=freeze_bn, chunk=chunk)
    if weights not in ("none", "DEFAULT"):
        _load(built, Path(weights))
    return built


def _vision(name: str, pretrained: bool) -> tuple[nn.Module, int]:
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name, ["convnet", *names]) or ["resnet50"]
        raise ValueError(
            f"--backbone {name}: expected convnet, timm/NAME or a classification model of torchvision, "
            f"such as {', '.join(near)}"
        )
    if name in ("googlenet", "inception_v3") or name.startswith("squeezenet"):
        raise ValueError(f"--backbone {name}: expected a model with one output, from a linear layer")
    try:
        model = torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None)
    except OSError as error:
        raise ValueError(
            f"--weights DEFAULT: no weights of {name} ({error}); without internet access give a file that holds them, "
            "or none"
        ) from error
    last = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    features = model.get_submodule(last).in_features
    parent, _, attribute = last.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())
    return model, features


def try_out(net: EmbeddingNet, image: Tensor, what: str) -> None:
    """Embeds two images like this one.

    Raises:
        ValueError: the network cannot, for example because it is made for images of another size.
    """
    parameter = next(net.parameters())
    training = net.training
    net.eval()
    try:
        with torch.no_grad():
            net(torch.zeros(2, *image.shape, device=parameter.device, dtype=parameter.dtype))
    except (RuntimeError, AssertionError, ValueError) as error:  # what the models of torchvision and timm say
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{what}: cannot embed images of {image.shape[1]} × {image.shape[2]}: {said}") from error
    net.train(training)


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, int]:
    try:
        import timm
    except ModuleNotFoundError as error:
        raise ImportError(f"--backbone timm/{name} needs timm: pip install timm", name="timm") from error
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except (RuntimeError, OSError) as error:  # an unknown name; no network
        raise ValueError(f"--backbone timm/{name}, --weights {'DEFAULT' if pretrained else 'none'}: {error}") from error
    return model, getattr(model, "head_hidden_size", None) or model.num_features


def load_file(path: Path, what: str, option: str = "") -> Any:
    """What torch saved there, on the CPU.

    Raises:
        ValueError: no such file, or another kind of file; it says ``what`` was expected, and for which ``option``.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{option}{path}: no such {what}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        said = str(error).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):  # torch advises to run whatever the file says
            said = "torch did not save it, or it holds more than tensors and plain values"
        raise ValueError(f"{option}{path} cannot be read as a {what}: {said}") from error


def _load(net: EmbeddingNet, path: Path) -> None:
    state = load_file(path, "file of weights", "--weights ")
    state = state.get("model", state) if isinstance(state, dict) else {}
    whole = any(name.startswith("trunk.") for name in state)
    target = net if whole else net.trunk
    try:
        missing, _ = target.load_state_dict(state, strict=whole)  # a backbone's file holds its classifier too
    except RuntimeError as error:
        raise ValueError(f"--weights {path}: of another network: {' '.join(str(error).split())[:300]}") from error
    if missing:
        raise ValueError(f"--weights {path}: of another network: {len(missing)} entries are not there, as {missing[0]}")

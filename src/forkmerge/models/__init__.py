"""The paper's architectures. Any `nn.Module` works with the library; nothing else in it imports these.

ResNets and transformers have no classifier of their own: `Classifier` puts heads on any encoder, `DenseModel` and
`MTAN` put DeepLab heads on a dilated ResNet.
"""

from forkmerge.models._bytes import ByteLanguageModel
from forkmerge.models._dense import ASPP, MTAN, DeepLabHead, DenseModel
from forkmerge.models._efficientnet import EfficientNetLite, imagenet_weights
from forkmerge.models._heads import Backbone, Classifier
from forkmerge.models._recommend import ESMM, Fields, MMoE
from forkmerge.models._resnet import ResNet, WideResNet
from forkmerge.models._teacher import WithTeacher
from forkmerge.models._vit import ViT
from forkmerge.models._weights import load_published, read_weights

__all__ = [
    "ASPP",
    "ESMM",
    "MTAN",
    "Backbone",
    "ByteLanguageModel",
    "Classifier",
    "DeepLabHead",
    "DenseModel",
    "EfficientNetLite",
    "Fields",
    "MMoE",
    "ResNet",
    "ViT",
    "WideResNet",
    "WithTeacher",
    "imagenet_weights",
    "load_published",
    "read_weights",
]

"""The scikit-learn estimator `ProtoNetClassifier`, a layer over `protonet.pipeline.TablePipeline`."""

from protonet.errors import optional_packages

with optional_packages("sklearn"):
    from protonet.estimator.classifier import ProtoNetClassifier

__all__ = ["ProtoNetClassifier"]

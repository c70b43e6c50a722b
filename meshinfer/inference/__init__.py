"""The inference domain: what a transport promises, and one file or folder per transport."""

from __future__ import annotations

from meshinfer.inference.protocol import InferenceClient, InferenceFuture, InferenceTransport
from meshinfer.inference.resolver import inference_transport_kind, make_inference_transport

__all__ = [
    "InferenceClient",
    "InferenceFuture",
    "InferenceTransport",
    "inference_transport_kind",
    "make_inference_transport",
]

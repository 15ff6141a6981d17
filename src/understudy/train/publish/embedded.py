"""Weights for our own server of the embedded model, which speaks vLLM's control endpoints."""

from __future__ import annotations

from understudy.train.publish.vllm import VLLMPublisher


class EmbeddedPublisher(VLLMPublisher):
    """Has the embedded model's server load a directory in place (see Publisher)."""

    ways = ("disk", "lora")
    missing = "start the embedded model's server with --weights: scripted policies have none"
    missing_lora = missing

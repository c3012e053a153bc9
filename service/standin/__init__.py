"""The stand-in generator: SGLang's protocol without a model, for demos and tests where there is no GPU.

It says so in its logs and in `/server_info`. What it answers has the shape of what SGLang 0.5.23 answers; what it "samples" comes from a
policy file, seeded; its ids are cut differently from the tokenizer's own encoding, since a model's are too.
"""

from service.standin.policy import drawn_lengths, load_policy
from service.standin.server import create_standin, serve_standin

__all__ = ["create_standin", "drawn_lengths", "load_policy", "serve_standin"]

"""Serving engines that move to the versions which a client stages: SGLang, vLLM, or a function of yours.

client = weightvc.Client("s3://bucket/policy", into=weightvc.Slots("/local/slots"))
engine = weightvc.engines.SGLang("http://127.0.0.1:30000", mode="retract")
for update in client.follow("main", also=engine.behind):
    pause = engine.activate(update)
"""

from weightvc.engines.base import Engine, Pause
from weightvc.engines.callback import Callback
from weightvc.engines.sglang import SGLang
from weightvc.engines.vllm import VLLM

__all__ = ["VLLM", "Callback", "Engine", "Pause", "SGLang"]
